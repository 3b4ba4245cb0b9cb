"""Once or to any order: which form of the scans a block of code wants.

The fast scans have backward passes written by hand, which autograd cannot differentiate again and
`torch.func` cannot look into. Inside `any_order()`, and under the transforms of `torch.func`, every
scan takes its form in ordinary torch operations instead: the same numbers, slower, and
differentiable as often as one likes.
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

    before = getattr(_here, "on", False)
    _here.on = True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _here.on = before


def is_any_order() -> bool:
    """Whether we are inside `any_order()` or `torch.func`; never in compiled code."""
    if torch.compiler.is_compiling():
        return False
    return getattr(_here, "on", False) or torch._C._are_functorch_transforms_active()
