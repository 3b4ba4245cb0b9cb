"""The scan, token by token: reads like the equations, differentiable to any order, slow.

Eq. 5, 15, 64-65, 88 and deviation 18 are all parameters of this loop.
"""

from __future__ import annotations

from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor

from nestling.scan.checks import Read
from nestling.scan.delta.types import MatrixAndVelocity, Options, check_scan
from nestling.scan.numerics import compute_dtype

S = TypeVar("S", Tensor, MatrixAndVelocity)


def scan_naive(
    state: S,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None = None,
    *,
    erase: bool = True,
    read: Read = "after",
    chunk: int = 64,
    momentum: Tensor | None = None,
    recompute: bool = False,
    check: bool = True,
) -> tuple[Tensor | None, S]:
    """Write T pairs into a matrix memory, one at a time, and read it at every token.

    With `erase` (Eq. 65, 88) `M_t = M_{t-1} (retain_t I - rate_t x_t x_t^T) + rate_t u_t x_t^T`;
    without (Eq. 5, 15, 64) there is no `x x^T` term. With momentum (deviation 18) the write becomes
    `Z_t = momentum_t Z_{t-1} + rate_t u_t x_t^T`, and the state is `MatrixAndVelocity(M, Z)`.
    Reads are `M_t q_t` (`after`) or `M_{t-1} q_t` (`before`), None without queries.
    `chunk` and `recompute` are accepted for the signature's sake and change nothing.
    """
    given = (state, x, u, rate, retain, queries)
    options = Options(erase=erase, read=read, chunk=chunk, momentum=momentum, recompute=recompute)
    check_scan(*given, **options, check=check)
    return run_naive(*given, **options)


def run_naive(
    state: Any, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: Tensor | None,
    **options: Unpack[Options],
) -> tuple[Tensor | None, Any]:  # fmt: skip
    """The loop itself, for input that was checked."""
    erase, read, momentum = options["erase"], options["read"], options["momentum"]
    weight: Tensor = (
        state.weight if isinstance(state, MatrixAndVelocity) else state
    )  # [..., Do, Di]
    velocity: Tensor | None = state.velocity if isinstance(state, MatrixAndVelocity) else None
    dtype = compute_dtype(weight, velocity, x, u, rate, retain, queries, momentum)
    weight = weight.to(dtype)
    velocity = velocity.to(dtype) if velocity is not None else None
    reads = []
    for t in range(x.shape[-2]):
        x_t, u_t = x[..., t, :].to(dtype), u[..., t, :].to(dtype)  # [..., Di], [..., Do]
        rate_t = rate[..., t, None, None].to(dtype)
        retain_t = retain[..., t, None, None].to(dtype)
        if queries is not None and read == "before":
            reads.append(_read(weight, queries[..., t, :]))
        write = rate_t * _outer(u_t, x_t)
        if momentum is not None and velocity is not None:
            velocity = momentum[..., t, None, None].to(dtype) * velocity + write
            write = velocity
        if erase:
            write = write - rate_t * _outer(_read(weight, x_t), x_t)
        weight = retain_t * weight + write
        if queries is not None and read == "after":
            reads.append(_read(weight, queries[..., t, :]))
    end: Any = weight if velocity is None else MatrixAndVelocity(weight, velocity)
    if queries is None:
        return None, end
    empty = queries.new_empty(u.shape)
    stacked: Tensor = torch.stack(reads, dim=-2).to(queries.dtype) if reads else empty
    return stacked, end


def _read(weight: Tensor, key: Tensor) -> Tensor:
    return (weight @ key.to(weight.dtype).unsqueeze(-1)).squeeze(-1)  # [..., Do]


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left.unsqueeze(-1) * right.unsqueeze(-2)  # [..., Do, Di]
