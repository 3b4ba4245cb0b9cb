"""The matrix scan's arguments: the state of a scan with momentum, options and checks.

Shapes (`...` are the same leading dimensions everywhere; nothing is broadcast):
state `[..., Do, Di]`, x and queries `[..., T, Di]`, u `[..., T, Do]`, gates `[..., T]`.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from nestling.scan.checks import Read, check_chunk, check_form, check_range, check_tensor


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
