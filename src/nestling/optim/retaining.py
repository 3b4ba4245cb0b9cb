"""The retaining rule on the weights themselves: linear maps that keep what earlier inputs read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nestling.checks import require
from nestling.levels import due
from nestling.optim.inputs import Capture, require_capture
from nestling.optim.shell import ExactState, check_rate, loss_of
from nestling.rules.retaining import retain_inputs, retaining


class Retaining(ExactState):
    """The retaining rule (Eq. 59) on captured `nn.Linear` weights, at a level's clock (Eq. 71).

        Retaining(weights, lr=1.0, keep=100.0, inputs=capture(model))

    The loss is a mean over rows. `chunk` steps are collected before the weights change, each from
    the same weights, as a level of Eq. 71 does. `keep` is the prior's strength in units of squared
    input, `dtype` that of the memory of inputs (see `nestling.rules.retaining`); weights of a group
    that read the same input share one. With a squared error and `lr=1` the weights are the ridge
    regression on all rows so far.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        *,
        inputs: Capture,
        keep: float = 100.0,
        chunk: int = 1,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.inputs = require_capture(inputs)
        check_rate(lr)
        defaults = {"lr": lr, "keep": keep, "chunk": chunk, "dtype": dtype, "position": 0}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add weights with their own settings (checked at once)."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        check_rate(group["lr"])
        require(group["keep"] > 0.0, "keep", group["keep"], "a number above 0")
        require(group["chunk"] >= 1, "chunk", group["chunk"], "a whole number of at least 1")
        for weight in group["params"]:
            if not self.inputs.covers(weight):
                raise ValueError(
                    "Retaining: every weight must belong to a captured nn.Linear; got one of"
                    f" shape {tuple(weight.shape)} that does not"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collect this step; move and retain where a chunk is full."""
        loss = loss_of(closure)
        for group in self.param_groups:
            group["position"] += 1
            if group["lr"] == 0:
                continue
            for weight in group["params"]:
                if weight.grad is not None:
                    self._collect(weight)
            if due(group["position"], group["chunk"]):
                self._release(group)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and captured pairs together."""
        super().zero_grad(set_to_none)
        self.inputs.clear()

    def _collect(self, weight: Tensor) -> None:
        state, x = self.state[weight], self.inputs.inputs(weight)
        assert weight.grad is not None
        grad = weight.grad * x.shape[0]  # the sum over the rows
        state["grad"] = state["grad"] + grad if "grad" in state else grad
        state.setdefault("rows", []).append(x)

    def _release(self, group: dict[str, Any]) -> None:
        """Move and retain; a memory of the same rows is made once."""
        known: dict[tuple[int, ...], Tensor] = {}
        for weight in group["params"]:
            state = self.state[weight]
            if "grad" not in state:
                continue
            rows, grad = state.pop("rows"), state.pop("grad")
            read = tuple(x.data_ptr() for x in rows)
            if read not in known:
                if "memory" not in state:
                    rule = retaining(group["keep"], dtype=group["dtype"])
                    state["memory"] = rule.init(weight).memory
                known[read] = retain_inputs(state["memory"], torch.cat(rows).to(group["dtype"]))
            state["memory"] = known[read]
            step = grad.to(group["dtype"]) @ state["memory"]
            weight.sub_(step.to(weight.dtype), alpha=float(group["lr"]))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inputs": self.inputs}
