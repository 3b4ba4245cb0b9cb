"""Capture what reaches each linear layer: its inputs and the gradients at its outputs.

A gradient `delta^T x` has forgotten the pairs it was made of; DGD needs them. `capture(model)`
hooks every `nn.Linear` and keeps its inputs and output gradients from one `zero_grad` to the next,
over any number of calls and backward passes, next to the gradient that autograd accumulates.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
from torch import Tensor, nn

from nestling.rules import Pairs


class Capture:
    """The pairs of a model's linear layers; made by `capture`. `remove()` (or `with`) ends it."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        if not self._layers:
            raise ValueError(f"capture: {type(model).__name__} has no nn.Linear")
        for name, module in model.named_modules():
            if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
                raise ValueError(
                    f"capture: {name or 'the model'} is compiled, and its hooks would not see the"
                    " layers; capture the model without torch.compile"
                )
        self.keep_reads = False
        """Keep the layers' outputs too, for an optimizer that asks for `reads`."""
        self._rows: dict[Tensor, list[tuple[Tensor, Tensor, Tensor | None]]] = {}
        self._pass: dict[Tensor, int] = {}  # the backward pass that last wrote
        self._handles = [m.register_forward_hook(self._forward) for m in self._layers.values()]

    def covers(self, parameter: Tensor) -> bool:
        """True for the weight of a captured layer."""
        return any(layer.weight is parameter for layer in self._layers.values())

    def pairs(self, weight: Tensor) -> Pairs:
        """The pairs behind `weight.grad`, in the gradient's scale (also after clipping).

        Raises RuntimeError when they do not explain the gradient.
        """
        rows = self._rows.get(weight)
        if not rows:
            raise RuntimeError(
                f"no input was captured for {self._name(weight)}, yet it has a gradient: it is used"
                " outside its layer's forward, or backward ran before capture(model)"
            )
        x = rows[0][0] if len(rows) == 1 else torch.cat([r[0] for r in rows])
        delta = rows[0][1] if len(rows) == 1 else torch.cat([r[1] for r in rows])
        return Pairs(x, delta * -self._scale(weight, x, delta))

    def inputs(self, weight: Tensor) -> Tensor:
        """The inputs behind `weight.grad` alone [n, Di], without the check that `pairs` makes."""
        rows = [row[0] for row in self._rows.get(weight, [])]
        if not rows:
            raise RuntimeError(f"no input was captured for {self._name(weight)}")
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def reads(self, weight: Tensor) -> Tensor | None:
        """The layer's answers to the rows of `pairs`, `x W^T` [n, Do]; None if not all kept."""
        rows = [row[2] for row in self._rows.get(weight, [])]
        kept = [row for row in rows if row is not None and row.dtype == weight.dtype]
        return torch.cat(kept) if rows and len(kept) == len(rows) else None

    def clear(self) -> None:
        """Forget all pairs, as `zero_grad` does with gradients."""
        self._rows.clear()

    def remove(self) -> None:
        """Take the hooks out of the model."""
        for handle in self._handles:
            handle.remove()
        self.clear()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _forward(self, layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        weight = cast(Tensor, layer.weight)
        if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(output):
            raise RuntimeError(
                f"{self._name(weight)} ran inside torch.compile or torch.func, where its inputs"
                " cannot be captured: run it outside, or remove() the capture"
            )
        if not (output.requires_grad and weight.requires_grad):
            return
        x, read = arguments[0].detach(), None
        if self.keep_reads:  # a copy: what follows may change the output in place
            bias = cast(Tensor | None, layer.bias)
            read = output.detach() - bias.detach() if bias is not None else output.detach().clone()

        def backward(grad: Tensor) -> None:
            self._record(weight, x, grad, read)

        output.register_hook(backward)

    def _record(self, weight: Tensor, x: Tensor, delta: Tensor, read: Tensor | None) -> None:
        this_pass = torch._C._current_graph_task_id()
        if weight.grad is None and self._pass.get(weight) != this_pass:
            self._rows.pop(weight, None)  # the gradient was set to None since: a new start
        self._pass[weight] = this_pass
        row = (_rows(x), _rows(delta.detach()), None if read is None else _rows(read))
        self._rows.setdefault(weight, []).append(row)

    def _scale(self, weight: Tensor, x: Tensor, delta: Tensor) -> float:
        """The number c with `weight.grad = c delta^T x`, from one random projection of both."""
        assert weight.grad is not None
        exact = torch.promote_types(weight.dtype, torch.float32)
        probe = _probe(x.shape[-1]).to(x.device, exact)
        seen = delta.to(exact).mT @ (x.to(exact) @ probe)  # [Do]
        found = weight.grad.to(exact) @ probe
        size = seen.square().sum()
        scale = (seen @ found / size).item() if size > 0 else 1.0
        rounded = min(torch.finfo(t.dtype).bits for t in (x, delta, weight)) < 32
        off = (found - scale * seen).norm() / found.norm().clamp(min=1e-30)
        if off.item() > (0.05 if rounded else 1e-3) and found.norm() > 1e-12:
            raise RuntimeError(
                f"the captured inputs do not explain the gradient of {self._name(weight)}: it is"
                " tied to another module (embedding), averaged over processes (DDP), or was changed"
                " since; DGD then has no exact step. Give it another optimizer"
            )
        return scale

    def _name(self, weight: Tensor) -> str:
        names = [f"{name}.weight" for name, m in self._layers.items() if m.weight is weight]
        return names[0] if names else f"a weight of shape {tuple(weight.shape)}"


def capture(model: nn.Module) -> Capture:
    """Capture the inputs and output gradients of every `nn.Linear` in `model`, for `DGD`."""
    return Capture(model)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@cache
def _probe(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


def require_capture(inputs: object) -> Capture:
    """Refuse what is not `capture(model)`."""
    if not isinstance(inputs, Capture):
        raise TypeError(f"inputs must be capture(model), got {type(inputs).__name__}")
    return inputs
