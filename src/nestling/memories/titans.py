"""Titans: a deep memory with momentum and retention, and static projections."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.memories.self_modifying import SelfModifying, SelfModifyingConfig

__all__ = ["Titans", "TitansConfig"]

Titans = SelfModifying
"""Titans is the first stage of the self-modifying memory (Eq. 76-78): one class serves both."""


@dataclass(frozen=True, kw_only=True)
class TitansConfig(SelfModifyingConfig):
    """Static k, v, rate and retention; a 2-layer memory learns `k -> v` by gradient descent on the
    L2 objective with momentum and retention (`erase=True` makes it delta gradient descent)."""

    adaptive: tuple[str, ...] = ()
    own_values: bool = False
    objective: str = "l2"
    erase: bool = False
    residual: bool = False
    momentum: bool = True
    expansion: int = 1
