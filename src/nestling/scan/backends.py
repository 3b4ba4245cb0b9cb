"""Which packages with GPU kernels are here; nothing is imported to find out."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["INSTALLED", "MISSING_FLA", "MISSING_TRITON"]

INSTALLED = frozenset(name for name in ("triton", "fla") if find_spec(name) is not None)
"""The packages found, of triton and fla (flash-linear-attention)."""

MISSING_TRITON = (
    "backend 'triton' needs triton: pip install 'nestling[triton]'; backend='chunk' runs everywhere"
)
MISSING_FLA = (
    "backend 'fla' needs flash-linear-attention and triton: pip install 'nestling[fla]';"
    " backend='chunk' runs everywhere"
)
