"""Knowledge transfer: how one problem of a nested system uses what another has learned.

A `Transfer` is an edge of the system, declared by the problem that reads. What it carries is a
value one can swap: `direct` hands over the other memory's state as a constant, `backpropagation`
hands it over with its gradient flow, so that both problems share one flow at two frequencies.
A `Start` says how a problem's parameters are made when its context begins: from a slower problem
that learned them (initialisation), or produced them (generation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nestling.levels import due

if TYPE_CHECKING:
    from nestling.paper.nested.problem import View


Parameters = Mapping[str, Tensor]
"""The named tensors of one problem."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One edge: the reading problem sees the state of `source`.

    `order` is how far a gradient may flow back through the source's updates: 0 not at all, 1 as if
    each update had moved the state by a constant, 2 through the updates themselves. A read of the
    state before this item (`previous`) puts no order on two problems of equal frequency.
    """

    source: str
    kind: str
    order: int = 0
    previous: bool = False

    def see(self, parameters: Parameters) -> Parameters:
        """The source's parameters as the reader sees them."""
        if self.order:
            return parameters
        return {name: value.detach() for name, value in parameters.items()}


def direct(source: str, *, previous: bool = False) -> Transfer:
    """Condition on another memory's parameters, or on what they output, as constants (Eq. 24-26).

    From a box without trained parameters, such as attention's keys and values, the same read is
    the non-parametric transfer of Eq. 27.
    """
    return Transfer(source=source, kind="direct", order=0, previous=previous)


def backpropagation(source: str, *, order: int = 2, previous: bool = False) -> Transfer:
    """One gradient flow through both problems, which still update at their own frequencies."""
    if order not in (1, 2):
        raise ValueError(
            f"backpropagation({source!r}): order must be 1 or 2, got {order!r};"
            " a read without gradient is direct(source)"
        )
    return Transfer(source=source, kind="backpropagation", order=order, previous=previous)


def context_generation(source: str) -> Transfer:
    """The source makes the reader's context: a model makes the gradients its optimizer learns from.

    The reader sees the state from before this item, with its gradient flow.
    """
    return Transfer(source=source, kind="generation of context", order=1, previous=True)


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a problem's parameters are made anew at the start of each context of `every` items."""

    make: Callable[[View], Parameters]
    every: int | float
    kind: str
    source: str | None = None

    def __post_init__(self) -> None:
        if self.every != math.inf and (not isinstance(self.every, int) or self.every < 1):
            raise ValueError(
                f"Start: every must be a whole number of items of at least 1, or math.inf for one"
                f" endless context; got {self.every!r}"
            )

    def due(self, position: int) -> bool:
        """True when item `position` (counted from 1) is the first of a context."""
        return position == 1 or due(position - 1, self.every)


def initialisation(source: str, *, every: int | float = 1) -> Start:
    """Begin each context at the point a slower problem learned (Eq. 28): `theta_0 = Phi`."""

    def begin(view: View) -> Parameters:
        return {name: value.view_as(value) for name, value in view[source].items()}

    return Start(make=begin, every=every, kind="initialisation", source=source)


def generation(
    source: str, make: Callable[[Parameters, Any], Parameters], *, every: int = 1
) -> Start:
    """A slower problem produces the weights: `theta = make(Phi, item)`, a hypernetwork."""
    return Start(
        make=lambda view: make(view[source], view.item),
        every=every,
        kind="generation of weights",
        source=source,
    )


def reset(*, every: int, to: Parameters | None = None) -> Start:
    """Begin each context at the same values, zero if none are given.

    Linear attention's memory starts at zero in every sequence.
    """

    def make(view: View) -> Parameters:
        return to or {name: torch.zeros_like(value) for name, value in view.own.items()}

    return Start(make=make, every=every, kind="reset")
