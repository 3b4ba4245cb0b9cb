"""The two-layer scan's arguments: the memory's state, options and checks.

Legend: `...` leading dimensions (sequences, heads), T tokens, D width, H hidden width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from nestling.activations import Activation
from nestling.objectives import Objective
from nestling.scan.checks import Read, check_chunk, check_form, check_range, check_tensor, is_l2


class MLPState(NamedTuple):
    """A two-layer memory `M(x) = x + W1 sigma(W2 x)` (Eq. 89, 91) somewhere in its stream.

    `MLPState(w1, w2)` begins a stream. Within a chunk the error signals come from the weights where
    the chunk started, so a stream cut inside a chunk carries these too (`start1`, `start2`; None
    where the position is a multiple of the chunk). `velocity1` and `velocity2` are the running
    writes where the rule has momentum (deviation 18; None is zero). `position` counts all tokens.
    """

    w1: Tensor  # [..., D, H]
    w2: Tensor  # [..., H, D]
    start1: Tensor | None = None  # [..., D, H]
    start2: Tensor | None = None  # [..., H, D]
    velocity1: Tensor | None = None  # [..., D, H]
    velocity2: Tensor | None = None  # [..., H, D]
    position: int = 0


class MLPOptions(TypedDict):
    """The options of the two-layer scan in every form; `scan_mlp` explains them."""

    objective: Objective
    erase: bool
    read: Read
    chunk: int
    clip: float | None
    bound_inputs: bool
    momentum: Tensor | None
    sigma: Activation


def check_mlp(
    state: MLPState, x: Tensor, v: Tensor, rate: Tensor, retain: Tensor, queries: Tensor | None, *,
    check: bool, **options: Unpack[MLPOptions],
) -> None:  # fmt: skip
    """Raise ValueError or TypeError on the first argument that does not fit."""
    chunk, clip, momentum = options["chunk"], options["clip"], options["momentum"]
    is_l2(options["objective"])
    check_form(options["erase"], options["read"])
    check_chunk(chunk)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be a positive number, or None for no clipping; got {clip!r}")
    if not isinstance(state, MLPState):
        raise TypeError(f"state must be an MLPState(w1, w2, ...); got {type(state).__name__}")
    for name, value in (("x", x), ("state.w1", state.w1)):
        if not isinstance(value, Tensor) or value.dim() < 2:
            raise TypeError(
                f"{name} must be a tensor of at least 2 dimensions, x [..., T, D] and w1"
                f" [..., D, H]; got {list(value.shape) if isinstance(value, Tensor) else value!r}"
            )
    lead, tokens, width, hidden = x.shape[:-2], x.shape[-2], x.shape[-1], state.w1.shape[-1]
    for name in ("w1", "start1", "velocity1", "w2", "start2", "velocity2"):
        weight: Any = getattr(state, name)
        down = name.endswith("1")
        shape, legend = (width, hidden) if down else (hidden, width), "D, H" if down else "H, D"
        if weight is not None or name in ("w1", "w2"):
            check_tensor(f"state.{name}", weight, (*lead, *shape), f"[..., {legend}]")
    _check_cut(state, chunk, momentum)
    check_tensor("x", x, (*lead, tokens, width), "[..., T, D]")
    check_tensor("v", v, (*lead, tokens, width), "[..., T, D]")
    if queries is not None:
        check_tensor("queries", queries, (*lead, tokens, width), "[..., T, D]")
    gates = {"rate": (rate, torch.inf), "retain": (retain, 1.0)}
    if momentum is not None:
        gates["momentum"] = (momentum, 1.0)
    for name, (gate, highest) in gates.items():
        check_tensor(name, gate, (*lead, tokens), "[..., T]")
        if check and not torch.compiler.is_compiling():
            check_range(name, gate, highest)


def _check_cut(state: MLPState, chunk: int, momentum: Tensor | None) -> None:
    """A state cut inside a chunk needs the chunk's start; a velocity needs a momentum gate."""
    position = state.position
    if isinstance(position, bool) or not isinstance(position, int) or position < 0:
        raise ValueError(
            f"state.position must be a whole number of tokens, at least 0; got {position!r}"
        )
    starts = (state.start1 is not None, state.start2 is not None)
    if starts[0] != starts[1]:
        raise ValueError("state.start1 and state.start2 must both be given or both be None")
    if position % chunk and not starts[0]:
        raise ValueError(
            f"state.position {position} lies inside a chunk of {chunk}: state.start1 and"
            " state.start2, the weights where that chunk started, must be given"
        )
    velocity = state.velocity1 is not None or state.velocity2 is not None
    if momentum is None and velocity:
        raise ValueError("state.velocity1 and state.velocity2 must be None without momentum")


def with_starts(state: MLPState, chunk: int) -> MLPState:
    """The same state with the chunk's start present exactly when the position lies inside one."""
    if state.position % chunk == 0:
        return state._replace(start1=None, start2=None)
    return state
