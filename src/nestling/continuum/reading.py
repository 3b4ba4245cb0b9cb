"""Reading a model with fast weights, without touching it.

Inside `with Reading(...)` every linear layer whose weight is a slot answers with `W0 + sum_l
Delta_l`, each sequence with its own. The mode belongs to the thread, so other threads may use the
same model at the same time. A slot nobody has written to runs the model's own operation.

When recording, each such layer's input x and output y are kept: the gradient by the weight is then
`delta^T x` with `delta = dL/dy`, per sequence, and no gradient of the base weights is ever formed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nestling.continuum.assignment import Part
from nestling.continuum.fast import Factors, dense, merge, read

__all__ = ["LiveSlot", "Reading", "Record"]

FEW = 32
"""Up to so many tokens a full difference is read beside the base, not added into it."""


_TRANSPOSES = frozenset([torch.Tensor.T.__get__, torch.Tensor.mT.__get__, torch.Tensor.t, torch.t])  # type: ignore[attr-defined]
_PRODUCTS = frozenset([torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul])
"""How layers with a forward pass of their own (Falcon) read a weight: `x @ weight.T`."""


class LiveSlot(NamedTuple):
    """A slot as it stands now: the stored weight, and the differences of its parts."""

    weight: Tensor  # as the model stores it
    transposed: bool
    parts: list[tuple[Part, Tensor | Factors]]

    def base(self, *, constant: bool) -> Tensor:
        """The weight as [Do, Di]."""
        weight = self.weight.detach() if constant else self.weight
        return weight.mT if self.transposed else weight

    def whole(self, *, constant: bool) -> Tensor:
        """`W0 + sum_l Delta_l`: [Do, Di], or [B, Do, Di] for several sequences."""
        base, full = self.base(constant=constant), [(p, dense(f)) for p, f in self.parts]
        return merge(base, full) if full else base


class Record(NamedTuple):
    """One call of a slot's layer."""

    x: Tensor  # [B, n, Di]
    y: Tensor  # what the layer returned; its last dimension is Do


class Reading(TorchFunctionMode):
    """Fast weights in place of the slots' weights, for this thread; see the module's docstring.

    constant: the slots' own weights get no gradient.
    """

    def __init__(
        self, slots: Sequence[LiveSlot], batch: int, *, record: bool = False, constant: bool = True
    ) -> None:
        super().__init__()
        self.numbers = {id(slot.weight): number for number, slot in enumerate(slots)}
        self.turned: dict[int, tuple[Tensor, int]] = {}  # transposes of slots' weights, by id
        self.slots, self.batch = slots, batch
        self.record, self.constant = record, constant
        self.records: list[list[Record]] = [[] for _ in slots]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and len(args) > 1 and id(args[1]) in self.numbers:
            number = self.numbers[id(args[1])]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return self._answer(number, args[0], bias, lambda: func(*args, **kwargs))
        if func is torch.addmm and len(args) > 2 and id(args[2]) in self.numbers and not kwargs:
            number = self.numbers[id(args[2])]
            return self._answer(number, args[1], args[0], lambda: func(*args))
        if func in _TRANSPOSES and len(args) == 1 and id(args[0]) in self.numbers:
            turned = func(*args)
            self.turned[id(turned)] = turned, self.numbers[id(args[0])]
            return turned
        if func in _PRODUCTS and len(args) == 2 and id(args[1]) in self.turned:
            number = self.turned[id(args[1])][1]
            return self._answer(number, args[0], None, lambda: func(*args))
        return func(*args, **kwargs)

    def _answer(
        self, number: int, x: Tensor, bias: Tensor | None, plain: Callable[[], Tensor]
    ) -> Tensor:
        slot = self.slots[number]
        rows = x.reshape(self.batch, -1, x.shape[-1])  # [B, n, Di]
        together = [(p, d) for p, d in slot.parts if isinstance(d, Tensor)]
        beside = [(p, d) for p, d in slot.parts if isinstance(d, Factors)]
        aside: list[tuple[Part, Tensor | Factors]] = [*beside]
        if rows.shape[1] * self.batch <= FEW and not self.record:
            together, aside = [], [*beside, *together]
        if together:
            weight = merge(slot.base(constant=self.constant), together)
            y = _linear(x, rows, weight, bias)
        elif self.constant and slot.weight.requires_grad and torch.is_grad_enabled():
            y = functional.linear(x, slot.base(constant=True), bias)
        else:
            y = plain()
        for part, fast in aside:
            y = y + _spread(read(_inputs(rows, part), fast), part, y.shape).to(y.dtype)
        if self.record:
            if not y.requires_grad:
                y.requires_grad_()
            self.records[number].append(Record(rows, y))
        return y


def _linear(x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer with one weight for all ([Do, Di]) or one per sequence ([B, Do, Di])."""
    if weight.dim() == 2:
        return functional.linear(x, weight, bias)
    y = rows @ weight.mT
    y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], weight.shape[-2])


def _inputs(rows: Tensor, part: Part) -> Tensor:
    return rows[..., part.start : part.stop] if part.axis == 1 else rows


def _spread(y: Tensor, part: Part, shape: torch.Size) -> Tensor:
    """A part's answer [B, n, Do'] in the place of the whole layer's."""
    if part.axis == 0:
        y = functional.pad(y, (part.start, shape[-1] - part.stop))
    return y.reshape(shape)
