"""The public scan: checks its input, picks a back end, returns reads and the end state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

from torch import Tensor

from nestling.scan.checks import MomentumState, Read, Rule, check_scan
from nestling.scan.delta.chunk import scan_chunk_autograd
from nestling.scan.delta.fla import scan_fla
from nestling.scan.delta.naive import run_naive
from nestling.scan.delta.op import scan_chunk
from nestling.scan.orders import is_any_order

__all__ = ["BACKENDS", "scan"]

S = TypeVar("S", Tensor, MomentumState)

BACKENDS: dict[str, Callable[..., tuple[Tensor | None, Tensor | MomentumState]]] = {
    "naive": run_naive,
    "chunk": scan_chunk,
    "chunk_autograd": scan_chunk_autograd,
    "fla": scan_fla,
}
"""Back ends by name; each takes what `run_naive` takes. Register your own by assignment."""


@overload
def scan(
    state: S, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: Tensor, *,
    rule: Rule = ..., read: Read = ..., chunk: int = ..., momentum: Tensor | None = ...,
    recompute: bool = ..., check: bool = ..., backend: str | None = ...,
) -> tuple[Tensor, S]: ...  # fmt: skip


@overload
def scan(
    state: S, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: None = ..., *,
    rule: Rule = ..., read: Read = ..., chunk: int = ..., momentum: Tensor | None = ...,
    recompute: bool = ..., check: bool = ..., backend: str | None = ...,
) -> tuple[None, S]: ...  # fmt: skip


def scan(
    state: S,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None = None,
    *,
    rule: Rule = "dgd",
    read: Read = "after",
    chunk: int = 64,
    momentum: Tensor | None = None,
    recompute: bool = False,
    check: bool = True,
    backend: str | None = None,
) -> tuple[Tensor | None, S]:
    """Write T pairs `x_t -> u_t` into a matrix memory and read it at every token.

    `rule="dgd"` is the delta rule with retention (Eq. 65, 88),
    `M_t = M_{t-1} (retain_t I - rate_t x_t x_t^T) + rate_t u_t x_t^T`; `rule="gd"` drops the
    `x x^T` term (Eq. 5, 15, 64). Reads are `M_t q_t` (`read="after"`) or `M_{t-1} q_t`
    (`"before"`), None without queries. Reads have the dtype of the queries, the state and all
    solves the widest dtype of the inputs and at least float32.

    Shapes: state `[..., Do, Di]`, x and queries `[..., T, Di]`, u `[..., T, Do]`, rate, retain and
    momentum `[..., T]`; the leading dimensions are equal everywhere (nothing is broadcast).

    momentum: gate of a running write (deviation 18); the state is then a `MomentumState`.
    chunk: tokens solved together; it changes speed, never the result.
    recompute: save less for the backward pass and compute it again there.
    check: look at the gates' values (rate >= 0, retain and momentum in [0, 1]).
    backend: a name from `BACKENDS`. None and `chunk`: chunked, hand-written backward pass, once
        differentiable; `chunk_autograd`: chunked, differentiable to any order; `naive`: token by
        token (None picks it for a single token, and `chunk_autograd` inside `any_order()`);
        `fla`: CUDA, see `nestling.scan.delta.fla`.
    """
    check_scan(
        state, x, u, rate, retain, queries,
        rule=rule, read=read, chunk=chunk, momentum=momentum, check=check,
    )  # fmt: skip
    if backend is None:
        several = "chunk_autograd" if is_any_order() else "chunk"
        backend = "naive" if x.shape[-2] <= 1 else several
    if backend not in BACKENDS:
        words = ", ".join(repr(word) for word in BACKENDS)
        raise ValueError(f"backend must be None or one of {words}; got {backend!r}")
    return BACKENDS[backend](  # type: ignore[return-value]
        state, x, u, rate, retain, queries,
        rule=rule, read=read, chunk=chunk, momentum=momentum, recompute=recompute,
    )  # fmt: skip
