"""How strongly memories write, seen while they run: what training asks of the tokens of noise.

    with watched(model) as seen:
        model(input_ids=ids)
    loss = loss + loudness(seen(), noise)

A fact is kept over millions of tokens only if these write nothing. Their writes are known in
training, where it is known which tokens are noise, so they can be asked for in short texts. The
memories of the first layer are left alone: they may write every word they read, and so forget a
sentence when the next ones come, and what the layers above take for a fact depends on that sentence
alone. The same is asked of every model whose memories have gates that say how strongly a token
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nestling.memories.linear import TokenGates
from nestling.memories.steered import Steered
from nestling.memories.titans import Titans

__all__ = ["loudness", "watched"]

MARGIN = 8.0
"""A gate counts as shut at minus this, before its sigmoid: 0.0003 of a full write."""
LOUDEST = 0.01
"""The share of a batch's noise that is asked once more, where gates are most open."""
MORE = 0.1
"""The weight of the loudest beside the mean of all."""


class _Seen:
    """A rule that keeps how strongly each token wants to write, before weak writes are cut off."""

    def __init__(self, rule: Any, heads: int, kept: list[Tensor]) -> None:
        self.rule, self.heads, self.kept = rule, heads, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def rate_and_retain(self, raw: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        each = raw.unflatten(0, (-1, self.heads)) if raw.dim() == 3 else raw  # [B, H, T, 2]
        self.kept += [each[..., 0]] if self.rule.tied else [each[..., 0], -each[..., 1]]
        made: tuple[Tensor, Tensor] = self.rule.rate_and_retain(raw, valid)
        return made


@contextmanager
def watched(model: Any) -> Iterator[Callable[[], list[Tensor]]]:
    """How far the gates above the first layer are open, each [B, H, T], since it was last asked.

    In logits. Of Hope's memories the share of a full write (what they keep is tied to it); of
    Titans' and the delta rules' the rate, and what is forgotten, where that is a gate. Others have
    none.
    """
    kept: list[Tensor] = []
    rules: list[tuple[Any, Any]] = []
    hooks = []

    def gated(module: Any, _: Any, made: tuple[Tensor, Tensor]) -> None:
        rate, retain = made
        most = 2.0 if module.config.negative else 1.0
        open_ = (rate / most, 1 - retain) if retain.requires_grad else (rate / most,)
        kept.extend(torch.logit(share, eps=1e-6) for share in open_)

    for layer in model.model.layers[1:]:
        for module in layer.modules():
            if isinstance(module, Steered | Titans):
                rules.append((module, module.rule))
                module.rule = _Seen(module.rule, module.config.heads, kept)  # type: ignore[assignment]
            elif isinstance(module, TokenGates):
                hooks.append(module.register_forward_hook(gated))

    def seen() -> list[Tensor]:
        found = kept[:]
        kept.clear()
        return found

    try:
        yield seen
    finally:
        for module, rule in rules:
            module.rule = rule
        for hook in hooks:
            hook.remove()


def loudness(seen: list[Tensor], noise: Tensor) -> Tensor:
    """How far gates are from shut over the tokens of noise ([B, T] bool), mean and loudest.

    It grows evenly however far a gate is open: of a sigmoid near 1 the slope would vanish. 0 where
    there is no gate or no noise.
    """
    if not seen or not bool(noise.any()):
        return torch.zeros(())
    where = noise.unsqueeze(1)
    found = []
    for gate in seen:
        each = softplus(gate.masked_select(where.expand_as(gate)) + MARGIN)
        most = each.topk(max(1, round(LOUDEST * each.numel()))).values
        found.append(each.mean() + MORE * most.mean())
    return torch.stack(found).mean()
