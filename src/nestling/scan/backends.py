"""Which back ends are installed, and whether a scan must have derivatives of any order.

The fast scans have backward passes written by hand, which autograd cannot differentiate again and
`torch.func` cannot look into. Inside `any_order()`, and under the transforms of `torch.func`, every
scan takes its form in ordinary torch operations instead: the same numbers, slower, and
differentiable as often as one likes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

INSTALLED = frozenset(name for name in ("triton", "fla") if find_spec(name) is not None)
"""The packages found, of triton and fla (flash-linear-attention)."""

MISSING_TRITON = (
    "backend 'triton' needs triton: pip install 'nestling[triton]'; backend='chunk' runs everywhere"
)
MISSING_FLA = (
    "backend 'fla' needs flash-linear-attention and triton: pip install 'nestling[fla]';"
    " backend='chunk' runs everywhere"
)


_here = threading.local()


@contextlib.contextmanager
def any_order() -> Iterator[None]:
    """Within this block, in this thread, what the scans compute has derivatives of any order.

    Attention takes its plain form too, because torch's fused kernels have no second derivative.
    (`torch.nn.attention.sdpa_kernel` would say so for the whole process, other threads included.)
    """
    before = getattr(_here, "on", False)
    _here.on = True
    try:
        with _PlainAttention():
            yield
    finally:
        _here.on = before


def is_any_order() -> bool:
    """Whether we are inside `any_order()` or `torch.func`; never in compiled code."""
    if torch.compiler.is_compiling():
        return False
    return getattr(_here, "on", False) or torch._C._are_functorch_transforms_active()


class _PlainAttention(TorchFunctionMode):
    """Within this block, in this thread, attention is computed by plain products."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        plain = _attend if func is functional.scaled_dot_product_attention else func
        return plain(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`functional.scaled_dot_product_attention` by plain products: [..., T, D], [..., S, D].

    A query that may see nothing gets zeros.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
        some = attn_mask.any(-1, keepdim=True)
        chances = scores.masked_fill(~some, 0.0).softmax(-1).masked_fill(~some, 0.0)
    else:
        chances = (scores if attn_mask is None else scores + attn_mask).softmax(-1)
    return functional.dropout(chances, dropout_p).to(value.dtype) @ value
