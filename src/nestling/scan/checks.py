"""Checks of a scan's input: shapes, dtypes and values; errors name the argument and the remedy.

Shapes (`...` are the same leading dimensions everywhere; nothing is broadcast):
state `[..., Do, Di]`, x and queries `[..., T, Di]`, u `[..., T, Do]`, gates `[..., T]`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from nestling.checks import one_of
from nestling.objectives import dot, l2

Read = Literal["after", "before"]


class MatrixAndVelocity(NamedTuple):
    """A memory whose writes have momentum: the memory and its running write (deviation 18)."""

    weight: Tensor  # [..., Do, Di]
    velocity: Tensor  # [..., Do, Di]


class Options(TypedDict):
    """The options every back end of the scan takes by name; `scan` explains them."""

    erase: bool
    read: Read
    chunk: int
    momentum: Tensor | None
    recompute: bool


def is_l2(objective: object) -> bool:
    """Whether the error is `v - M(x)` (`l2`) rather than `v` (`dot`); rejects anything else."""
    if objective == l2:
        return True
    if objective == dot:
        return False
    raise ValueError(f"objective must be nestling.objectives.l2 or dot; got {objective!r}")


def check_form(erase: object, read: object) -> None:
    """Whether writes erase, and when reads come."""
    if not isinstance(erase, bool):
        raise TypeError(f"erase must be True (the delta rule) or False; got {erase!r}")
    one_of("read", read, ("after", "before"))


def check_chunk(chunk: object) -> None:
    """A chunk is a whole number of tokens, at least 1."""
    if isinstance(chunk, bool) or not isinstance(chunk, int):
        raise TypeError(f"chunk must be a whole number (int) of at least 1; got {chunk!r}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1; got {chunk}")


def check_tensor(name: str, value: object, shape: tuple[int, ...], legend: str) -> None:
    """Reject what is not a real floating tensor of exactly this shape."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {legend}; got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor (bf16, float32, ...); got {value.dtype}")
    if value.shape != shape:
        raise ValueError(
            f"{name} must have shape {legend} = {list(shape)} to fit x and state (nothing is"
            f" broadcast; use expand); got {list(value.shape)}"
        )


def check_range(name: str, gate: Tensor, highest: float) -> None:
    """Reject gates outside `[0, highest]`, NaN included."""
    if gate.numel() == 0 or gate.is_meta:
        return
    low, high = (bound.item() for bound in torch.aminmax(gate.detach()))
    if not (low >= 0.0 and high <= highest):
        allowed = "at least 0" if highest == float("inf") else f"in [0, {highest:g}]"
        raise ValueError(f"{name} must be {allowed}; got values from {low:g} to {high:g}")


def check_scan(
    state: Tensor | MatrixAndVelocity,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None,
    *,
    erase: bool,
    read: str,
    chunk: int,
    momentum: Tensor | None,
    recompute: bool,
    check: bool,
) -> None:
    """Raise ValueError or TypeError on the first argument that does not fit.

    `check=False` (and torch.compile) skips only the values of the gates: that is one pass over
    `[..., T]`, but a synchronisation on a GPU.
    """
    check_form(erase, read)
    check_chunk(chunk)
    if (momentum is not None) != isinstance(state, MatrixAndVelocity):
        raise TypeError(
            "state must be a MatrixAndVelocity(weight, velocity) exactly when momentum is given;"
            f" got {type(state).__name__} with momentum"
            f" {'given' if momentum is not None else 'None'}"
        )
    weight = state.weight if isinstance(state, MatrixAndVelocity) else state
    for name, value in (("state", weight), ("x", x)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(value).__name__}")
        if value.dim() < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions, state [..., Do, Di] and x [..., T, Di];"
                f" got {list(value.shape)}"
            )
    lead, tokens = x.shape[:-2], x.shape[-2]
    out, inner = weight.shape[-2], weight.shape[-1]
    check_tensor("x", x, (*lead, tokens, inner), "[..., T, Di]")
    check_tensor("state", weight, (*lead, out, inner), "[..., Do, Di]")
    if isinstance(state, MatrixAndVelocity):
        check_tensor("state.velocity", state.velocity, (*lead, out, inner), "[..., Do, Di]")
    check_tensor("u", u, (*lead, tokens, out), "[..., T, Do]")
    if queries is not None:
        check_tensor("queries", queries, (*lead, tokens, inner), "[..., T, Di]")
    gates = [("rate", rate, float("inf")), ("retain", retain, 1.0)]
    if momentum is not None:
        gates.append(("momentum", momentum, 1.0))
    for name, gate, highest in gates:
        check_tensor(name, gate, (*lead, tokens), "[..., T]")
        if check and not torch.compiler.is_compiling():
            check_range(name, gate, highest)
