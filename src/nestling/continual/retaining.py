"""Delta gradient descent that retains what earlier inputs read: a rule for continual levels.

DGD (Eq. 56-57) takes the exact proximal step on the present batch and measures the change of a
linear map W in the plain norm, so a change is as cheap along directions that earlier inputs use as
along fresh ones. Generalised gradient descent (Eq. 59) leaves the retention term open. Here it
counts every input x_s the map has served, and a prior `keep` (lam):

    W+ = argmin_W  sum_i <g_i, (W - W_t) x_i> + 1/2 |(W - W_t) x_i|^2                 (this batch)
                   + 1/2 sum_{s earlier} |(W - W_t) x_s|^2 + lam/2 |W - W_t|^2        (retention)
       = W_t - G P,      P = (lam I + sum over all inputs, these too, of x x^T)^-1,

with g_i the gradient at the output for row i and `G = sum_i g_i x_i^T`. For a squared error this is
recursive least squares: after any stream W is the ridge regression on all of it, in one pass and
without a buffer. `P` is a memory of inputs of size Di x Di, and it learns at its level's clock.
No task boundaries are needed.

Shapes: n rows, Di inputs, Do outputs; W and G [Do, Di], P [Di, Di].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nestling.optim import Capture

__all__ = ["Retaining", "retain_inputs", "retaining_step"]

_PIECE = 64


def retain_inputs(memory: Tensor, x: Tensor) -> Tensor:
    """`P = (P^-1 + x^T x)^-1` for rows x [n, Di], by Woodbury's identity in pieces."""
    for rows in x.split(_PIECE):
        read = rows @ memory  # [n, Di]
        gram = rows @ read.mT  # [n, n]
        gram.diagonal().add_(1.0)
        memory = memory - read.mT @ torch.linalg.solve(gram, read)
    return memory


def retaining_step(
    weight: Tensor, grad: Tensor, memory: Tensor, x: Tensor, rate: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Weight and memory after a batch: Eq. 59 with retention in the metric of all inputs.

    `grad` is summed over the rows x. `rate=1` is the exact step of the module's docstring.
    """
    memory = retain_inputs(memory, x)
    return weight - rate * (grad @ memory), memory


class Retaining(Optimizer):
    """`retaining_step` on the captured weights of `nn.Linear` layers, at a level's clock (Eq. 71).

        Retaining(weights, lr=1.0, keep=100.0, inputs=capture(model))

    The loss is a mean over rows. `chunk` steps are collected before the level changes. `keep` is
    the prior's strength in units of squared input: the larger, the slower the first writes. The
    memory is kept in float64: with a weak prior and skewed inputs a float32 one blows up.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        *,
        inputs: Capture,
        keep: float = 100.0,
        chunk: int = 1,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"Retaining: lr must be at least 0; got {lr}")
        if not keep > 0.0:
            raise ValueError(f"Retaining: keep must be above 0; got {keep}")
        if chunk < 1:
            raise ValueError(f"Retaining: chunk must be at least 1; got {chunk}")
        self.inputs = inputs
        super().__init__(params, {"lr": lr, "keep": keep, "chunk": chunk, "position": 0})
        for group in self.param_groups:
            for weight in group["params"]:
                if not inputs.covers(weight):
                    raise ValueError(
                        "Retaining: every weight must belong to a captured nn.Linear; got one of"
                        f" shape {tuple(weight.shape)} that does not"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collect this step; move and retain where a chunk is full."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["position"] += 1
            for weight in group["params"]:
                if weight.grad is not None:
                    self._collect(weight)
                if group["position"] % group["chunk"] == 0 and "grad" in self.state[weight]:
                    self._release(weight, group)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and captured pairs together."""
        super().zero_grad(set_to_none)
        self.inputs.clear()

    def _collect(self, weight: Tensor) -> None:
        state, x = self.state[weight], self.inputs.pairs(weight).x
        assert weight.grad is not None
        grad = weight.grad * x.shape[0]  # the sum over the rows
        state["grad"] = state["grad"] + grad if "grad" in state else grad
        state.setdefault("rows", []).append(x)

    def _release(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if "memory" not in state:
            eye = torch.eye(weight.shape[1], dtype=torch.float64, device=weight.device)
            state["memory"] = eye / group["keep"]
        x, grad = torch.cat(state.pop("rows")).double(), state.pop("grad").double()
        exact = weight.double()
        moved, state["memory"] = retaining_step(exact, grad, state["memory"], x, group["lr"])
        weight.copy_(moved)
