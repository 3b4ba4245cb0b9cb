"""What is adapted: the last MLP of the base model, cut into levels, and a readout of classes.

`Top` is the base model above the cut of `features.py`. A readout sees the stream below the MLP, the
last hidden state above it, and `wide` units `relu(E x)` that never learn (a level of frequency 0):
E is random after whitening, so that the readout has room for many classes. Centres, scales and the
whitening are those of general text (`Base.text`); nothing of the stream is used for them.

The MLP is split over k levels by hidden units, `x + sum_l MLP_l(norm(x))`: neither the function nor
the number of parameters changes, so k = 1 and k = 4 are the same model before learning (ad-hoc
level stacking, 7.3). A Hope's chain of MLPs (Eq. 70) has its levels already; k groups them.

Shapes: N rows, D width, F hidden, C classes.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from nestling.continuum import Chain, FeedForward
from studies.continual.base import Base
from studies.continual.features import Features

__all__ = ["READOUTS", "Split", "Top", "make_top"]

READOUTS = ("head", "label")


class Split(nn.Module):
    """`x + sum_l MLP_l(norm(x))`: a (gated) MLP whose hidden units belong to k levels (Eq. 74).

    `gate` is None for a plain MLP. Every level owns its rows of `up` and `gate` and its columns of
    `down`.
    """

    def __init__(
        self, norm: nn.Module, up: Tensor, gate: Tensor | None, down: Tensor, act: Any, k: int
    ) -> None:
        super().__init__()
        if not 1 <= k <= up.shape[0]:
            raise ValueError(f"levels must be between 1 and {up.shape[0]} hidden units; got {k}")
        self.norm, self.act = norm, act
        self.up = _pieces(up, k, 0)
        self.gate = None if gate is None else _pieces(gate, k, 0)
        self.down = _pieces(down, k, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        z = self.norm(x)
        out = x
        for level, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            hidden = up(z)  # [N, F/k]
            if self.gate is None:
                hidden = self.act(hidden)
            else:
                hidden = self.act(self.gate[level](z)) * hidden
            out = out + down(hidden)
        return out

    def levels(self) -> list[list[nn.Linear]]:
        """The linear maps of each level."""
        parts = [self.up, self.down] if self.gate is None else [self.up, self.gate, self.down]
        return [[cast(nn.Linear, p[level]) for p in parts] for level in range(len(self.up))]


class Grouped(nn.Module):
    """A chain of MLPs (Eq. 70), its members grouped into k levels, fastest first."""

    def __init__(self, chain: Chain, k: int) -> None:
        super().__init__()
        if not 1 <= k <= len(chain.mlps):
            raise ValueError(f"levels must be between 1 and {len(chain.mlps)}; got {k}")
        self.chain, self.k = chain, k

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        for norm, mlp in zip(self.chain.norms, self.chain.mlps, strict=True):
            x = x + mlp(norm(x))
        return x

    def levels(self) -> list[list[nn.Linear]]:
        """The linear maps of each level."""
        groups: list[list[nn.Linear]] = [[] for _ in range(self.k)]
        members = len(self.chain.mlps)
        for number, mlp in enumerate(self.chain.mlps):
            found = [m for m in mlp.modules() if isinstance(m, nn.Linear)]
            groups[number * self.k // members] += found
        return groups


class Top(nn.Module):
    """The adapted part: levels, the frozen final norm, and a readout of all classes.

    readout "head": a linear layer that starts at zero, over what `read` gives. "label": the frozen
    embedding of the label texts in the model's output space, over the last hidden state; it learns
    nothing. `text` [M, D]: rows to centre and scale `read` by, and to whiten the wide units' input.
    """

    def __init__(
        self,
        channel: Split | Grouped,
        norm: nn.Module,
        readout: str,
        labels: Tensor,
        text: Tensor | None = None,
        *,
        wide: int = 1000,
    ) -> None:
        super().__init__()
        if readout not in READOUTS:
            raise ValueError(f"readout must be one of {', '.join(READOUTS)}; got {readout!r}")
        self.channel, self.norm, self.readout = channel, _frozen(norm), readout
        self.register_buffer("centre", torch.zeros(1))
        self.register_buffer("scale", torch.ones(1))
        classes, width = labels.shape
        self.register_buffer("expand", _expansion(width, wide, text))
        with torch.no_grad():
            sample = self.read(torch.zeros(1, width) if text is None else text)
            if text is not None:
                self.centre, self.scale = sample.mean(0), 1.0 / sample.std(0).clamp(min=1e-3)
            self.width = sample.shape[1]
            scaled = labels / labels.norm(dim=1).mean().clamp(min=1e-6)  # rates as for a head
            start = torch.zeros(classes, self.width) if readout == "head" else scaled
        self.head = nn.Linear(start.shape[1], classes, bias=readout == "head")
        self.head.weight = nn.Parameter(start, requires_grad=readout == "head")
        if readout == "head":
            nn.init.zeros_(self.head.bias)

    def hidden(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D]: the model's last hidden state."""
        out: Tensor = self.norm(self.channel(x))
        return out

    def read(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, R]: the stream below (at root mean square 1), last hidden state, units."""
        below = x * x.square().mean(1, keepdim=True).clamp(min=1e-12).rsqrt()
        expand = cast(Tensor, self.expand)
        units = torch.relu(x @ expand[:-1] + expand[-1])
        rows = torch.cat([below, self.hidden(x), units], dim=1)
        return (rows - self.centre) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, C]."""
        out: Tensor = self.head(self.read(x) if self.readout == "head" else self.hidden(x))
        return out

    def levels(self) -> list[list[nn.Parameter]]:
        """The adapted weights of each level, fastest first; a head that learns is in the first."""
        found = [
            [cast(nn.Parameter, layer.weight) for layer in level] for level in self.channel.levels()
        ]
        if self.head.weight.requires_grad:
            found[0] += list(self.head.parameters())
        return found

    def adapted(self) -> list[nn.Parameter]:
        """All weights a method may change."""
        return [weight for level in self.levels() for weight in level]


