"""The two-layer memory scan, fast: sequential over chunks, matrix products within.

The backward pass is written by hand; its derivation, and how to stack several memories, is in
`chunk`. `naive` is the same function token by token. The forward pass keeps the weights
where each chunk starts and what is cheap to keep of the chunk; with `recompute` only the weights,
and the backward pass runs each chunk's forward pass again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from nestling.activations import Activation, silu
from nestling.objectives import Objective, dot, l2
from nestling.scan.backends import is_any_order
from nestling.scan.checks import Read, is_l2
from nestling.scan.deep.chunk import (
    Chunk,
    ChunkGates,
    FirstLayer,
    SavedRead,
    SavedWrite,
    TwoLayers,
    Variant,
    first_layer,
    gates,
    hidden,
    read_backward,
    tables,
    write,
    write_backward,
)
from nestling.scan.deep.chunk import read as read_chunk
from nestling.scan.deep.momentum import Momentum, scan_momentum
from nestling.scan.deep.naive import by_matrix_scans
from nestling.scan.deep.types import MLPOptions, MLPState, check_mlp
from nestling.scan.delta.api import scan
from nestling.scan.numerics import compute_dtype
from nestling.scan.opaque import opaque


def scan_mlp(
    state: MLPState,
    x: Tensor,
    v: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None = None,
    *,
    objective: Objective = l2,
    erase: bool = True,
    read: Read = "after",
    chunk: int = 64,
    clip: float | None = None,
    bound_inputs: bool = True,
    momentum: Tensor | None = None,
    recompute: bool = False,
    sigma: Activation = silu,
    check: bool = True,
) -> tuple[Tensor | None, MLPState]:
    """Write T pairs `x_t -> v_t` into `M(x) = x + W1 sigma(W2 x)` and read it at every token.

    All error signals of a chunk are taken at the weights where it starts (Eq. 90 with deviation 2):
    `u1 = v - M(x)` (`objective=l2`, Eq. 93) or `v` (`dot`, Eq. 92), `u2 = sigma'(W2 x) * W1^T u1`.
    Each layer learns by delta gradient descent with its own input (Eq. 88, deviation 6), layer 2
    `x -> u2`, layer 1 `h = sigma(W2 x) -> u1`: `W_t = W_{t-1} (retain_t I - rate_t k k^T) +
    rate_t u k^T` (`erase=False` without `k k^T`). Reads are `q_t + W1_t sigma(W2_t q_t)`, with
    the weights after or before token t, or None without queries.

    Shapes: w1 `[..., D, H]`, w2 `[..., H, D]`, x, v and queries `[..., T, D]`, the gates rate,
    retain and momentum `[..., T]`; leading dimensions are equal everywhere. Weights and solves
    live in the widest dtype given, at least float32; reads have the dtype of the queries.

    chunk: tokens between two starts, counted from position 0 of the stream; part of the model.
    clip: bound on the norm of both layers' error signals; bound_inputs: scales h to norm <= 1 in
        the rule. With clip = c, bound_inputs, |x| <= 1, retain <= a < 1 and rate <= retain every
        row w of a layer stays at `|w|^2 <= max(|w_0|^2, a^2 c^2 / (1 - a^2))` (deviation 8).
    momentum: gate of a running write per layer (deviation 18).
    recompute: save only the chunks' start weights for the backward pass.
    check: look at the gates' values (rate >= 0, retain and momentum in [0, 1]).

    The returned state may be passed on at any token: any split of a stream gives the same result.
    """
    options = MLPOptions(
        objective=objective, erase=erase, read=read, chunk=chunk, clip=clip,
        bound_inputs=bound_inputs, momentum=momentum, sigma=sigma,
    )  # fmt: skip
    check_mlp(state, x, v, rate, retain, queries, check=check, **options)
    if torch.compiler.is_compiling():
        if sigma is not silu:
            raise NotImplementedError("compiled models have the two-layer scan with silu only")
        return _compiled(
            state, x, v, rate, retain, queries, momentum,
            (is_l2(objective), erase, read == "after", chunk, clip or 0.0, bound_inputs,
             recompute, state.position),
        )  # fmt: skip
    tokens = x.shape[-2]
    composed = is_any_order() or (momentum is not None and erase)
    begun = tokens if composed else min(-state.position % chunk, tokens)
    how = Variant(is_l2(objective), erase, clip, bound_inputs, sigma)
    inputs = (x, v, rate, retain, queries, momentum)
    parts: list[Tensor | None] = []
    if begun or not tokens:  # two matrix scans, of any order too
        *first, options["momentum"] = _part(inputs, 0, begun)
        y, state = by_matrix_scans(scan, state, *first, **options)  # type: ignore[arg-type]
        parts.append(y)
    whole = (tokens - begun) // chunk * chunk
    for start, length, size in ((begun, whole, chunk), (begun + whole, tokens - begun - whole, 0)):
        if length:
            part = _part(inputs, start, length)
            run = _from_boundary if momentum is None else _with_momentum
            y, state = run(state, part, how, read == "after", size or length, chunk, recompute)
            parts.append(y)
    if queries is None:
        return None, state
    reads = [part for part in parts if part is not None]
    return reads[0] if len(reads) == 1 else torch.cat(reads, dim=-2), state


def _part(inputs: Sequence[Tensor | None], start: int, length: int) -> list[Tensor | None]:
    """Tokens `[start, start + length)` of x, v, rate, retain, queries and momentum."""
    along = zip(inputs, (-2, -2, -1, -1, -2, -1), strict=True)
    return [part.narrow(dim, start, length) if part is not None else None for part, dim in along]


def _from_boundary(
    state: MLPState, inputs: Sequence[Tensor | None], how: Variant, after: bool, size: int,
    chunk: int, recompute: bool,
) -> tuple[Tensor | None, MLPState]:  # fmt: skip
    """Chunks of `size` tokens from a position where a chunk starts."""
    x, v, rate, retain, queries, _ = inputs
    if x is None or v is None or rate is None or retain is None:
        raise ValueError("x, v, rate and retain must be given")
    dtype = compute_dtype(state.w1, state.w2, *inputs)
    lead, (tokens, width), hidden = x.shape[:-2], x.shape[-2:], state.w1.shape[-1]
    count = tokens // size

    def chunks(part: Tensor) -> Tensor:
        return _cut(part.to(dtype), size)

    g, rated = tables(*(chunks(gate.unsqueeze(-1)).view(-1, size) for gate in (rate, retain)))
    w1 = state.w1.to(dtype).reshape(-1, width, hidden)
    w2 = state.w2.to(dtype).reshape(-1, hidden, width)
    q = chunks(queries) if queries is not None else None
    y, w1, w2 = _Scan.apply(how, after, recompute, w1, w2, chunks(x), chunks(v), q, g, rated)
    position = state.position + tokens
    end = MLPState(w1.view(*lead, width, hidden), w2.view(*lead, hidden, width), position=position)
    if position % chunk:
        end = end._replace(start1=state.w1.to(dtype), start2=state.w2.to(dtype))
    if queries is None:
        return None, end
    reads = y.view(count, *lead, size, width).movedim(0, -3).flatten(-3, -2)
    return reads.to(queries.dtype), end


def _cut(part: Tensor, size: int) -> Tensor:
    """[..., T, D] -> [count, N, C, D]."""
    split = part.unflatten(-2, (-1, size)).movedim(-3, 0).contiguous()
    return split.view(split.shape[0], -1, size, part.shape[-1])


def _with_momentum(
    state: MLPState, inputs: Sequence[Tensor | None], how: Variant, after: bool, size: int,
    chunk: int, recompute: bool,
) -> tuple[Tensor | None, MLPState]:  # fmt: skip
    """The same for writes with momentum; `recompute` keeps only the inputs."""
    x, v, rate, retain, queries, momentum = inputs
    if x is None or v is None or rate is None or retain is None or momentum is None:
        raise ValueError("x, v, rate, retain and momentum must be given")
    dtype = compute_dtype(*state[:6], *inputs)
    lead, tokens = x.shape[:-2], x.shape[-2]

    def flat(weight: Tensor) -> Tensor:
        return weight.to(dtype).reshape(-1, *weight.shape[-2:])

    w1, w2, _, _, v1, v2, position = state
    still = torch.zeros_like(w1) if v1 is None else v1, torch.zeros_like(w2) if v2 is None else v2
    start = Momentum(flat(w1), flat(w2), flat(still[0]), flat(still[1]))
    gates = torch.stack([rate.to(dtype), retain.to(dtype), momentum.to(dtype)], -1)
    q = None if queries is None else _cut(queries.to(dtype), size)
    parts = (_cut(x.to(dtype), size), _cut(v.to(dtype), size), _cut(gates, size), q)
    options: dict[str, Any] = {
        "after": after, "objective": l2 if how.squared else dot, "clip": how.clip,
        "bound_inputs": how.bound, "sigma": how.sigma,
    }  # fmt: skip
    if recompute and torch.is_grad_enabled():
        y, end = checkpoint(scan_momentum, start, *parts, use_reentrant=False, **options)
    else:
        y, end = scan_momentum(start, *parts, **options)
    made = Momentum(*(weight.reshape(*lead, *weight.shape[1:]) for weight in end))
    position += tokens
    begun = (w1.to(dtype), w2.to(dtype)) if position % chunk else (None, None)
    after_all = MLPState(made.w1, made.w2, begun[0], begun[1], made.v1, made.v2, position)
    if queries is None:
        return None, after_all
    reads = y.view(-1, *lead, size, x.shape[-1]).movedim(0, -3).flatten(-3, -2)
    return reads.to(queries.dtype), after_all


_WRITING, _READING = len(SavedWrite._fields), len(SavedRead._fields)


def _saved(
    part: Sequence[Any], reads: bool
) -> tuple[TwoLayers, SavedWrite | None, SavedRead | None]:
    """The tensors saved of one chunk: the weights, and unless recomputing the rest."""
    weights, rest = TwoLayers(*part[:2]), part[2:]
    if not rest:
        return weights, None, None
    return weights, SavedWrite(*rest[:_WRITING]), SavedRead(*rest[_WRITING:]) if reads else None


def _each(part: Tensor | None, x: Tensor) -> Sequence[Any]:
    """`[count N, ...]` chunk by chunk."""
    if part is None:
        return [None] * x.shape[0]
    return part.unflatten(0, x.shape[:2]).unbind(0)


def _chunks(
    x: Tensor, v: Tensor, q: Tensor | None, g: Tensor, rated: Tensor, first: FirstLayer, after: bool
) -> list[tuple[Chunk, ChunkGates, FirstLayer]]:
    """All chunks' inputs, one entry per chunk."""
    qs: Sequence[Any] = q.unbind(0) if q is not None else [None] * x.shape[0]
    tokens = (Chunk(*part) for part in zip(x.unbind(0), v.unbind(0), qs, strict=True))
    table = (gates(*part, after) for part in zip(_each(g, x), _each(rated, x), strict=True))
    firsts = (FirstLayer(*part) for part in zip(*(_each(f, x) for f in first), strict=True))
    return list(zip(tokens, table, firsts, strict=True))


