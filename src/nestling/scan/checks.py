"""Checks that the scans share: errors name the argument and the remedy."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nestling.checks import one_of
from nestling.objectives import dot, l2

Read = Literal["after", "before"]
"""Whether a token reads after its own write or before it."""


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
