"""Natural steps of a continuum memory's levels: `theta <- theta - rate G A^-1`.

A step `Delta` of a matrix moves what the model says to its usual inputs x by `Delta x`: in the mean
over them by `tr(Delta A Delta^T)`, with `A = E[x x^T]` the second moment of these inputs. The step
that lowers the loss of new text most at a given price of this kind is `G A^-1` (the input side of
K-FAC, Martens and Grosse 2015; the accumulated constraints of Kohonen's and MEMIT's memories):
directions that every text uses hardly move, those that only this text needs take up what is new.

A is a buffer of the model, an average over what it reads while it is trained, and saved with it. It
is taken relative to its mean diagonal, so that rates mean the same with inputs of any length, and
damped: `R = (A / mean(diag A) + DAMPING I)^-1`. White inputs give plain gradient descent.

Shapes: D width, F hidden width, L levels, n tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

DAMPING = 0.1
"""Share of the mean second moment added to all directions: the hardly ever seen is uncertain."""

PACE = 0.05
"""How much of the average each observation replaces."""


class InputMoments(nn.Module):
    """Second moments of what goes into a channel's levels, and into their hidden layers.

    shared: all levels read the same input (levels side by side).
    """

    def __init__(self, width: int, hidden: int, levels: int, *, shared: bool) -> None:
        super().__init__()
        self.register_buffer("inputs", torch.empty(1 if shared else levels, width, width))
        self.register_buffer("hidden", torch.empty(levels, hidden, hidden))
        self.inputs: Tensor
        self.hidden: Tensor
        self.made: dict[str, tuple[Any, Tensor]] = {}  # inverses, and what they were made of
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """White inputs: natural steps are plain ones until something is seen."""
        with torch.no_grad():
            for moment in (self.inputs, self.hidden):
                moment.copy_(torch.eye(moment.shape[-1]).expand_as(moment))

    def inverse(self, layer: str, level: int) -> Tensor:
        """`R` for the matrices of a level that read its input ("inputs") or its hidden layer."""
        moments: Tensor = getattr(self, layer)
        level = min(level, len(moments) - 1)
        source = (moments.data_ptr(), moments._version, moments.dtype, moments.device)
        kept = self.made.get(layer)
        if kept is None or kept[0] != source:
            kept = self.made[layer] = (source, inverse_of(moments))
        return kept[1][level]

    @torch.no_grad()
    def observe(self, layer: str, level: int, x: Tensor) -> None:
        """Take inputs [n, D] or [n, F] into the average, unless one of them is not finite."""
        moments: Tensor = getattr(self, layer)
        old = moments[min(level, len(moments) - 1)]
        rows = x.detach().to(torch.promote_types(old.dtype, torch.float32))
        seen = (rows.mT @ rows / max(1, rows.shape[0])).to(old.dtype)
        good = torch.isfinite(seen).all()
        old.copy_(torch.where(good, torch.lerp(old, torch.nan_to_num(seen), PACE), old))


def inverse_of(moments: Tensor) -> Tensor:
    """`(A / mean(diag A) + DAMPING I)^-1` of matrices [..., D, D]."""
    exact = moments.detach().to(torch.promote_types(moments.dtype, torch.float32))
    mean = exact.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30)
    eye = torch.eye(exact.shape[-1], dtype=exact.dtype, device=exact.device)
    damped = exact / mean[..., None, None] + DAMPING * eye
    return torch.cholesky_inverse(torch.linalg.cholesky(damped))


def natural_step(model: nn.Module, slot: str) -> Tensor:
    """`R` [Di, Di] of one of a model's own slots."""
    moments, layer, level = moments_of(model, slot)
    return moments.inverse(layer, level)


def observe_inputs(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Take the inputs [n, Di] of slots into the averages; levels that share one are asked once."""
    done = set()
    for slot, x in inputs.items():
        moments, layer, level = moments_of(model, slot)
        place = moments, layer, min(level, len(getattr(moments, layer)) - 1)
        if place not in done:
            moments.observe(layer, level, x)
            done.add(place)


def moments_of(model: nn.Module, slot: str) -> tuple[InputMoments, str, int]:
    """Which average a slot's inputs belong to: `...channel.mlps.LEVEL.up.weight`."""
    path, _, rest = slot.rpartition(".mlps.")
    level, leaf, _ = rest.split(".")
    moments: Any = getattr(model.get_submodule(path), "moments", None)
    if not isinstance(moments, InputMoments):
        raise ValueError(f"slot {slot!r}: its channel keeps no second moments (natural=False)")
    return moments, "hidden" if leaf == "down" else "inputs", int(level)
