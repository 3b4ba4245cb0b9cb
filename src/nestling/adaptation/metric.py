"""Natural steps: learn a text with the least change to what the model says already.

How much a small change `Delta` of a weight matrix moves a model's own predictions is, to second
order, about `1/2 s tr(Delta A Delta^T)` nats per token: A is the second moment of the matrix's
inputs, and s that of the gradient at each of its outputs, both over text the model wrote itself
(K-FAC, Martens and Grosse 2015, with an isotropic output side, which forgot less in trials). The
step that lowers the loss of a new text most at a given cost is therefore `G A^-1`: inputs the model
sees all the time hardly move anything, those it does not need take up what is new. Each chunk's
step is scaled to cost `budget` nats by this measure: a trust region of the same size in every
model.

`A` is kept as its leading directions and a constant for all others, so that a metric needs `size`
vectors per slot, and is applied by two thin products.

Shapes: B sequences, n tokens, Di inputs, Do outputs, K kept directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.adaptation.own_text import own_texts
from nestling.continuum.engine import Engine
from nestling.continuum.fast import Reading
from nestling.losses import pair_losses

DAMPING = 0.1
"""Share of the mean second moment added to all directions, for what a short sample misses."""


class SlotCost(NamedTuple):
    """The cost of one slot's steps: `scale (I - basis diag(held) basis^T)` is `A^-1 / s`."""

    basis: Tensor  # [Di, K], orthonormal
    held: Tensor  # [K], in [0, 1): how much of a step each direction holds back
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """`x A^-1 / s` for inputs [..., Di]."""
        kept = (x @ self.basis) * self.held
        return (x - kept @ self.basis.mT) * self.scale


class Metric:
    """The cost of steps, for every slot; made by `measure_metric` and given to a `Continuum`."""

    def __init__(self, costs: Sequence[SlotCost], budget: float) -> None:
        self.costs, self.budget = tuple(costs), budget

    def __call__(self, slots: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Inputs and surprises whose mean product is the step of `budget` nats."""
        mapped, price = [], torch.zeros(())
        for (x, surprise), cost in zip(slots, self.costs, strict=True):
            exact, told = x.to(cost.basis.dtype), surprise.to(cost.basis.dtype)
            new = cost(exact)
            # <G, G A^-1 / s> of every sequence, from the pairs alone: [B]
            price = price + ((exact @ new.mT) * (told @ told.mT)).sum((-2, -1))
            mapped.append((new, told))
        learned = (slots[-1][1] != 0).any(-1).sum(-1)  # [B]: pairs that are to be learned
        scale = learned * (2.0 * self.budget / price.clamp(min=1e-30)).sqrt()
        return [(x, surprise * scale.view(-1, 1, 1)) for x, surprise in mapped]


def model_metric(engine: Engine, budget: float) -> Metric:
    """The metric of a model by its own text; measured once and shared by all its learners."""
    names = tuple(slot.name for slot in engine.slots)
    with own_texts.lock:
        found = own_texts.beside(engine.model)
        if names not in found:
            texts = own_texts(engine.model).measured
            found[names] = measure_metric(engine, texts, budget=budget).costs
        return Metric(found[names], budget)


def measure_metric(engine: Engine, texts: Tensor, *, budget: float, size: int = 512) -> Metric:
    """The metric of a model by its own `texts` [rows, length] (`own_text.sample_text`)."""
    model: Any = engine.model
    live = engine.live(engine.init(1))
    still = {"learn": False} if getattr(model, "learns", False) else {}  # its own levels rest
    found: list[list[tuple[Tensor, Tensor]]] = []
    with torch.inference_mode(False), torch.enable_grad():
        for row in texts.clone().split(1):
            reading = Reading(live, 1, record=True)
            with reading:
                logits = model(input_ids=row[:, :-1], **still).logits
            loss = pair_losses(logits, row[:, 1:]).sum()
            found.append(engine.surprises(reading, loss, graph=False, keep=False))
    costs = []
    for number in range(len(engine.slots)):
        rows = [each[number] for each in found]
        inputs, surprises = (torch.cat([pair[side][0] for pair in rows]) for side in (0, 1))
        costs.append(_cost(inputs, surprises, size))
    return Metric(costs, budget)


def _cost(inputs: Tensor, surprises: Tensor, size: int) -> SlotCost:
    """The inverse of the inputs' damped second moment, by its leading directions: [n, Di]."""
    exact = inputs.detach().to(torch.promote_types(inputs.dtype, torch.float32))
    count, width = exact.shape
    _, values, directions = torch.linalg.svd(exact / count**0.5, full_matrices=False)
    moments = values.square()
    kept = min(size, len(moments))
    rest = float(moments[kept:].sum()) / max(width - kept, 1)
    floor = max(DAMPING * float(moments.sum()) / width + rest, 1e-30)
    leading = (moments[:kept] - rest).clamp(min=0.0)
    outer = max(float(surprises.detach().double().square().mean()), 1e-30)
    return SlotCost(
        directions[:kept].mT.contiguous(), leading / (leading + floor), 1.0 / (floor * outer)
    )
