"""The public scan: checks its input, picks a back end, returns reads and the end state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from nestling.checks import one_of
from nestling.scan.backends import INSTALLED, MISSING_TRITON, is_any_order
from nestling.scan.checks import Read
from nestling.scan.delta.chunk import scan_chunk_autograd
from nestling.scan.delta.fla import check_fla, refusal_fla, scan_fla
from nestling.scan.delta.kernel import scan_chunk
from nestling.scan.delta.naive import S, run_naive
from nestling.scan.delta.step import TokenParts, takes, token_step
from nestling.scan.delta.types import MatrixAndVelocity, Options, check_scan


def _scan_triton(*args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | MatrixAndVelocity]:
    """`nestling.scan.delta.triton.scan_triton`, loaded when first used."""
    if "triton" not in INSTALLED:
        raise ImportError(MISSING_TRITON)
    from nestling.scan.delta.triton import scan_triton

    return scan_triton(*args, **kwargs)


BACKENDS: dict[str, Callable[..., tuple[Tensor | None, Tensor | MatrixAndVelocity]]] = {
    "naive": run_naive,
    "chunk": scan_chunk,
    "chunk_autograd": scan_chunk_autograd,
    "triton": _scan_triton,
    "fla": scan_fla,
}
"""Back ends by name; each takes what `run_naive` takes. Register your own by assignment."""


def choose(tokens: int, *, any_order: bool, refusals: Mapping[str, str | None]) -> str:
    """The back end of a scan whose caller named none: a pure function.

    A single token is `naive` (or a `token_step`, see `scan_unchecked`); inside `any_order()` it is
    `chunk_autograd`; otherwise the first of `refusals` that has no reason to refuse, or `chunk`.
    `refusals` names, in order of preference, the back ends that the device has beside it (on CUDA
    `triton` and `fla`).
    """
    if tokens <= 1:
        return "naive"
    if any_order:
        return "chunk_autograd"
    return next((name for name, why in refusals.items() if why is None), "chunk")


def _refusals(
    state: Any, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: Tensor | None,
    momentum: Tensor | None,
) -> dict[str, str | None]:  # fmt: skip
    """Why each of CUDA's back ends cannot take a scan. fla comes last: it has no retain of 0."""
    found: dict[str, str | None] = {"triton": MISSING_TRITON, "fla": refusal_fla(x, momentum)}
    if "triton" in INSTALLED:
        from nestling.scan.delta.triton import refusal

        found["triton"] = refusal(state, x, u, rate, retain, queries, momentum)
    return found


@overload
def scan(
    state: S, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: Tensor, *,
    erase: bool = ..., read: Read = ..., chunk: int = ..., momentum: Tensor | None = ...,
    recompute: bool = ..., check: bool = ..., backend: str | None = ...,
) -> tuple[Tensor, S]: ...  # fmt: skip


@overload
def scan(
    state: S, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: None = ..., *,
    erase: bool = ..., read: Read = ..., chunk: int = ..., momentum: Tensor | None = ...,
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
    erase: bool = True,
    read: Read = "after",
    chunk: int = 64,
    momentum: Tensor | None = None,
    recompute: bool = False,
    check: bool = True,
    backend: str | None = None,
) -> tuple[Tensor | None, S]:
    """Write T pairs `x_t -> u_t` into a matrix memory and read it at every token.

    With `erase`, the delta rule with retention (Eq. 65, 88),
    `M_t = M_{t-1} (retain_t I - rate_t x_t x_t^T) + rate_t u_t x_t^T`; without, writes add up: no
    `x x^T` term (Eq. 5, 15, 64). Reads are `M_t q_t` (`read="after"`) or `M_{t-1} q_t`
    (`"before"`), None without queries. Reads have the dtype of the queries, the state and all
    solves the widest dtype of the inputs and at least float32.

    Shapes: state `[..., Do, Di]`, x and queries `[..., T, Di]`, u `[..., T, Do]`, rate, retain and
    momentum `[..., T]`; the leading dimensions are equal everywhere (nothing is broadcast).

    momentum: gate of a running write (deviation 18); the state is then a `MatrixAndVelocity`.
    chunk: tokens solved together at most; it changes speed, never the result.
    recompute: save less for the backward pass and compute it again there.
    check: look at the gates' values (rate >= 0, retain and momentum in [0, 1]).
    backend: a name from `BACKENDS`, or "auto" (None is the same), see `choose`. `chunk`: chunked,
        hand-written backward pass, once differentiable; `chunk_autograd`: chunked, differentiable
        to any order; `naive`: token by token; `triton` and `fla`: kernels for CUDA, see
        `nestling.scan.delta.triton` and `nestling.scan.delta.fla`.
    """
    given = (state, x, u, rate, retain, queries)
    options = Options(erase=erase, read=read, chunk=chunk, momentum=momentum, recompute=recompute)
    check_scan(*given, **options, check=check)
    if backend not in (None, "auto", *BACKENDS):
        one_of("backend", backend, ("auto", *BACKENDS))
    if backend == "fla" and check and not torch.compiler.is_compiling():
        check_fla(retain)
    return scan_unchecked(*given, backend=backend, **options)


def scan_unchecked(
    state: Any,
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
    backend: str | None = None,
) -> tuple[Any, Any]:
    """`scan` without checks, for memories, whose inputs fit together.

    So it costs less where calls are small; one token is a `token_step` where dtypes are one.
    """
    given = (state, x, u, rate, retain, queries)
    if backend is None or backend == "auto":
        if queries is not None and x.shape[-2] == 1 and takes(*given):
            token = TokenParts(
                torch.cat([x, queries], -2), u, rate.unsqueeze(-1), retain.unsqueeze(-1)
            )
            return token_step(state, token, erase, read)
        why = _refusals(*given, momentum) if x.is_cuda else {}
        backend = choose(x.shape[-2], any_order=is_any_order(), refusals=why)
    options = Options(erase=erase, read=read, chunk=chunk, momentum=momentum, recompute=recompute)
    return BACKENDS[backend](*given, **options)