class _Scan(torch.autograd.Function):
    """All chunks in order; x, v, q `[count, N, C, D]`, g and rated `[count N, ...]` of `tables`."""

    @staticmethod
    def forward(
        ctx: Any, how: Variant, after: bool, recompute: bool, w1: Tensor, w2: Tensor, x: Tensor,
        v: Tensor, q: Tensor | None, g: Tensor, rated: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        flat = q.flatten(0, 1) if q is not None else None
        first = first_layer(x.flatten(0, 1), flat, rated[:, :-1], how.erase)
        weights, reads = TwoLayers(w1, w2), torch.empty_like(x if q is not None else x[:0])
        kept: list[Tensor | None] = []
        for i, part in enumerate(_chunks(x, v, q, g, rated, first, after)):
            new, writing, k = write(weights, *part, how)
            kept += weights if recompute else [*weights, *writing]
            if q is not None:
                reads[i], reading = read_chunk(weights, *part, writing.e1, writing.e2, k, how)
                kept += [] if recompute else reading
            weights = new
        ctx.save_for_backward(x, v, q, g, rated, *first, *kept)
        ctx.how, ctx.after = how, after
        return reads, *weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d1: Tensor, d2: Tensor) -> tuple[Tensor | None, ...]:
        x, v, q, g, rated, *kept = ctx.saved_tensors
        first, kept, how = FirstLayer(*kept[:3]), kept[3:], ctx.how
        each = len(kept) // x.shape[0]
        dx, dv = torch.empty_like(x), torch.empty_like(v)
        dq = torch.empty_like(q) if q is not None else None
        dg, drated = torch.zeros_like(g), torch.zeros_like(rated)
        both = zip(_each(dg, x), _each(drated, x), strict=True)
        into = [gates(*part, ctx.after) for part in both]
        d = TwoLayers(d1, d2)
        parts = _chunks(x, v, q, g, rated, first, ctx.after)
        for i, part in reversed(list(enumerate(parts))):
            w, writing, reading = _saved(kept[i * each : (i + 1) * each], q is not None)
            if writing is None:
                _, writing, k = write(w, *part, how)
                if q is not None:
                    _, reading = read_chunk(w, *part, writing.e1, writing.e2, k, how)
            else:
                k = hidden(writing, how)
            adjoint = None
            if reading is not None and dq is not None:
                asked, adjoint = read_backward(
                    dy[i], w, *part, reading, writing.e1, writing.e2, k, how
                )
                dq[i] = asked.q
                into[i].Rb.add_(asked.Rb)
                into[i].r.add_(asked.r)
            grads = write_backward(d, adjoint, w, *part, writing, k, how)
            dx[i], dv[i], d = grads.x, grads.v, grads.weights
            into[i].cb.add_(grads.cb)
            into[i].gC.add_(grads.gC)
            if grads.Lb is not None and grads.gp is not None:
                into[i].Lb.add_(grads.Lb)
                into[i].gp.add_(grads.gp)
        return None, None, None, d.s1, d.s2, dx, dv, dq, dg, drated


