"""How strongly memories write, seen while they run: what training asks of the tokens of noise.

    with watched(model) as seen:
        model(input_ids=ids)
    loss = loss + loudness(seen(), noise)

A fact is kept over millions of tokens only if these write next to nothing. Their writes are known
in training, where it is known which tokens are noise, so they can be asked for in short texts. The
same is asked of every model whose memories have gates that say how strongly a token writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nestling.memories.linear import Gates
from nestling.memories.steered import Small, Steered

__all__ = ["loudness", "shares", "watched"]


class _Seen:
    """A rule that keeps how strongly each token wants to write, before weak writes are cut off."""

    def __init__(self, rule: Any, kept: list[Tensor]) -> None:
        self.rule, self.kept = rule, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def rate_and_retain(self, raw: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.kept.append(torch.sigmoid(raw[..., 0]))
        made: tuple[Tensor, Tensor] = self.rule.rate_and_retain(raw, valid)
        return made


@contextmanager
def watched(model: Any) -> Iterator[Callable[[], list[Tensor]]]:
    """What the gates of a model's memories let through, each [B, H, T], since it was last asked.

    Of Hope's memories, main and small, the share of a full write (what they keep is tied to it); of
    the delta rules the rate, and what is forgotten, where that is a gate. Others have none.
    """
    kept: list[Tensor] = []
    rules: list[tuple[Any, Any]] = []
    hooks = []

    def gated(_: Any, __: Any, made: tuple[Tensor, Tensor]) -> None:
        rate, retain = made
        kept.extend((rate, 1 - retain) if retain.requires_grad else (rate,))

    for module in model.modules():
        if isinstance(module, Steered | Small):
            rules.append((module, module.rule))
            module.rule = _Seen(module.rule, kept)  # type: ignore[assignment]
        elif isinstance(module, Gates):
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


def shares(seen: list[Tensor], noise: Tensor) -> list[Tensor]:
    """The mean of each gate over the tokens of noise ([B, T] bool)."""
    where = noise.unsqueeze(1)
    return [gate.masked_select(where.expand_as(gate)).mean() for gate in seen]


def loudness(seen: list[Tensor], noise: Tensor) -> Tensor:
    """The mean of all gates over the tokens of noise; 0 where there is no gate or no noise."""
    if not seen or not bool(noise.any()):
        return torch.zeros(())
    return torch.stack(shares(seen, noise)).mean()
