"""Learning the initial states: the outer objective of in-context learning (Eq. 72-74)."""

from __future__ import annotations

import torch
from torch import Tensor

from nestling.continuum.continuum import Continuum
from nestling.continuum.core import ContinuumState, Output
from nestling.continuum.plan import TRANSFERS
from nestling.continuum.slots import weight_of

__all__ = ["meta_loss"]


def meta_loss(
    continuum: Continuum,
    ids: Tensor,
    state: ContinuumState | None = None,
    *,
    meta: str = "first_order",
    learn: bool | Tensor = True,
) -> tuple[Tensor, Output]:
    """The mean loss of text that is learned while it is read; call `.backward()` on it (Eq. 73).

    The initial state of every level is the model's own weight there; `meta` says how it learns
    (deviation 14). All other parameters are trained by the plain gradient in any case.

    frozen: it does not. first_order: by the gradient at the adapted weights. reptile: towards the
    adapted weights (its gradient is `-mean_b Delta` at the end). second_order: by the true
    gradient, through every update, as are the rates.
    """
    if meta not in TRANSFERS:
        raise ValueError(f"meta must be one of {TRANSFERS}; got {meta!r}")
    output = continuum(ids, state, learn=learn, meta="frozen" if meta == "reptile" else meta)
    loss = output.losses[~output.losses.isnan()].mean()
    if meta != "reptile":
        return loss, output
    pull = torch.zeros_like(loss)
    for slot in continuum.slots:
        delta = continuum.delta(output.state, slot.name)
        weight, transposed = weight_of(continuum.model, slot.name)
        if delta is not None and weight.requires_grad:
            end = delta.detach().mean(0)
            pull = pull - (weight * (end.mT if transposed else end).to(weight.dtype)).sum()
    return loss + (pull - pull.detach()), output
