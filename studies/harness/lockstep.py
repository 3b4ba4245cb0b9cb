"""Several Hope models at once: their memories share one scan, everything else runs by itself.

At chunk 1 a scan of few and small memories costs little more than the calls it makes, whatever
their number. Models of the same configuration but with weights, seeds and data of their own go
through it together; each gets exactly the gradients it would get alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nestling.memories.self_modifying import SelfModifying
from nestling.scan.self_modifying import scan_self_modifying
from nestling.tree import tree_map


class Lockstep(nn.Module):
    """Models in a list; [tokens of each] -> [logits of each]. Shorter rows are filled up."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, ids: list[Tensor]) -> list[Tensor]:
        wholes = [m.model for m in self.models]  # causal language models
        sizes = [i.shape[1] for i in ids]
        ids = [pad(i, (0, max(sizes) - i.shape[1])) for i in ids]
        xs = [w.model.embed_tokens(i) for w, i in zip(wholes, ids, strict=True)]
        for layers in zip(*(w.model.layers for w in wholes), strict=True):
            normed = [layer.norm(x) for layer, x in zip(layers, xs, strict=True)]
            ys = mix([layer.mixer for layer in layers], normed)
            both = zip(layers, xs, ys, strict=True)
            xs = [layer.channel(x + y, None, None)[0] for layer, x, y in both]
        ends = zip(wholes, xs, sizes, strict=True)
        return [w.lm_head(w.model.norm(x))[:, :size] for w, x, size in ends]


def mix(mixers: list[SelfModifying], xs: list[Tensor]) -> list[Tensor]:
    """What `mixer(x)` says, for every mixer and its own x [B, T, D], by one scan."""
    states = [mixer.init(x.shape[0]) for mixer, x in zip(mixers, xs, strict=True)]
    opened = [
        mixer.shell.open(x, state.tail, None)
        for mixer, x, state in zip(mixers, xs, states, strict=True)
    ]
    inputs = [mixer._inputs(part, None) for mixer, part in zip(mixers, opened, strict=True)]
    folded = [tree_map(lambda w: w.flatten(0, 1), state.weights) for state in states]
    together, weights = (
        tree_map(lambda *parts: torch.cat(parts), *parts) for parts in (inputs, folded)
    )
    y, _, _ = scan_self_modifying(mixers[0].rule, together, weights, weights, 0)
    parts = y.split([part.x.shape[0] for part in inputs])
    return [
        mixer.shell.close(part.unflatten(0, (x.shape[0], -1)), some.gate)
        for mixer, part, x, some in zip(mixers, parts, xs, opened, strict=True)
    ]
