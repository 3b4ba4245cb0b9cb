"""The matrix scan on a GPU: delta rule and Hebbian rule as Triton kernels, forward and backward.

Names are those of the chunked form (`chunk.py` beside this file). In a chunk of C tokens, with S
the memory where it starts, `a` retain, `n` rate, `g_t` the running product of a, `G_ts` the product
of a over s+1 ... t (no logarithm and no division, so a retain of 0 is exact),

    (I + L) E = U - g_{t-1} X S^T,     L_ts = n_s G_{t-1,s} x_t . x_s   for s < t     (gd: E = U)
    Y = g_r Q S^T + (G_r (Q X^T) n) E                                   r = t (after) or t - 1
    S' = g_C S + E^T (n G_C X)

Backward, with `dR = (I + L)^-T dE` (gd: dR = dE) and dS' the gradient behind the chunk:

    dE = (G_r (Q X^T) n)^T dY + n G_C X dS'^T,    dU = dR
    dS = g_C dS' + (g_r dY)^T Q - (g_{t-1} dR)^T X
    dQ = g_r dY S + (G_r (dY E^T) n) X
    dX = n G_C E dS' + (G_r (dY E^T) n)^T Q - g_{t-1} dR S - (Z + Z^T) X,  Z = G_{t-1} (dR E^T) n
    da_t = <dM_t, M_{t-1}>: colsum(G_r (P G_{t-1}^T)) of P = (Q X^T)(dY E^T) n and its like

What does not depend on the memory runs for all chunks at once; `_recur` and `_recur_back` walk.

    forward   _solve (chunks, M)    _recur (M, Do / BV)              _read (chunks, M, Do / BV)
    backward  _reads_back (chunks, M, Do / BV)   _recur_back (M, Do / BV)   _pairs_back (chunks, M)
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestling.scan.delta.kernel import GIVEN
from nestling.scan.delta.types import Options
from nestling.scan.opaque import differentiate_once, only_needed
from nestling.scan.tiles import (
    DTYPES,
    LARGEST,
    flat,
    load_rows,
    longest,
    precision,
    tile_rows,
    unit_inverse,
    where_it_runs,
)

FORM = "bool erase, bool after, int chunk"


@triton.jit
def _tokens(pointer, t, mask, other):
    return tl.load(pointer + t, mask=mask, other=other).to(tl.float32)


@triton.jit
def _decays(retain, t, r, T, AFTER: tl.constexpr):
    """g_{t-1}, G_{t-1,s} and the same for reads."""
    a = _tokens(retain, t, t < T, 1.0)
    before = _tokens(retain, t - 1, (t <= T) & (r > 0), 1.0)
    gm = tl.cumprod(before, 0)
    low = r[:, None] > r[None, :]
    steps = tl.where(r[:, None] > r[None, :] + 1, before[:, None], 1.0)
    Gm = tl.where(low, tl.cumprod(steps, 0), 0.0)
    if AFTER:
        Gr = tl.where(r[:, None] == r[None, :], 1.0, a[:, None] * Gm)
        gr = gm * a
    else:
        Gr = Gm
        gr = gm
    return gm, Gm, gr, Gr


@triton.jit
def _tails(retain, t, r, T):
    """G_{C,s} and g_C."""
    behind = _tokens(retain, t + 1, (t + 1 < T) & (r + 1 < r.shape[0]), 1.0)
    tail = tl.cumprod(behind, 0, reverse=True)
    first = _tokens(retain, t, (t < T) & (r == 0), 1.0)
    return tail, tl.sum(tl.where(r == 0, first * tail, 0.0), 0)


@triton.jit
def _solve(
    x, rate, retain, inverse, T,
    DI: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """(I + L)^-1 of every chunk."""
    chunk = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, C)
    t = chunk * C + r
    _, Gm, _, _ = _decays(retain + m * T, t, r, T, False)
    n = _tokens(rate + m * T, t, t < T, 0.0)
    X = load_rows(x + m * T * DI, t, t < T, tl.arange(0, DI), DI)
    L = Gm * tl.dot(X, tl.trans(X), input_precision=PREC) * n[None, :]
    inverse += (m * tl.cdiv(T, C) + chunk) * C * C
    tl.store(inverse + r[:, None] * C + r[None, :], unit_inverse(L, C, SOLVE))


@triton.jit
def _recur(
    state, x, u, rate, retain, inverse, errors, starts, T,
    DI: tl.constexpr, DO: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    ERASE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Walk the chunks: E, and the memory where every chunk starts (and where the last ends)."""
    m = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    k, r = tl.arange(0, DI), tl.arange(0, C)
    chunks = tl.cdiv(T, C)
    x, u, errors = x + m * T * DI, u + m * T * DO, errors + m * T * DO
    rate, retain, inverse = rate + m * T, retain + m * T, inverse + m * chunks * C * C
    starts += m * (chunks + 1) * DO * DI
    at = v[None, :] * DI + k[:, None]  # S^T [DI, BV]
    S = tl.load(state + m * DO * DI + at).to(tl.float32)
    for chunk in range(0, chunks):
        tl.store(starts + at, S)
        starts += DO * DI
        t = chunk * C + r
        ok = t < T
        X = load_rows(x, t, ok, k, DI)
        E = load_rows(u, t, ok, v, DO)
        if ERASE:
            gm = tl.cumprod(_tokens(retain, t - 1, (t <= T) & (r > 0), 1.0), 0)
            E -= gm[:, None] * tl.dot(X, S, input_precision=PREC)
            J = tl.load(inverse + chunk * C * C + r[:, None] * C + r[None, :])
            E = tl.dot(J, E, input_precision=PREC)
            tl.store(errors + t[:, None] * DO + v[None, :], E, mask=ok[:, None])
        tail, whole = _tails(retain, t, r, T)
        n = _tokens(rate, t, ok, 0.0)
        S = whole * S + tl.dot(tl.trans(X), (n * tail)[:, None] * E, input_precision=PREC)
    tl.store(starts + at, S)


