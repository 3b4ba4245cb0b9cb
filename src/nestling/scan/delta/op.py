"""The hand-written kernel as one torch operator, which autograd and torch.compile know."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nestling.scan.checks import MomentumState, Read, Rule, compute_dtype
from nestling.scan.delta.chunk import scan_chunk_autograd
from nestling.scan.delta.kernel import Extra, Options, Saved, backward, forward
from nestling.scan.delta.naive import run_naive

__all__ = ["scan_chunk"]


def scan_chunk(
    state: Any,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None,
    *,
    rule: Rule,
    read: Read,
    chunk: int,
    momentum: Tensor | None,
    recompute: bool,
    share: Tensor | None = None,
    home: Tensor | None = None,
) -> tuple[Tensor | None, Any]:
    """The chunked scan (Eq. 90) with a hand-written backward pass, once differentiable.

    With momentum it is the form that autograd differentiates. `share` [M] and `home` [M, Do, Di]
    are the kernel's `Extra`, for one leading dimension and "dgd".
    """
    if momentum is not None or isinstance(state, MomentumState):
        return scan_chunk_autograd(
            state, x, u, rate, retain, queries,
            rule=rule, read=read, chunk=chunk, momentum=momentum, recompute=recompute,
        )  # fmt: skip
    if 0 in (*x.shape, *u.shape):
        return run_naive(
            state, x, u, rate, retain, queries,
            rule=rule, read=read, chunk=chunk, momentum=None, recompute=recompute,
        )  # fmt: skip
    lead = x.shape[:-2]
    tensors = (state, x, u, rate, retain, queries)
    derived = (*tensors, home)
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in derived)
    size = math.prod(lead)
    flat = [None if t is None else t.reshape(size, *t.shape[len(lead) :]) for t in tensors]
    chunk = min(chunk, max(1, x.shape[-2]))
    options = (rule == "dgd", read == "after", chunk, recompute or not needed)
    reads, end, *_ = _scan(*flat, home, share, *options)
    end = end.view(*lead, *end.shape[1:])
    return (None if queries is None else reads.view(*lead, *reads.shape[1:])), end


@torch.library.custom_op("nestling::scan", mutates_args=())
def _scan(
    state: Tensor,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None,
    home: Tensor | None,
    share: Tensor | None,
    erase: bool,
    after: bool,
    chunk: int,
    recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reads (empty without queries), end state, and the three tensors of `Saved`."""
    dtype = compute_dtype(state, x, u, rate, retain, queries)
    options = Options(erase, after, chunk, recompute)
    extra = Extra(share, home)
    reads, saved = forward(state, x, u, rate, retain, queries, options, dtype, extra)
    return x.new_empty(0) if reads is None else reads, saved.starts[-1].clone(), *saved


@_scan.register_fake
def _(
    state: Tensor,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None,
    home: Tensor | None,
    share: Tensor | None,
    erase: bool,
    after: bool,
    chunk: int,
    recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(state, x, u, rate, retain, queries)
    (sequences, tokens, _), out = x.shape, state.shape[-2]
    keep = sequences * tokens if erase and not recompute else 0
    return (
        x.new_empty(0) if queries is None else queries.new_empty(sequences, tokens, out),
        state.new_empty(state.shape, dtype=dtype),
        state.new_empty(((tokens + chunk - 1) // chunk + 1, *state.shape), dtype=dtype),
        state.new_empty(keep * out, dtype=dtype),
        state.new_empty(keep * chunk, dtype=dtype),
    )


@torch.library.custom_op("nestling::scan_backward", mutates_args=())
def _scan_backward(
    dreads: Tensor | None,
    dstate: Tensor | None,
    state: Tensor,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None,
    home: Tensor | None,
    share: Tensor | None,
    starts: Tensor,
    errors: Tensor,
    inverse: Tensor,
    erase: bool,
    after: bool,
    chunk: int,
    recompute: bool,
    need_retain: bool,
) -> list[Tensor]:
    """Gradients of state, x, u, rate, retain, queries, home; empty where not needed."""
    options = Options(erase, after, chunk, recompute)
    dend = torch.zeros_like(starts[-1]) if dstate is None else dstate
    saved, extra = Saved(starts, errors, inverse), Extra(share, home)
    grads = backward(dreads, dend, x, u, rate, retain, queries, saved, options, need_retain, extra)
    grads = grads._replace(state=grads.state.to(state.dtype))
    return [x.new_empty(0) if grad is None else grad for grad in grads]


@_scan_backward.register_fake
def _(
    dreads: Tensor | None,
    dstate: Tensor | None,
    state: Tensor,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None,
    home: Tensor | None,
    share: Tensor | None,
    starts: Tensor,
    errors: Tensor,
    inverse: Tensor,
    erase: bool,
    after: bool,
    chunk: int,
    recompute: bool,
    need_retain: bool,
) -> list[Tensor]:
    none = x.new_empty(0)
    gates = (rate, retain if need_retain else none)
    given = (state, x, u, *gates, queries, home)
    return [torch.empty_like(none if tensor is None else tensor) for tensor in given]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8], *output[2:])
    ctx.options = inputs[8:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dreads: Any, dstate: Any, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    if saved[5] is None:
        dreads = None
    grads = _scan_backward(dreads, dstate, *saved, *ctx.options, ctx.needs_input_grad[4])
    shown = [g if need else None for g, need in zip(grads, ctx.needs_input_grad[:7], strict=True)]
    return (*shown, *(None for _ in range(5)))


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "the chunked scan is differentiable once; for second derivatives use"
        " scan(..., backend='chunk_autograd') or backend='naive'"
    )


_scan.register_autograd(_backward, setup_context=_setup)
_scan_backward.register_autograd(_refuse)
