"""One token of the scan in few operations, as decoding needs it: nothing to solve, nothing to loop.

With w = n (u - M x) for the delta rule and w = n u otherwise, `M' = a M + w x^T`. The key and the
query ask the memory in one product. Plain operations, so it is differentiable to any order;
`nestling.scan.delta.naive` is the loop it stands for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.scan.checks import Read


class TokenParts(NamedTuple):
    """One token: key and query [..., 2, Di], value [..., 1, Do], rate and retain [..., 1, 1]."""

    both: Tensor
    u: Tensor
    rate: Tensor
    retain: Tensor


def takes(state: object, *given: Tensor | None) -> bool:
    """Whether a memory and its input can be a step: one dtype, of 32 bits or more, no momentum."""
    if not isinstance(state, Tensor) or state.dtype.itemsize < 4:
        return False
    return all(part is not None and part.dtype == state.dtype for part in given)


def token_step(state: Tensor, token: TokenParts, erase: bool, read: Read) -> tuple[Tensor, Tensor]:
    """The read [..., 1, Do] and the memory [..., Do, Di] after a token (Eq. 5, 15, 64-65, 88)."""
    both, u, rate, retain = token
    said, reads = (both @ state.mT).chunk(2, -2)
    x = both.narrow(-2, 0, 1)
    w = rate * (u - said if erase else u)
    if read == "after":
        q = both.narrow(-2, 1, 1)
        reads = torch.addcmul(retain * reads, (x * q).sum(-1, keepdim=True), w)
    return reads, torch.addcmul(retain * state, w.mT, x)