@triton.jit
def _scores(
    x, q, rate, retain, m, t, ok, k, r, T,
    DI: tl.constexpr, AFTER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Q, g_r and G_r (Q X^T) n of a chunk."""
    X = load_rows(x + m * T * DI, t, ok, k, DI)
    Q = load_rows(q + m * T * DI, t, ok, k, DI)
    _, _, gr, Gr = _decays(retain + m * T, t, r, T, AFTER)
    A = Gr * tl.dot(Q, tl.trans(X), input_precision=PREC)
    A *= _tokens(rate + m * T, t, ok, 0.0)[None, :]
    return Q, gr, A


@triton.jit
def _read(
    x, q, rate, retain, errors, starts, y, T,
    DI: tl.constexpr, DO: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    AFTER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    k, r = tl.arange(0, DI), tl.arange(0, C)
    t = chunk * C + r
    ok = t < T
    Q, gr, A = _scores(x, q, rate, retain, m, t, ok, k, r, T, DI, AFTER, PREC)
    starts += (m * (tl.cdiv(T, C) + 1) + chunk) * DO * DI
    S = tl.load(starts + v[None, :] * DI + k[:, None])
    Y = gr[:, None] * tl.dot(Q, S, input_precision=PREC)
    E = load_rows(errors + m * T * DO, t, ok, v, DO)
    Y += tl.dot(A, E, input_precision=PREC)
    tl.store(y + m * T * DO + t[:, None] * DO + v[None, :], Y, mask=ok[:, None])


@triton.jit
def _reads_back(
    x, q, rate, retain, dy, du, T,
    DI: tl.constexpr, DO: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    AFTER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The reads' part of dE, into `du`."""
    chunk = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    k, r = tl.arange(0, DI), tl.arange(0, C)
    t = chunk * C + r
    ok = t < T
    _, _, A = _scores(x, q, rate, retain, m, t, ok, k, r, T, DI, AFTER, PREC)
    dY = load_rows(dy + m * T * DO, t, ok, v, DO)
    dE = tl.dot(tl.trans(A), dY, input_precision=PREC)
    tl.store(du + m * T * DO + t[:, None] * DO + v[None, :], dE, mask=ok[:, None])


@triton.jit
def _recur_back(
    dend, x, q, rate, retain, inverse, dy, du, dstarts, T,
    DI: tl.constexpr, DO: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    ERASE: tl.constexpr, AFTER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Walk back: dR in the place of the reads' part of dE, and dS where every chunk starts."""
    m = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    k, r = tl.arange(0, DI), tl.arange(0, C)
    chunks = tl.cdiv(T, C)
    x, du = x + m * T * DI, du + m * T * DO
    rate, retain, inverse = rate + m * T, retain + m * T, inverse + m * chunks * C * C
    dstarts += (m * (chunks + 1) + chunks) * DO * DI
    at = v[None, :] * DI + k[:, None]
    dS = tl.load(dend + m * DO * DI + at).to(tl.float32)
    tl.store(dstarts + at, dS)
    for step in range(0, chunks):
        chunk = chunks - 1 - step
        t = chunk * C + r
        ok = t < T
        X = load_rows(x, t, ok, k, DI)
        tail, whole = _tails(retain, t, r, T)
        n = _tokens(rate, t, ok, 0.0)
        dE = (n * tail)[:, None] * tl.dot(X, dS, input_precision=PREC)
        place = du + t[:, None] * DO + v[None, :]
        gm = tl.cumprod(_tokens(retain, t - 1, (t <= T) & (r > 0), 1.0), 0)
        dS = whole * dS
        if q is not None:
            dE += tl.load(place, mask=ok[:, None], other=0.0)
            gr = gm
            if AFTER:
                gr = gm * _tokens(retain, t, ok, 1.0)
            Q = load_rows(q + m * T * DI, t, ok, k, DI)
            dY = load_rows(dy + m * T * DO, t, ok, v, DO)
            dS += tl.dot(tl.trans(Q), gr[:, None] * dY, input_precision=PREC)
        if ERASE:
            J = tl.load(inverse + chunk * C * C + r[:, None] * C + r[None, :])
            dE = tl.dot(tl.trans(J), dE, input_precision=PREC)
            dS -= tl.dot(tl.trans(X), gm[:, None] * dE, input_precision=PREC)
        tl.store(place, dE, mask=ok[:, None])
        dstarts -= DO * DI
        tl.store(dstarts + at, dS)


@triton.jit
def _pairs_back(
    x, q, rate, retain, errors, starts, dy, du, dstarts, dx, dq, drate, dretain, T,
    DI: tl.constexpr, DO: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    ERASE: tl.constexpr, AFTER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dX, dQ and the gates' gradients of every chunk, over all blocks of outputs."""
    chunk = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    k, r = tl.arange(0, DI), tl.arange(0, C)
    t = chunk * C + r
    ok = t < T
    starts += (m * (tl.cdiv(T, C) + 1) + chunk) * DO * DI
    dstarts += (m * (tl.cdiv(T, C) + 1) + chunk + 1) * DO * DI
    asked = tl.zeros([C, C], tl.float32)  # dY E^T
    erased = tl.zeros([C, C], tl.float32)  # dR E^T
    last = tl.zeros([C, DI], tl.float32)  # E dS'
    dX = tl.zeros([C, DI], tl.float32)
    dQ = tl.zeros([C, DI], tl.float32)
    both = 0.0  # <dS', S>
    for block in range(0, DO, BV):
        v = block + tl.arange(0, BV)
        at = v[:, None] * DI + k[None, :]
        S = tl.load(starts + at)
        dS = tl.load(dstarts + at)
        E = load_rows(errors + m * T * DO, t, ok, v, DO)
        both += tl.sum(tl.sum(S * dS, 1), 0)
        last += tl.dot(E, dS, input_precision=PREC)
        if q is not None:
            dY = load_rows(dy + m * T * DO, t, ok, v, DO)
            asked += tl.dot(dY, tl.trans(E), input_precision=PREC)
            dQ += tl.dot(dY, S, input_precision=PREC)
        if ERASE:
            dR = load_rows(du + m * T * DO, t, ok, v, DO)
            erased += tl.dot(dR, tl.trans(E), input_precision=PREC)
            dX -= tl.dot(dR, S, input_precision=PREC)
    # What the blocks do not need is loaded behind them: at width 128 registers would spill.
    X = load_rows(x + m * T * DI, t, ok, k, DI)
    n = _tokens(rate + m * T, t, ok, 0.0)
    gm, Gm, gr, Gr = _decays(retain + m * T, t, r, T, AFTER)
    tail, _ = _tails(retain + m * T, t, r, T)
    ends = tl.sum(last * X, 1)  # E . dS' x
    da = tail * (tl.sum(Gm * (n * ends)[None, :], 1) + gm * both)
    dn = tail * ends
    if ERASE:
        P = tl.dot(X, tl.trans(X), input_precision=PREC) * erased
        dn -= tl.sum(Gm * P, 0)
        P = tl.dot(P * n[None, :], tl.trans(Gm), input_precision=PREC)
        P += tl.sum(dX * X, 1)[:, None] * -gm[None, :]
        da -= tl.sum(Gm * P, 0)
        Z = Gm * erased * n[None, :]
        dX = gm[:, None] * dX - tl.dot(Z + tl.trans(Z), X, input_precision=PREC)
    dX += (n * tail)[:, None] * last
    if q is not None:
        Q = load_rows(q + m * T * DI, t, ok, k, DI)
        P = tl.dot(Q, tl.trans(X), input_precision=PREC) * asked
        dn += tl.sum(Gr * P, 0)
        P = tl.dot(P * n[None, :], tl.trans(Gm), input_precision=PREC)
        P += tl.sum(dQ * Q, 1)[:, None] * gm[None, :]
        da += tl.sum(Gr * P, 0)
        Z = Gr * asked * n[None, :]
        dQ = gr[:, None] * dQ + tl.dot(Z, X, input_precision=PREC)
        dX += tl.dot(tl.trans(Z), Q, input_precision=PREC)
        tl.store(dq + m * T * DI + t[:, None] * DI + k[None, :], dQ, mask=ok[:, None])
    tl.store(dx + m * T * DI + t[:, None] * DI + k[None, :], dX, mask=ok[:, None])
    tl.store(drate + m * T + t, dn, mask=ok)
    tl.store(dretain + m * T + t, da, mask=ok)


def refusal(
    state: Any, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: Tensor | None,
    momentum: Tensor | None = None,
) -> str | None:  # fmt: skip
    """Why these kernels do not take a scan, or None."""
    if momentum is not None or not isinstance(state, Tensor):
        return "it has no momentum"
    widest = max(x.shape[-1], u.shape[-1])
    if widest > LARGEST:
        return f"a memory may be at most {LARGEST} wide; this one is {widest}"
    for part in (state, x, u, rate, retain, queries):
        if part is not None and part.dtype not in DTYPES:
            return f"it computes in float32, and an input is {part.dtype}"
    return where_it_runs(x)


def scan_triton(
    state: Any, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: Tensor | None,
    **options: Unpack[Options],
) -> tuple[Tensor | None, Any]:  # fmt: skip
    """The scan by Triton kernels (Eq. 65, 88; gd: Eq. 5, 15, 64), once differentiable.

    Reads have the dtype of the queries, the state is float32. Widths that are no power of two are
    padded with zeros, which changes nothing. A `chunk` is at most 32 tokens on a GPU. Errors,
    inverses and the memories between chunks are kept for the backward pass, with `recompute` too.
    """
    why = refusal(state, x, u, rate, retain, queries, options["momentum"])
    if why is not None:
        raise ValueError(f"backend 'triton' cannot run this scan: {why}; use backend='chunk'")
    lead, tokens = x.shape[:-2], x.shape[-2]
    (outer, inner), size = state.shape[-2:], math.prod(lead)
    if 0 in (size, tokens, outer, inner):
        return None if queries is None else queries.new_empty(u.shape), state.float()

    def wide(tensor: Tensor, *widths: int) -> Tensor:
        """Flat in front, padded to these widths behind."""
        tensor = tensor.reshape(size, *tensor.shape[len(lead) :])
        missing = [tile_rows(w) - w for w in reversed(widths)]
        if any(missing):
            tensor = torch.nn.functional.pad(tensor, [p for miss in missing for p in (0, miss)])
        return tensor

    asked = None if queries is None else wide(queries, inner)
    gates = (gate.reshape(size, tokens) for gate in (rate, retain))
    reads, end, *_ = _scan(
        wide(state, outer, inner), wide(x, inner), wide(u, outer), *gates, asked,
        options["erase"], options["read"] == "after",
        min(longest(), tile_rows(min(options["chunk"], tokens))),
    )  # fmt: skip
    end = end[:, :outer, :inner].reshape(*lead, outer, inner)
    if queries is None:
        return None, end
    return reads[..., :outer].reshape(*lead, tokens, outer).to(queries.dtype), end


def _block(inner: int, outer: int) -> int:
    """Outputs of one program: fewer where rows are long."""
    return min(outer, 32 if inner > 64 else 64)


def _warps(inner: int, outer: int) -> int:
    return 8 if max(inner, outer) > 64 else 4


@torch.library.custom_op(
    "nestling::delta_triton",
    mutates_args=(),
    schema=f"({GIVEN}, {FORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _scan(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reads (empty without queries), the end state; errors, inverses and starts for backward."""
    state, x, u, rate, retain, queries, erase, after, chunk = arguments
    (m, tokens, inner), outer = x.shape, u.shape[-1]
    chunks, block = triton.cdiv(tokens, chunk), _block(inner, outer)
    state, x, u, rate, retain = (part.contiguous() for part in (state, x, u, rate, retain))
    q = flat(queries)
    starts = x.new_empty(m, chunks + 1, outer, inner, dtype=torch.float32)
    errors = starts.new_empty(m, tokens, outer) if erase else x.new_empty(0)
    inverse = starts.new_empty(m, chunks, chunk, chunk) if erase else x.new_empty(0)
    how = precision() | {"num_warps": _warps(inner, outer)}
    prec = {name: how[name] for name in ("PREC", "num_warps")}
    sizes = {"DI": inner, "DO": outer, "BV": block, "C": chunk}
    if erase:
        _solve[(chunks, m)](x, rate, retain, inverse, tokens, DI=inner, C=chunk, **how)
    _recur[(m, outer // block)](
        state, x, u, rate, retain, inverse, errors, starts, tokens, **sizes, ERASE=erase, **prec
    )
    y = x.new_empty(0)
    if q is not None:
        y = starts.new_empty(m, tokens, outer)
        _read[(chunks, m, outer // block)](
            x, q, rate, retain, errors if erase else u, starts, y, tokens,
            **sizes, AFTER=after, **prec,
        )  # fmt: skip
    return y, starts[:, -1].clone(), errors, inverse, starts


@_scan.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, x, u, _, _, queries, erase, _, chunk = given
    (m, tokens, inner), outer = x.shape, u.shape[-1]
    chunks = (tokens + chunk - 1) // chunk
    full = x.new_empty(0, dtype=torch.float32)
    return (
        x.new_empty(0) if queries is None else full.new_empty(m, tokens, outer),
        full.new_empty(m, outer, inner),
        full.new_empty(m, tokens, outer) if erase else x.new_empty(0),
        full.new_empty(m, chunks, chunk, chunk) if erase else x.new_empty(0),
        full.new_empty(m, chunks + 1, outer, inner),
    )


@torch.library.custom_op(
    "nestling::delta_triton_backward",
    mutates_args=(),
    schema=f"(Tensor? dreads, Tensor? dend, {GIVEN}, Tensor errors, Tensor inverse, Tensor starts,"
    f" {FORM}) -> Tensor[]",
)
def _scan_backward(dreads: Tensor | None, dend: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Gradients of state, x, u, rate, retain and queries (empty without reads)."""
    state, x, u, rate, retain, queries, errors, inverse, starts, erase, after, chunk = arguments
    (m, tokens, inner), outer = x.shape, u.shape[-1]
    chunks, block = triton.cdiv(tokens, chunk), _block(inner, outer)
    asked = None if dreads is None else queries
    x, u, rate, retain = (part.contiguous() for part in (x, u, rate, retain))
    q, dy = flat(asked), flat(dreads)
    dlast = torch.zeros_like(starts[:, -1]) if dend is None else dend.contiguous()
    du, dstarts = starts.new_empty(m, tokens, outer), torch.empty_like(starts)
    dx, dq = starts.new_empty(m, tokens, inner), starts.new_empty(m, tokens, inner)
    drate, dretain = starts.new_empty(m, tokens), starts.new_empty(m, tokens)
    prec = {"PREC": precision()["PREC"], "num_warps": _warps(inner, outer)}
    sizes = {"DI": inner, "DO": outer, "BV": block, "C": chunk}
    if q is not None:
        _reads_back[(chunks, m, outer // block)](
            x, q, rate, retain, dy, du, tokens, **sizes, AFTER=after, **prec
        )
    _recur_back[(m, outer // block)](
        dlast, x, q, rate, retain, inverse, dy, du, dstarts, tokens,
        **sizes, ERASE=erase, AFTER=after, **prec,
    )  # fmt: skip
    _pairs_back[(chunks, m)](
        x, q, rate, retain, errors if erase else u, starts, dy, du, dstarts,
        dx, dq, drate, dretain, tokens, **sizes, ERASE=erase, AFTER=after, **prec,
    )  # fmt: skip
    grads = [dstarts[:, 0].to(state.dtype, copy=True), dx.to(x.dtype), du.to(u.dtype)]
    grads += [drate.to(rate.dtype), dretain.to(retain.dtype)]
    if queries is None:
        return [*grads, x.new_empty(0)]
    return [*grads, torch.zeros_like(queries) if q is None else dq.to(queries.dtype)]


@_scan_backward.register_fake
def _(dreads: Tensor | None, dend: Tensor | None, *given: Any) -> list[Tensor]:
    none = given[0].new_empty(0)
    return [torch.empty_like(none if tensor is None else tensor) for tensor in given[:6]]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], *output[2:])
    ctx.options = inputs[6:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dreads: Any, dend: Any, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    dreads = None if saved[5] is None else dreads
    grads = _scan_backward(dreads, dend, *saved, *ctx.options)
    return (*only_needed(grads, ctx.needs_input_grad[:6]), None, None, None)


differentiate_once(
    _scan, _scan_backward, _setup, _backward,
    "the Triton scan is differentiable once; for second derivatives use"
    " scan(..., backend='chunk_autograd') or backend='naive'",
)  # fmt: skip