def _compiled(
    state: MLPState, x: Tensor, v: Tensor, rate: Tensor, retain: Tensor, queries: Tensor | None,
    momentum: Tensor | None, plain: tuple[Any, ...],
) -> tuple[Tensor | None, MLPState]:  # fmt: skip
    """`scan_mlp` as one node of a graph."""
    chunk, position = plain[3], state.position + x.shape[-2]
    if momentum is not None and state.velocity1 is None:
        still = torch.zeros_like(state.w1), torch.zeros_like(state.w2)
        state = state._replace(velocity1=still[0], velocity2=still[1])
    made = _operator(*plain, *state[:6], x, v, rate, retain, queries, momentum)
    parts = iter(made)
    y = None if queries is None else next(parts)
    end = MLPState(next(parts), next(parts), position=position)
    if position % chunk:
        end = end._replace(start1=next(parts), start2=next(parts))
    if momentum is not None:
        end = end._replace(velocity1=next(parts), velocity2=next(parts))
    return y, end


def _run(plain: Sequence[Any], tensors: Sequence[Any]) -> list[Tensor]:
    squared, erase, after, chunk, clip, bound, recompute, position = plain
    *weights, x, v, rate, retain, queries, momentum = tensors
    state = MLPState(*weights)._replace(position=position)
    y, end = scan_mlp(
        state, x, v, rate, retain, queries,
        objective=l2 if squared else dot, erase=erase,
        read="after" if after else "before", chunk=chunk, clip=clip or None, bound_inputs=bound,
        momentum=momentum, recompute=recompute, check=False,
    )  # fmt: skip
    return [part for part in (y, *end[:6]) if part is not None]


def _fake(plain: Sequence[Any], tensors: Sequence[Any]) -> list[Tensor]:
    chunk, position = plain[3], plain[-1]
    w1, w2, _, _, velocity1, _, x, v, rate, retain, queries, momentum = tensors
    dtype = compute_dtype(w1, w2, x, v, rate, retain, queries, momentum)
    made = [] if queries is None else [torch.empty_like(queries)]
    many = 1 + bool((position + x.shape[-2]) % chunk) + (velocity1 is not None)
    return made + [torch.empty_like(w, dtype=dtype) for w in (w1, w2) * many]


_operator = opaque(
    "deep",
    ["bool squared", "bool erase", "bool after", "int chunk", "float clip", "bool bound",
     "bool recompute", "int position"],
    "w1 w2 start1 start2 velocity1 velocity2 x v rate retain queries momentum".split(),
    _run,
    _fake,
)  # fmt: skip
