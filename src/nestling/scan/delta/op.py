"""The hand-written kernel as one torch operator, which autograd and torch.compile know."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from nestling.scan.checks import MomentumState, Options, compute_dtype
from nestling.scan.delta.chunk import scan_chunk_autograd
from nestling.scan.delta.kernel import Extra, Form, Saved, backward, forward
from nestling.scan.delta.naive import run_naive
from nestling.scan.opaque import differentiate_once, only_needed

__all__ = ["GIVEN", "scan_chunk"]

GIVEN = "Tensor state, Tensor x, Tensor u, Tensor rate, Tensor retain, Tensor? queries"
"""The tensors of a scan, in an operator's schema."""

EXTRA = "Tensor? home, Tensor? share"
FORM = "bool erase, bool after, int chunk, bool recompute"


def scan_chunk(
    state: Any, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: Tensor | None, *,
    share: Tensor | None = None, home: Tensor | None = None, **options: Unpack[Options],
) -> tuple[Tensor | None, Any]:  # fmt: skip
    """The chunked scan (Eq. 90) with a hand-written backward pass, once differentiable.

    With momentum it is the form that autograd differentiates. `share` [M] and `home` [M, Do, Di]
    are the kernel's `Extra`, for one leading dimension and "dgd".
    """
    tensors = (state, x, u, rate, retain, queries)
    if options["momentum"] is not None or isinstance(state, MomentumState):
        return scan_chunk_autograd(*tensors, **options)
    if 0 in (*x.shape, *u.shape):
        return run_naive(*tensors, **options)
    lead = x.shape[:-2]
    derived = (*tensors, home)
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in derived)
    size = math.prod(lead)
    flat = [None if t is None else t.reshape(size, *t.shape[len(lead) :]) for t in tensors]
    form = Form(
        options["rule"] == "dgd",
        options["read"] == "after",
        min(options["chunk"], max(1, x.shape[-2])),
        options["recompute"] or not needed,
    )
    reads, end, *_ = _scan(*flat, home, share, *form)
    end = end.view(*lead, *end.shape[1:])
    return (None if queries is None else reads.view(*lead, *reads.shape[1:])), end


@torch.library.custom_op(
    "nestling::scan",
    mutates_args=(),
    schema=f"({GIVEN}, {EXTRA}, {FORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _scan(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reads (empty without queries), end state, and the three tensors of `Saved`."""
    state, x, u, rate, retain, queries, home, share = arguments[:8]
    dtype, form = compute_dtype(*arguments[:6]), Form(*arguments[8:])
    extra = Extra(share, home)
    reads, saved = forward(state, x, u, rate, retain, queries, form, dtype, extra)
    return x.new_empty(0) if reads is None else reads, saved.starts[-1].clone(), *saved


@_scan.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    state, x, _, _, _, queries, _, _, erase, _, chunk, recompute = given
    dtype = compute_dtype(*given[:6])
    (sequences, tokens, _), out = x.shape, state.shape[-2]
    keep = sequences * tokens if erase and not recompute else 0
    return (
        x.new_empty(0) if queries is None else queries.new_empty(sequences, tokens, out),
        state.new_empty(state.shape, dtype=dtype),
        state.new_empty(((tokens + chunk - 1) // chunk + 1, *state.shape), dtype=dtype),
        state.new_empty(keep * out, dtype=dtype),
        state.new_empty(keep * chunk, dtype=dtype),
    )


@torch.library.custom_op(
    "nestling::scan_backward",
    mutates_args=(),
    schema=f"(Tensor? dreads, Tensor? dstate, {GIVEN}, {EXTRA}, Tensor starts, Tensor errors,"
    f" Tensor inverse, {FORM}, bool need_retain) -> Tensor[]",
)
def _scan_backward(dreads: Tensor | None, dstate: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Gradients of state, x, u, rate, retain, queries, home; empty where not needed."""
    state, x, u, rate, retain, queries, home, share = arguments[:8]
    saved, form, need_retain = Saved(*arguments[8:11]), Form(*arguments[11:15]), arguments[15]
    dend = torch.zeros_like(saved.starts[-1]) if dstate is None else dstate
    extra = Extra(share, home)
    grads = backward(dreads, dend, x, u, rate, retain, queries, saved, form, need_retain, extra)
    grads = grads._replace(state=grads.state.to(state.dtype))
    return [x.new_empty(0) if grad is None else grad for grad in grads]


@_scan_backward.register_fake
def _(dreads: Tensor | None, dstate: Tensor | None, *given: Any) -> list[Tensor]:
    state, x, u, rate, retain, queries, home, *_, need_retain = given
    derived = (state, x, u, rate, retain if need_retain else None, queries, home)
    none = x.new_empty(0)
    return [torch.empty_like(none if tensor is None else tensor) for tensor in derived]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8], *output[2:])
    ctx.options = inputs[8:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dreads: Any, dstate: Any, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    if saved[5] is None:
        dreads = None
    grads = _scan_backward(dreads, dstate, *saved, *ctx.options, ctx.needs_input_grad[4])
    return (*only_needed(grads, ctx.needs_input_grad[:7]), *(None for _ in range(5)))


differentiate_once(
    _scan, _scan_backward, _setup, _backward,
    "the chunked scan is differentiable once; for second derivatives use"
    " scan(..., backend='chunk_autograd') or backend='naive'",
)  # fmt: skip
