"""Delta gradient descent that retains what earlier inputs read (Eq. 59).

DGD (Eq. 56-57) takes the exact proximal step on the present batch and measures the change of a
linear map W in the plain norm, so a change is as cheap along directions that earlier inputs use as
along fresh ones. Generalised gradient descent (Eq. 59) leaves the retention term open. Here it
counts every input x_s the map has served, and a prior `keep` (lam):

    W+ = argmin_W  sum_i <g_i, (W - W_t) x_i> + 1/2 |(W - W_t) x_i|^2                 (this batch)
                   + 1/2 sum_{s earlier} |(W - W_t) x_s|^2 + lam/2 |W - W_t|^2        (retention)
       = W_t - G P,      P = (lam I + sum over all inputs, these too, of x x^T)^-1,

with g_i the gradient at the output for row i and `G = sum_i g_i x_i^T`. For a squared error this is
recursive least squares: after any stream W is the ridge regression on all of it, in one pass and
without a buffer. `P` is a memory of inputs of size Di x Di. No task boundaries are needed.

Shapes: n rows, Di inputs, Do outputs; W and G [..., Do, Di], P [..., Di, Di].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.rules.core import Gates, Rule, State, Write, factory

_PIECE = 64


class Retained(NamedTuple):
    """The memory of inputs P."""

    memory: Tensor  # [..., Di, Di]


def retain_inputs(memory: Tensor, x: Tensor) -> Tensor:
    """`P = (P^-1 + x^T x)^-1` for rows x [..., n, Di], by Woodbury's identity in pieces."""
    for rows in x.split(_PIECE, dim=-2):
        read = rows @ memory  # [..., n, Di]
        gram = rows @ read.mT  # [..., n, n]
        gram = gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        memory = memory - read.mT @ torch.linalg.solve(gram, read)
    return memory


def retaining_step(
    weight: Tensor, grad: Tensor, memory: Tensor, x: Tensor, rate: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Weight and memory after a batch: Eq. 59 with retention in the metric of all inputs.

    `grad` is summed over the rows x. `rate=1` is the exact step of the module's docstring.
    """
    memory = retain_inputs(memory, x)
    return weight - rate * (grad @ memory), memory


@factory
def retaining(
    keep: float = 100.0, *, mean: bool = False, dtype: torch.dtype = torch.float64
) -> Rule:
    """The retaining step as a rule (Eq. 59); it needs the inputs of the write.

    `keep` is the prior's strength in units of squared input: the larger, the slower the first
    writes. `mean`: the loss is a mean over the rows. The memory is kept in float64: with a weak
    prior and skewed inputs a float32 one blows up; with a strong prior `dtype=torch.float32` will
    do, in half the time.
    """
    require(keep > 0.0, "retaining: keep", keep, "above 0")

    def init(weight: Tensor) -> State:
        size = weight.shape[-1]
        eye = torch.eye(size, dtype=dtype, device=weight.device) / keep
        return Retained(eye.expand(*weight.shape[:-2], size, size).clone())

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        if write.x is None:
            raise ValueError("retaining needs the inputs of the write; got none")
        x = write.x.to(dtype)
        memory = retain_inputs(state.memory, x)
        grad = write.grad.to(dtype) * (x.shape[-2] if mean else 1)
        return write._replace(grad=(grad @ memory).to(weight.dtype)), Retained(memory)

    return Rule(init, step, needs_pairs=True)
