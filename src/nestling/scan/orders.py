"""Once or to any order: which form of the scans a block of code wants.

The fast scans have backward passes written by hand, which autograd cannot differentiate again.
Inside `any_order()` every scan takes its form in ordinary torch operations instead: the same
numbers, slower, and differentiable as often as one likes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

__all__ = ["any_order", "is_any_order"]

_here = threading.local()


@contextlib.contextmanager
def any_order() -> Iterator[None]:
    """Within this block, in this thread, what the scans compute has derivatives of any order.

    Attention takes its plain form too, because torch's fused kernels have no second derivative
    (that choice torch keeps for the whole process, not for one thread).
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = is_any_order()
    _here.on = True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _here.on = before


def is_any_order() -> bool:
    """Whether we are inside `any_order()`; never in compiled code."""
    return not torch.compiler.is_compiling() and getattr(_here, "on", False)