def make_top(
    base: Base, features: Features, *, levels: int = 1, readout: str = "head", wide: int = 1000
) -> Top:
    """The adapted part of a base model, a copy; equal to the base model before learning."""
    model = base.model
    layer: Any = model.model.layers[-1]
    norm = copy.deepcopy(model.model.norm)
    if hasattr(layer, "mlp"):  # Llama and its kin
        mlp, first = layer.mlp, copy.deepcopy(layer.post_attention_layernorm)
        weights = (mlp.up_proj.weight, mlp.gate_proj.weight, mlp.down_proj.weight)
        channel: Split | Grouped = Split(_frozen(first), *weights, mlp.act_fn, levels)
    elif isinstance(layer.channel, FeedForward):
        mlp, first = layer.channel.mlp, copy.deepcopy(layer.channel.norm)
        weights = (mlp.up.weight, mlp.gate.weight, mlp.down.weight)
        channel = Split(_frozen(first), *weights, nn.functional.silu, levels)
    elif isinstance(layer.channel, Chain):
        chain = copy.deepcopy(layer.channel)
        _frozen(chain.norms)
        channel = Grouped(chain, levels)
    else:
        raise ValueError(f"cannot adapt a channel memory of type {type(layer.channel).__name__}")
    return Top(channel, norm, readout, features.labels, features.text, wide=wide)


def _expansion(width: int, wide: int, text: Tensor | None) -> Tensor:
    """[D + 1, wide]: centre and whiten by text [M, D], then random directions; the offset last."""
    directions = torch.randn(width, wide) / width**0.5
    if text is None:
        return torch.cat([directions, torch.zeros(1, wide)])
    centre = text.mean(0)
    spread = torch.cov(text.T).double()
    spread.diagonal().add_(1e-3 * spread.diagonal().mean())
    size, axes = torch.linalg.eigh(spread)
    whiten = (axes * size.rsqrt()) @ axes.mT  # [D, D]
    mapped = whiten.float() @ directions
    return torch.cat([mapped, -(centre @ mapped).unsqueeze(0)])


def _frozen(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


def _pieces(weight: Tensor, k: int, dim: int) -> nn.ModuleList:
    made = []
    for part in weight.detach().tensor_split(k, dim):
        linear = nn.Linear(part.shape[1], part.shape[0], bias=False)
        linear.weight = nn.Parameter(part.clone().contiguous())
        made.append(linear)
    return nn.ModuleList(made)
