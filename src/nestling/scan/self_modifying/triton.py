"""The self-modifying scan of matrix memories on a GPU: Triton kernels, forward and backward.

`kernel.py` beside this file derives every line and has the names. A call is cut into segments of at
most `tile` tokens: a segment never crosses the start of a chunk, but a chunk may be several
segments, which share the weights where the chunk starts. All weights stand in one tensor `stacks`
[slots, b, N, D, D]: slot 0 is the start that was given, slot i + 1 the stack before segment i. A
segment's row of `cuts` is its first token, its end, and the slots where the chunks of the main
memory and of the others start.

Forward, two launches a segment, because inside a segment the memories are independent given k, v
and the gates:

    _look   (b)         k, v, q, gates and (I + eta e D (K K^T))^-1 from the memories
    _learn  (b, N D/BO) vhat, w, BO rows of one memory after the segment; the main one also reads

Backward, only `stacks` was kept. What a segment computed is computed again for many segments at
once (`_look`, `_learn`), then three launches a segment carry the gradient of the stack back, and
one more for many segments finds what nothing else waits for:

    _learn_back   (b, N D/BO)  through reads, end of segment and triangular system
    _errors_back  (b, N D/BO)  through errors and self-made values
    _look_back    (b, N D/BO)  through gates and projections, to the memories that made them
    _gather       (segments, b)  the gradients of x and of the read-outs
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from nestling.norm import EPS as SMALL
from nestling.scan.self_modifying.api import scan_operator
from nestling.scan.self_modifying.rule import RETAIN_MIN, Inputs, SelfRule, Weights
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

__all__ = ["refusal", "run_backward", "run_forward", "scan_triton", "slots"]

EPS = tl.constexpr(SMALL)


@triton.jit
def _tile(pointer, rows, columns, WIDTH: tl.constexpr):
    return tl.load(pointer + rows[:, None] * WIDTH + columns[None, :])


@triton.jit
def _put(pointer, rows, columns, value, WIDTH: tl.constexpr):
    tl.store(pointer + rows[:, None] * WIDTH + columns[None, :], value)


@triton.jit
def _start(stack, home, at, rows, columns, D: tl.constexpr):
    """Rows and columns of the memory at offset `at` where its chunk starts: home, if any, plus the
    stack."""
    memory = _tile(stack + at, rows, columns, D)
    if home is not None:
        memory += _tile(home + at, rows, columns, D)
    return memory


@triton.jit
def _gap(past, g, r):
    """D_ts = g_{t-1} / g_s for s < t, else 0, from logarithms."""
    later = r[:, None] > r[None, :]
    return tl.exp(tl.where(later, past[:, None] - g[None, :], float("-inf")))


@triton.jit
def _last(g, r, C: tl.constexpr):
    return tl.sum(tl.where(r == C - 1, g, 0.0), 0)


@triton.jit
def _project(
    x, given, t, ok, stack, home, at,
    D: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Ask a memory about x, add the given rows, normalise: rows [C, D] and their scales."""
    o = tl.arange(0, D)
    raw = tl.zeros([C, D], tl.float32)
    for block in range(0, D, BK):
        k = block + tl.arange(0, BK)
        X = load_rows(x, t, ok, k, D)
        raw += tl.dot(X, tl.trans(_start(stack, home, at, o, k, D)), input_precision=PREC)
    if given is not None:
        raw += load_rows(given, t, ok, o, D)
    scale = 1.0 / tl.sqrt(tl.sum(raw * raw, 1) + EPS)
    return raw * scale[:, None], scale


@triton.jit
def _sight(readout, stack, home, at, D: tl.constexpr, BK: tl.constexpr):
    """The vector on which a gate looks at x: its read-out through its memory, [D]."""
    k = tl.arange(0, D)
    sight = tl.zeros([D], tl.float32)
    for block in range(0, D, BK):
        o = block + tl.arange(0, BK)
        look = tl.load(readout + o).to(tl.float32)
        sight += tl.sum(look[:, None] * _start(stack, home, at, o, k, D), 0)
    return sight


@triton.jit
def _look_at(
    x, given, offset, t, ok, stack, home, scales, out, AT: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """k, v or q of a segment: made by memory AT (with its scales), or as given; also into `out`."""
    r, d = tl.arange(0, C), tl.arange(0, D)
    if given is not None:
        given += offset
    if AT >= 0:
        seen, scale = _project(x, given, t, ok, stack, home, AT * D * D, D, C, BK, PREC)
        tl.store(scales + r, scale)
    else:
        seen = load_rows(given, t, ok, d, D)
    _put(out, r, d, seen, D)
    return seen


@triton.jit(do_not_specialize=["first"])
def _look(
    cuts, x, readout, bias, ks, vs, qs, gates, erase, valid, home, stacks,
    keys, values, queries, inverse, numbers, first, T, B, RATE, SPAN, LEAST,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, Q_AT: tl.constexpr,
    ETA_AT: tl.constexpr, ALPHA_AT: tl.constexpr, TIED: tl.constexpr, SHUT: tl.constexpr,
    ERASE: tl.constexpr, PREC: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """k, v, q, gates and the inverse of a segment. The rows of its `numbers` [8, C]: rate, log g_t,
    log g_{t-1}, the shares of rate and retention, the scales of k, v and q."""
    b = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * B + b  # of the results
    cuts += (first + tl.program_id(0)) * 4
    t0 = tl.load(cuts)
    others = tl.load(cuts + 3).to(tl.int64)
    r, d = tl.arange(0, C), tl.arange(0, D)
    t = t0 + r
    ok = t < tl.load(cuts + 1)
    x += b * T * D
    stack = stacks + (others * B + b) * N * D * D
    numbers += row * 8 * C
    if home is not None:
        home += b * N * D * D
    # k, v, q
    spot = row * C * D
    K = _look_at(
        x, ks, b * T * D, t, ok, stack, home, numbers + 5 * C, keys + spot, K_AT, D, C, BK, PREC
    )
    _look_at(
        x, vs, b * T * D, t, ok, stack, home, numbers + 6 * C, values + spot, V_AT, D, C, BK, PREC
    )
    _look_at(
        x, qs, b * T * D, t, ok, stack, home, numbers + 7 * C, queries + spot, Q_AT, D, C, BK, PREC
    )
    # gates
    X = load_rows(x, t, ok, d, D)
    readout += b * 2 * D
    if ETA_AT >= 0:
        sight = _sight(readout, stack, home, ETA_AT * D * D, D, BK)
    else:
        sight = tl.load(readout + d).to(tl.float32)
    raw_eta = tl.sum(X * sight[None, :], 1) + tl.load(bias + b * 2).to(tl.float32)
    if ALPHA_AT >= 0:
        sight = _sight(readout + D, stack, home, ALPHA_AT * D * D, D, BK)
    else:
        sight = tl.load(readout + D + d).to(tl.float32)
    raw_alpha = tl.sum(X * sight[None, :], 1) + tl.load(bias + b * 2 + 1).to(tl.float32)
    if gates is not None:
        at = gates + b * T * 2 + t * 2
        raw_eta += tl.load(at, mask=ok, other=0.0).to(tl.float32)
        raw_alpha += tl.load(at + 1, mask=ok, other=0.0).to(tl.float32)
    sig_eta, sig_alpha = tl.sigmoid(raw_eta), tl.sigmoid(raw_alpha)
    if SHUT > 0.0:
        sig_eta = tl.maximum(sig_eta - SHUT, 0.0) / (1.0 - SHUT)
    retain = LEAST + SPAN * sig_alpha
    if TIED:
        lost = sig_eta * (1.0 - retain)
        retain = 1.0 - lost
        series = -lost * (1.0 + lost * (0.5 + lost * (1.0 / 3.0 + lost * 0.25)))
        log = tl.where(lost < 0.01, series, tl.log(retain))
    else:
        log = tl.log(retain)
    eta = retain * RATE * sig_eta
    real = ok
    if valid is not None:
        real = ok & (tl.load(valid + b * T + t, mask=ok, other=0) != 0)
    eta, log = tl.where(real, eta, 0.0), tl.where(real, log, 0.0)
    g = tl.cumsum(log, 0)
    tl.store(numbers + r, eta)
    tl.store(numbers + C + r, g)
    tl.store(numbers + 2 * C + r, g - log)
    tl.store(numbers + 3 * C + r, sig_eta)
    tl.store(numbers + 4 * C + r, sig_alpha)
    if ERASE:
        rate = eta
        if erase is not None:
            rate = eta * tl.load(erase + b).to(tl.float32)
        L = tl.dot(K, tl.trans(K), input_precision=PREC)
        L *= rate[:, None] * _gap(g - log, g, r)
        _put(inverse + row * C * C, r, r, unit_inverse(L, C, SOLVE), C)


@triton.jit
def _errors(
    K, V, values, begun, home, r, o, CLIP,
    D: tl.constexpr, C: tl.constexpr, BO: tl.constexpr,
    OWN: tl.constexpr, L2: tl.constexpr, SHORT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Columns o of vhat and of the error; the scale of all columns of vhat, how much all columns of
    the error were shortened. `begun` is the start without home."""
    scale = tl.full([C], 1.0, tl.float32)
    short = tl.full([C], 1.0, tl.float32)
    if OWN:
        mine = _start(begun, home, 0, o, tl.arange(0, D), D)
        vhat = tl.dot(V, tl.trans(mine), input_precision=PREC)
        square = tl.sum(vhat * vhat, 1)
        if BO < D:  # the other columns count too
            square = tl.zeros([C], tl.float32)
            for block in range(0, D, BO):
                rows = block + tl.arange(0, BO)
                other = _start(begun, home, 0, rows, tl.arange(0, D), D)
                said = tl.dot(V, tl.trans(other), input_precision=PREC)
                square += tl.sum(said * said, 1)
        scale = 1.0 / tl.sqrt(square + EPS)
        vhat *= scale[:, None]
    else:
        vhat = _tile(values, r, o, D)
    u = vhat
    if L2:
        said = tl.dot(K, tl.trans(_tile(begun, o, tl.arange(0, D), D)), input_precision=PREC)
        u = vhat - said
    if SHORT:
        square = tl.sum(u * u, 1)
        if BO < D:
            square = tl.zeros([C], tl.float32)
            for block in range(0, D, BO):
                rows = block + tl.arange(0, BO)
                if OWN:
                    other = _start(begun, home, 0, rows, tl.arange(0, D), D)
                    e = tl.dot(V, tl.trans(other), input_precision=PREC) * scale[:, None]
                else:
                    e = _tile(values, r, rows, D)
                if L2:
                    other = _tile(begun, rows, tl.arange(0, D), D)
                    e -= tl.dot(K, tl.trans(other), input_precision=PREC)
                square += tl.sum(e * e, 1)
        short = CLIP / tl.maximum(tl.sqrt(square), CLIP)
        u *= short[:, None]
    return vhat, u, scale, short


@triton.jit(do_not_specialize=["first"])
def _learn(
    cuts, erase, home, stacks, keys, values, queries, inverse, numbers,
    y, written, own, u, scales, first, T, B, CLIP,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
    ERASE: tl.constexpr, OWN: tl.constexpr, L2: tl.constexpr, SHORT: tl.constexpr,
    READ_START: tl.constexpr, FULL: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """BO rows of one memory through a segment: the stack after it and reads, or (FULL) the rows
    written [b, N, C, D] and what made them."""
    b = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2) // (D // BO)
    o = tl.program_id(2) % (D // BO) * BO + tl.arange(0, BO)
    row = tl.program_id(0) * B + b
    segment = first + tl.program_id(0)
    cuts += segment * 4
    r, d = tl.arange(0, C), tl.arange(0, D)
    here = (b * N + n) * D * D
    begun = tl.load(cuts + 2 + (n > 0)).to(tl.int64)  # the slot where this memory's chunk starts
    begun = stacks + begun * B * N * D * D + here
    slots = tl.full((), N * D * D, tl.int64) * B  # from one slot to the next
    now = stacks + (segment + 1) * slots + here
    if home is not None:
        home += here
    numbers += row * 8 * C
    K = _tile(keys + row * C * D, r, d, D)
    V = K
    if OWN:
        V = _tile(values + row * C * D, r, d, D)
    vhat, error, scale, short = _errors(
        K, V, values + row * C * D, begun, home, r, o, CLIP, D, C, BO, OWN, L2, SHORT, PREC
    )
    eta, g, past = tl.load(numbers + r), tl.load(numbers + C + r), tl.load(numbers + 2 * C + r)
    S = _tile(now, o, d, D)
    W = eta[:, None] * error
    if ERASE:
        faded = eta * tl.exp(past)
        if erase is not None:
            faded *= tl.load(erase + b).to(tl.float32)
        W -= faded[:, None] * tl.dot(K, tl.trans(S), input_precision=PREC)
        W = tl.dot(_tile(inverse + row * C * C, r, r, C), W, input_precision=PREC)
    if FULL:
        spot = (row * N + n) * C
        _put(written + spot * D, r, o, W, D)
        if OWN:
            _put(own + spot * D, r, o, vhat, D)
        if SHORT:
            _put(u + spot * D, r, o, error, D)
        tl.store(scales + spot * 2 + r, scale)
        tl.store(scales + spot * 2 + C + r, short)
    else:
        last = _last(g, r, C)
        rows = W * tl.exp(last - g)[:, None]
        after = tl.exp(last) * S + tl.dot(tl.trans(rows), K, input_precision=PREC)
        _put(now + slots, o, d, after, D)
        if n == 0:
            Y = tl.zeros([C, BO], tl.float32)
            alike = tl.zeros([C, C], tl.float32)
            source = now
            if READ_START:
                source = begun
            for block in range(0, D, BK):
                k = block + tl.arange(0, BK)
                Q = _tile(queries + row * C * D, r, k, D)
                Y += tl.dot(Q, tl.trans(_tile(source, o, k, D)), input_precision=PREC)
                if not READ_START:
                    some = _tile(keys + row * C * D, r, k, D)
                    alike += tl.dot(Q, tl.trans(some), input_precision=PREC)
            if not READ_START:
                Y *= tl.exp(past)[:, None]
                Y += tl.dot(alike * _gap(past, g, r), W, input_precision=PREC)
            t = tl.load(cuts) + r
            at = y + b * T * D + t[:, None] * D + o[None, :]
            tl.store(at, Y, mask=(t < tl.load(cuts + 1))[:, None])


@triton.jit(do_not_specialize=["first", "segment"])
def _learn_back(
    cuts, erase, stacks, keys, values, queries, inverse, numbers, y, written, own, u,
    dy, dstack, dks, dqs, dus, sums, logs, segment, first, T, B,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BO: tl.constexpr,
    ERASE: tl.constexpr, OWN: tl.constexpr, SHORT: tl.constexpr,
    READ_START: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Back through the end of the segment, the reads and the triangular system; `dstack` turns from
    the gradient behind the segment into that before it, as far as it is not through the start."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) // (D // BO)
    o = tl.program_id(1) % (D // BO) * BO + tl.arange(0, BO)
    row = (segment - first) * B + b
    part = b * N * (D // BO) + tl.program_id(1)  # a share of what all memories and columns give
    spot = (row * N + n) * C
    cuts += segment * 4
    r, d = tl.arange(0, C), tl.arange(0, D)
    here = (b * N + n) * D * D
    slots = tl.full((), N * D * D, tl.int64) * B  # from one slot to the next
    now = stacks + (segment + 1) * slots + here
    dstack += here
    numbers += row * 8 * C
    eta, g, past = tl.load(numbers + r), tl.load(numbers + C + r), tl.load(numbers + 2 * C + r)
    last = _last(g, r, C)
    tail = tl.exp(last - g)
    K = _tile(keys + row * C * D, r, d, D)
    W = _tile(written + spot * D, r, o, D)
    dafter = _tile(dstack, o, d, D)
    both = _tile(now + slots, o, d, D) * dafter
    tl.store(logs + part, tl.sum(tl.sum(both, 1), 0))
    dW = tail[:, None] * tl.dot(K, tl.trans(dafter), input_precision=PREC)
    dK = tl.dot(W * tail[:, None], dafter, input_precision=PREC)
    dS = tl.exp(last) * dafter
    S = _tile(now, o, d, D)
    gap = _gap(past, g, r)
    moving = tl.zeros([C], tl.float32)
    if not READ_START:
        if n == 0:
            t = tl.load(cuts) + r
            ok = t < tl.load(cuts + 1)
            dY = load_rows(dy + b * T * D, t, ok, o, D)
            moving = tl.sum(dY * load_rows(y + b * T * D, t, ok, o, D), 1)
            Q = _tile(queries + row * C * D, r, d, D)
            alike = gap * tl.dot(Q, tl.trans(K), input_precision=PREC)
            dW += tl.dot(tl.trans(alike), dY, input_precision=PREC)
            cross = gap * tl.dot(dY, tl.trans(W), input_precision=PREC)
            dK += tl.dot(tl.trans(cross), Q, input_precision=PREC)
            dQ = tl.dot(cross, K, input_precision=PREC)
            dY *= tl.exp(past)[:, None]
            dQ += tl.dot(dY, S, input_precision=PREC)
            dS += tl.dot(tl.trans(dY), Q, input_precision=PREC)
            _put(dqs + (b * (D // BO) + tl.program_id(1)) * C * D, r, d, dQ, D)
    if ERASE:
        J = _tile(inverse + row * C * C, r, r, C)
        dW = tl.dot(tl.trans(J), dW, input_precision=PREC)
    z = tl.sum(dW * W, 1)
    dU = dW * eta[:, None]
    if ERASE:
        share = 1.0
        if erase is not None:
            share = tl.load(erase + b).to(tl.float32)
        pair = share * gap * tl.dot(dU, tl.trans(W), input_precision=PREC)
        dK -= tl.dot(pair + tl.trans(pair), K, input_precision=PREC)
        dseen = dU * (share * tl.exp(past))[:, None]
        dK -= tl.dot(dseen, S, input_precision=PREC)
        dS -= tl.dot(tl.trans(dseen), K, input_precision=PREC)
    if SHORT:
        error = _tile(u + spot * D, r, o, D)
    elif OWN:
        error = _tile(own + spot * D, r, o, D)
    else:
        error = _tile(values + row * C * D, r, o, D)
    tl.store(sums + part * 3 * C + r, z)
    tl.store(sums + part * 3 * C + C + r, tl.sum(dU * error, 1))
    tl.store(sums + part * 3 * C + 2 * C + r, moving)
    _put(dus + (b * N + n) * C * D, r, o, dU, D)
    _put(dks + part * C * D, r, d, dK, D)
    _put(dstack, o, d, dS, D)


@triton.jit
def _through(du, u, dots, short, CLIP, SHORT: tl.constexpr):
    """The gradient of an error from that of the shortened one, given `dU . U` of all columns."""
    if SHORT:
        cut = tl.where(short < 1.0, dots / (CLIP * CLIP), 0.0)
        du = (du - u * cut[:, None]) * short[:, None]
    return du


@triton.jit(do_not_specialize=["first", "segment"])
def _errors_back(
    cuts, home, stacks, keys, values, queries, own, u, scales,
    dy, dus, sums, dks, dvs, dqs, dbegun, dhome, segment, first, T, B, CLIP,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BO: tl.constexpr,
    OWN: tl.constexpr, L2: tl.constexpr, SHORT: tl.constexpr,
    READ_START: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Back through errors and self-made values, to v and to the weights where the chunk starts."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) // (D // BO)
    o = tl.program_id(1) % (D // BO) * BO + tl.arange(0, BO)
    row = (segment - first) * B + b
    part = b * N * (D // BO) + tl.program_id(1)
    spot = (row * N + n) * C
    cuts += segment * 4
    r, d = tl.arange(0, C), tl.arange(0, D)
    here = (b * N + n) * D * D
    begun = tl.load(cuts + 2 + (n > 0)).to(tl.int64)
    begun = stacks + begun * B * N * D * D + here
    dbegun += here
    scale, short = tl.load(scales + spot * 2 + r), tl.load(scales + spot * 2 + C + r)
    dots = tl.zeros([C], tl.float32)  # dU . U over all columns
    for block in range(0, D // BO):
        dots += tl.load(sums + (b * N * (D // BO) + n * (D // BO) + block) * 3 * C + C + r)
    mine = dus + (b * N + n) * C * D
    dU = _tile(mine, r, o, D)
    error = dU
    if SHORT:
        error = _tile(u + spot * D, r, o, D)
    derror = _through(dU, error, dots, short, CLIP, SHORT)
    dB = _tile(dbegun, o, d, D)
    K = _tile(keys + row * C * D, r, d, D)
    if L2:
        dK = _tile(dks + part * C * D, r, d, D)
        dK -= tl.dot(derror, _tile(begun, o, d, D), input_precision=PREC)
        _put(dks + part * C * D, r, d, dK, D)
        dB -= tl.dot(tl.trans(derror), K, input_precision=PREC)
    if READ_START:
        if n == 0:
            t = tl.load(cuts) + r
            dY = load_rows(dy + b * T * D, t, t < tl.load(cuts + 1), o, D)
            Q = _tile(queries + row * C * D, r, d, D)
            dQ = tl.dot(dY, _tile(begun, o, d, D), input_precision=PREC)
            _put(dqs + (b * (D // BO) + tl.program_id(1)) * C * D, r, d, dQ, D)
            dB += tl.dot(tl.trans(dY), Q, input_precision=PREC)
    if OWN:
        vhat = _tile(own + spot * D, r, o, D)
        if SHORT:  # dots of the error's gradient with vhat, over all columns
            every = tl.zeros([C], tl.float32)
            for block in range(0, D, BO):
                columns = block + tl.arange(0, BO)
                some = _tile(u + spot * D, r, columns, D)
                some = _through(_tile(mine, r, columns, D), some, dots, short, CLIP, SHORT)
                every += tl.sum(some * _tile(own + spot * D, r, columns, D), 1)
            dots = every
        down = (derror - vhat * dots[:, None]) * scale[:, None]
        memory = _tile(begun, o, d, D)
        if home is not None:
            memory += _tile(home + here, o, d, D)
        _put(dvs + part * C * D, r, d, tl.dot(down, memory, input_precision=PREC), D)
        V = _tile(values + row * C * D, r, d, D)
        more = tl.dot(tl.trans(down), V, input_precision=PREC)
        dB += more
        if home is not None:
            _put(dhome + here, o, d, _tile(dhome + here, o, d, D) + more, D)
    else:
        _put(dvs + (b * N + n) * C * D, r, o, derror, D)
    _put(dbegun, o, d, dB, D)


@triton.jit
def _total(parts, r, columns, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr):
    """The sum of P shares [C, D], some columns."""
    total = _tile(parts, r, columns, D)
    for p in range(1, P):
        total += _tile(parts + p * C * D, r, columns, D)
    return total


@triton.jit
def _unit_back(
    parts, made, scale, r, o, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BO: tl.constexpr
):
    """Columns o of the gradient before normalisation, from P shares of that behind it."""
    along = tl.zeros([C], tl.float32)
    for block in range(0, D, BO):
        columns = block + tl.arange(0, BO)
        along += tl.sum(_total(parts, r, columns, D, C, P) * _tile(made, r, columns, D), 1)
    total = _total(parts, r, o, D, C, P)
    return (total - _tile(made, r, o, D) * along[:, None]) * scale[:, None]


@triton.jit(do_not_specialize=["first", "segment"])
def _look_back(
    cuts, x, readout, valid, keys, values, queries, numbers,
    dks, dvs, dqs, sums, logs, dstack, dbegun, dhome, dk, dv, dq, draw,
    segment, first, T, B, SPAN, LEAST,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BO: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, Q_AT: tl.constexpr,
    ETA_AT: tl.constexpr, ALPHA_AT: tl.constexpr, TIED: tl.constexpr, SHUT: tl.constexpr,
    OWN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Back through projections and gates to the memories that made them; where a memory's chunk
    starts with this segment, the gradient of its start joins that of the stack."""
    P: tl.constexpr = N * (D // BO)
    PV: tl.constexpr = P if OWN else N
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) // (D // BO)
    o = tl.program_id(1) % (D // BO) * BO + tl.arange(0, BO)
    row = (segment - first) * B + b
    cuts += segment * 4
    r, d = tl.arange(0, C), tl.arange(0, D)
    t = tl.load(cuts) + r
    ok = t < tl.load(cuts + 1)
    numbers += row * 8 * C
    keys, values, queries = keys + row * C * D, values + row * C * D, queries + row * C * D
    dks, dvs, dqs = dks + b * P * C * D, dvs + b * PV * C * D, dqs + b * (D // BO) * C * D
    sums, logs = sums + b * P * 3 * C, logs + b * P
    place = b * T * D + t[:, None] * D + o[None, :]
    made = tl.zeros([C, BO], tl.float32)  # the gradient of what this memory said, columns o
    if n == K_AT:
        made = _unit_back(dks, keys, tl.load(numbers + 5 * C + r), r, o, D, C, P, BO)
        tl.store(dk + place, made, mask=ok[:, None])
    if n == V_AT:
        made = _unit_back(dvs, values, tl.load(numbers + 6 * C + r), r, o, D, C, PV, BO)
        tl.store(dv + place, made, mask=ok[:, None])
    if n == Q_AT:
        made = _unit_back(dqs, queries, tl.load(numbers + 7 * C + r), r, o, D, C, D // BO, BO)
        tl.store(dq + place, made, mask=ok[:, None])
    if n == 0:  # projections that are no memories
        if K_AT < 0:
            tl.store(dk + place, _total(dks, r, o, D, C, P), mask=ok[:, None])
        if V_AT < 0:
            tl.store(dv + place, _total(dvs, r, o, D, C, PV), mask=ok[:, None])
        if Q_AT < 0:
            tl.store(dq + place, _total(dqs, r, o, D, C, D // BO), mask=ok[:, None])
    z = tl.zeros([C], tl.float32)
    moving = tl.zeros([C], tl.float32)
    log = 0.0
    for p in range(0, P):
        z += tl.load(sums + p * 3 * C + r)
        moving += tl.load(sums + p * 3 * C + 2 * C + r) - tl.load(sums + p * 3 * C + C + r)
        log += tl.load(logs + p)
    sig_eta, sig_alpha = tl.load(numbers + 3 * C + r), tl.load(numbers + 4 * C + r)
    behind = log + tl.cumsum(moving, 0, reverse=True) - moving  # d log alpha
    retain = LEAST + SPAN * sig_alpha
    slope = 1.0 - sig_eta  # of the rate's logarithm
    if SHUT > 0.0:
        opened = sig_eta > 0.0
        slope *= tl.where(opened, 1.0 - SHUT + SHUT / tl.where(opened, sig_eta, 1.0), 0.0)
    z *= slope
    if TIED:
        lost = sig_eta * (1.0 - retain)
        retain = 1.0 - lost
        z -= behind * lost * slope / retain
        behind *= sig_eta
    behind *= SPAN * sig_alpha * (1.0 - sig_alpha) / retain
    real = ok
    if valid is not None:
        real = ok & (tl.load(valid + b * T + t, mask=ok, other=0) != 0)
    draw_eta = tl.where(real, z, 0.0)
    draw_alpha = tl.where(real, behind, 0.0)
    if tl.program_id(1) == 0:
        tl.store(draw + b * T * 2 + t * 2, draw_eta, mask=ok)
        tl.store(draw + b * T * 2 + t * 2 + 1, draw_alpha, mask=ok)
    readout += b * 2 * D
    if n == ETA_AT:
        made = draw_eta[:, None] * tl.load(readout + o).to(tl.float32)[None, :]
    if n == ALPHA_AT:
        made = draw_alpha[:, None] * tl.load(readout + D + o).to(tl.float32)[None, :]
    X = load_rows(x + b * T * D, t, ok, d, D)
    more = tl.dot(tl.trans(made), X, input_precision=PREC)
    here = (b * N + n) * D * D
    dB = _tile(dbegun + here, o, d, D) + more
    if dhome is not None:
        _put(dhome + here, o, d, _tile(dhome + here, o, d, D) + more, D)
    begins = tl.load(cuts + 2 + (n > 0)) == segment + 1
    dS = _tile(dstack + here, o, d, D)
    _put(dstack + here, o, d, tl.where(begins, dS + dB, dS), D)
    _put(dbegun + here, o, d, tl.where(begins, 0.0, dB), D)


@triton.jit
def _gather_one(
    dX, grad, t, ok, stack, home, at, D: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr
):
    """dX plus what went through one memory."""
    d = tl.arange(0, D)
    for block in range(0, D, BK):
        o = block + tl.arange(0, BK)
        G = load_rows(grad, t, ok, o, D)
        dX += tl.dot(G, _start(stack, home, at, o, d, D), input_precision=PREC)
    return dX


@triton.jit
def _gather_gate(
    dX, X, draw, readout, dreadout, t, ok, stack, home, AT: tl.constexpr,
    D: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dX plus what went through one gate; the gradient of its read-out is stored."""
    d = tl.arange(0, D)
    raw = tl.load(draw + t * 2, mask=ok, other=0.0)
    look = tl.sum(raw[:, None] * X, 0)  # [D]
    if AT >= 0:
        sight = _sight(readout, stack, home, AT * D * D, D, BK)
        for block in range(0, D, BK):
            o = block + tl.arange(0, BK)
            memory = _start(stack, home, AT * D * D, o, d, D)
            tl.store(dreadout + o, tl.sum(memory * look[None, :], 1))
    else:
        sight = tl.load(readout + d).to(tl.float32)
        tl.store(dreadout + d, look)
    return dX + raw[:, None] * sight[None, :]


@triton.jit(do_not_specialize=["first"])
def _gather(
    cuts, x, readout, home, stacks, dk, dv, dq, draw, dx, dreadouts, first, T, B,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, Q_AT: tl.constexpr,
    ETA_AT: tl.constexpr, ALPHA_AT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The gradients of x, and of the read-outs by segment."""
    b = tl.program_id(1).to(tl.int64)
    segment = first + tl.program_id(0)
    cuts += segment * 4
    r, d = tl.arange(0, C), tl.arange(0, D)
    t = tl.load(cuts) + r
    ok = t < tl.load(cuts + 1)
    others = tl.load(cuts + 3).to(tl.int64)
    stack = stacks + (others * B + b) * N * D * D
    draw, readout = draw + b * T * 2, readout + b * 2 * D
    dreadouts += (segment * B + b) * 2 * D
    if home is not None:
        home += b * N * D * D
    X = load_rows(x + b * T * D, t, ok, d, D)
    dX = tl.zeros([C, D], tl.float32)
    dX = _gather_gate(dX, X, draw, readout, dreadouts, t, ok, stack, home, ETA_AT, D, BK)
    dX = _gather_gate(
        dX, X, draw + 1, readout + D, dreadouts + D, t, ok, stack, home, ALPHA_AT, D, BK
    )
    if K_AT >= 0:
        at = K_AT * D * D
        dX = _gather_one(dX, dk + b * T * D, t, ok, stack, home, at, D, BK, PREC)
    if V_AT >= 0:
        at = V_AT * D * D
        dX = _gather_one(dX, dv + b * T * D, t, ok, stack, home, at, D, BK, PREC)
    if Q_AT >= 0:
        at = Q_AT * D * D
        dX = _gather_one(dX, dq + b * T * D, t, ok, stack, home, at, D, BK, PREC)
    tl.store(dx + b * T * D + t[:, None] * D + d[None, :], dX, mask=ok[:, None])


GIVEN = Inputs._fields[:8]
"""The inputs that are tensors of every token or item."""


class Cuts(NamedTuple):
    """How a call is cut: rows of first token, end, slot of the main memory's start and of the
    others'; and for every number of tokens the two slots where the then last chunks start."""

    segments: tuple[tuple[int, int, int, int], ...]
    ends: tuple[tuple[int, int], ...]  # [T + 1]


@functools.lru_cache(maxsize=64)
def _cuts_of(chunk: int, others: int, offset: int, total: int, tile: int) -> Cuts:
    """The cut of `total` tokens, the first of which stands at `offset` (modulo both chunks)."""
    places: dict[int, int] = {}  # where a segment starts -> the slot of the stack there
    cuts: list[tuple[int, int]] = []
    done = 0
    while done < total:
        left = min(chunk - (offset + done) % chunk, others - (offset + done) % others)
        step = min(left, tile, total - done)
        places[offset + done] = len(cuts) + 1
        cuts.append((done, done + step))
        done += step
    places[offset + total] = len(cuts) + 1

    def slot(where: int, size: int) -> int:
        return places[where - where % size] if where - where % size >= offset else 0

    segments = tuple((a, b, slot(offset + a, chunk), slot(offset + a, others)) for a, b in cuts)
    ends = []
    for seen in range(total + 1):
        where = offset + seen
        ends.append((slot(where, chunk), slot(where, others)))
    return Cuts(segments, tuple(ends))


@functools.lru_cache(maxsize=64)
def _on_device(cuts: Cuts, device: torch.device) -> Tensor:
    """The segments of a cuts where kernels read them; kept, so that it is copied once."""
    return torch.tensor(cuts.segments, dtype=torch.int32).to(device)


def _cut(rule: SelfRule, position: int, total: int, tile: int) -> Cuts:
    large = max(rule.chunk, rule.chunk_others)  # (the smaller one divides it)
    return _cuts_of(rule.chunk, rule.chunk_others, position % large, total, tile)


class _Setting(NamedTuple):
    """The settings each kernel is compiled with, from a rule and its inputs."""

    look: dict[str, Any]
    learn: dict[str, Any]
    learn_back: dict[str, Any]
    errors_back: dict[str, Any]
    look_back: dict[str, Any]
    gather: dict[str, Any]
    block: int  # BO


def _setting(rule: SelfRule, d: int, tile: int) -> _Setting:
    how = precision()
    prec = {"PREC": how["PREC"], "num_warps": 8 if d > 64 else 4}
    block, inner = 16 if d > 64 else min(d, 32), min(d, 32)
    sizes = {"D": d, "N": len(rule.names), "C": tile}
    slots = {}
    for name in ("k", "v", "q", "eta", "alpha"):
        slot = rule.slot(name)
        slots[f"{name.upper()}_AT"] = -1 if slot is None else slot
    short = rule.squared or rule.clip < 1
    erase, own = {"ERASE": rule.erase}, {"OWN": rule.own_values}
    l2, cut = {"L2": rule.squared}, {"SHORT": short}
    start = {"READ_START": rule.read_start}
    tied = {"TIED": rule.tied, "SHUT": float(rule.shut)}
    wide, deep = sizes | {"BO": block} | prec, sizes | {"BK": inner} | prec
    return _Setting(
        look=deep | slots | erase | tied | {"SOLVE": how["SOLVE"]},
        learn=wide | erase | own | l2 | cut | start | {"BK": inner},
        learn_back=wide | erase | own | cut | start,
        errors_back=wide | own | l2 | cut | start,
        look_back=wide | slots | own | tied,
        gather=deep | slots,
        block=block,
    )


class _Results(NamedTuple):
    """Results of some segments, [G, b, ...]; `written`, `own`, `u` and `scales` [G, b, N, ...]
    only for the backward pass."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    inverse: Tensor
    numbers: Tensor
    written: Tensor
    own: Tensor
    u: Tensor
    scales: Tensor

    @staticmethod
    def empty(rule: SelfRule, like: Tensor, many: int, tile: int, *, full: bool) -> _Results:
        b, n, d, _ = like.shape
        rows = (many, b, tile, d)
        every = (many, b, n, tile, d) if full else (0,)
        short = full and (rule.squared or rule.clip < 1)
        return _Results(
            like.new_empty(rows),
            like.new_empty(rows),
            like.new_empty(rows),
            like.new_empty(many, b, tile, tile) if rule.erase else like.new_empty(0),
            like.new_empty(many, b, 8, tile),
            like.new_empty(every),
            like.new_empty(every) if rule.own_values else like.new_empty(0),
            like.new_empty(every) if short else like.new_empty(0),
            like.new_empty(many, b, n, 2, tile) if full else like.new_empty(0),
        )


class _Arguments(NamedTuple):
    """One call's inputs as the kernels take them."""

    rule: SelfRule
    inputs: Inputs  # row-major
    home: Tensor | None
    valid: Tensor | None
    cuts: Tensor  # [S, 4]
    stacks: Tensor  # [slots, b, N, D, D]
    setting: _Setting

    def look(self, results: _Results, first: int, many: int) -> None:
        rule, inputs, stacks = self.rule, self.inputs, self.stacks
        b, total, _ = inputs.x.shape
        _look[(many, b)](
            self.cuts, inputs.x, inputs.readout, inputs.bias, inputs.k, inputs.v, inputs.q,
            inputs.gates, inputs.erase, self.valid, self.home, stacks, *results[:5], first,
            total, b, rule.rate_max, rule.retain_max - RETAIN_MIN, RETAIN_MIN, **self.setting.look,
        )  # fmt: skip

    def learn(self, results: _Results, y: Tensor, first: int, many: int, *, full: bool) -> None:
        b, total, d = self.inputs.x.shape
        n = self.stacks.shape[2]
        _learn[(many, b, n * d // self.setting.block)](
            self.cuts, self.inputs.erase, self.home, self.stacks, *results[:5], y, *results[5:],
            first, total, b, float(self.rule.clip), FULL=full, **self.setting.learn,
        )  # fmt: skip


def _arguments(
    rule: SelfRule, cuts: Cuts, tile: int, stacks: Tensor, home: Tensor | None, inputs: Inputs
) -> _Arguments:
    rows = [flat(getattr(inputs, name)) for name in GIVEN]
    inputs = Inputs(*rows)._replace(valid=flat(inputs.valid))  # type: ignore[arg-type]
    where = _on_device(cuts, inputs.x.device)
    setting = _setting(rule, stacks.shape[-1], tile)
    return _Arguments(rule, inputs, flat(home), inputs.valid, where, stacks, setting)


def _pick(stacks: Tensor, cuts: Cuts, valid: Tensor | None) -> Tensor:
    """The weights where the last chunks start, [b, N, D, D]."""
    if valid is None:
        mem, others = cuts.ends[-1]
        return torch.cat([stacks[mem, :, :1], stacks[others, :, 1:]], 1)
    slots, items = _end_slots(cuts, valid), torch.arange(stacks.shape[1], device=stacks.device)
    return torch.cat([stacks[slots[:, 0], items, :1], stacks[slots[:, 1], items, 1:]], 1)


def _end_slots(cuts: Cuts, valid: Tensor) -> Tensor:
    """The slots where the last chunks of each item start, [b, 2]."""
    return torch.tensor(cuts.ends, dtype=torch.int64).to(valid.device)[valid.sum(1)]


def _forward(
    rule: SelfRule, position: int, tile: int, first: Tensor, start: Tensor, home: Tensor | None,
    inputs: Inputs,
) -> tuple[Tensor, Tensor, Cuts]:  # fmt: skip
    """Reads, all stacks, and how the call was cut."""
    cuts = _cut(rule, position, inputs.x.shape[1], tile)
    stacks = first.new_empty(len(cuts.segments) + 2, *first.shape, dtype=torch.float32)
    stacks[0], stacks[1] = start, first
    call = _arguments(rule, cuts, tile, stacks, home, inputs)
    y = torch.empty_like(call.inputs.x, dtype=torch.float32)
    results = _Results.empty(rule, first, 1, tile, full=False)
    for i in range(len(cuts.segments)):
        call.look(results, i, 1)
        call.learn(results, y, i, 1, full=False)
    return y, stacks, cuts


WINDOW = 2048
"""Tokens whose weights stand side by side where no gradient is asked for."""

TOGETHER = 1 << 26
"""Numbers a backward pass computes again at a time."""


def slots(rule: SelfRule, position: int, total: int, tile: int) -> int:
    """How many stacks of weights a scan of so many tokens keeps for its backward pass."""
    return len(_cut(rule, position, total, tile).segments) + 2


def run_forward(
    rule: SelfRule,
    position: int,
    tile: int,
    inputs: Inputs,
    first: Tensor,
    start: Tensor,
    home: Tensor | None,
    keep: bool,
) -> list[Tensor]:
    """Reads, weights, starts, and the weights before every segment if they are to be kept."""
    x = inputs.x
    if keep or x.shape[1] <= WINDOW or inputs.valid is not None:
        y, stacks, cuts = _forward(rule, position, tile, first, start, home, inputs)
        last = _pick(stacks, cuts, inputs.valid)
        return [y, stacks[-1].clone(), last, *([stacks] if keep else [])]
    reads = []
    for done in range(0, x.shape[1], WINDOW):
        part = inputs.at(slice(done, done + WINDOW))
        y, stacks, cuts = _forward(rule, position + done, tile, first, start, home, part)
        first, start = stacks[-1], _pick(stacks, cuts, None)
        reads.append(y)
    return [torch.cat(reads, 1), first.clone(), start]


def run_backward(
    rule: SelfRule,
    position: int,
    tile: int,
    inputs: Inputs,
    home: Tensor | None,
    y: Tensor,
    stacks: Tensor,
    dy: Tensor,
    dfirst: Tensor | None,
    dlast: Tensor | None,
) -> list[Tensor | None]:
    """Gradients of the weights, of the start, of home, and of the inputs up to `gates`."""
    x, readout, bias, k, v, q, gates, *_ = inputs
    b, total, d = x.shape
    cuts, valid = _cut(rule, position, total, tile), inputs.valid
    call = _arguments(rule, cuts, tile, stacks, home, inputs)
    dstack = torch.zeros_like(stacks[0]) if dfirst is None else dfirst.float().clone()
    dbegun = torch.zeros_like(stacks[0])
    slots = None
    if dlast is not None and valid is not None:
        slots = _end_slots(cuts, valid)
        dstack += _of_items(dlast, slots, len(cuts.segments) + 1)
    elif dlast is not None:
        for some, slot in ((slice(0, 1), cuts.ends[-1][0]), (slice(1, None), cuts.ends[-1][1])):
            into = dstack if slot == len(cuts.segments) + 1 else dbegun
            into[:, some] += dlast[:, some]
    back = _Gradients.empty(call, dstack, dbegun, dy)
    many = max(1, min(len(cuts.segments), TOGETHER // (b * tile * d * (3 * len(rule.names) + 4))))
    again = _Results.empty(rule, stacks[0], many, tile, full=True)
    for end in range(len(cuts.segments), 0, -many):
        first = max(0, end - many)
        call.look(again, first, end - first)
        call.learn(again, y, first, end - first, full=True)
        for i in range(end - 1, first - 1, -1):
            if slots is not None and dlast is not None and i + 1 in cuts.segments[i][2:]:
                dbegun += _of_items(dlast, slots, i + 1)
            back.step(call, again, y, i, first)
        back.gather(call, first, end - first)
    if slots is not None and dlast is not None:
        dbegun += _of_items(dlast, slots, 0)
    dreadout, dbias = back.dreadouts.sum(0).to(readout.dtype), back.draw.sum(1).to(bias.dtype)
    grads: list[Tensor | None] = [dstack, dbegun, back.dhome, back.dx.to(x.dtype), dreadout, dbias]
    for part, grad in ((k, back.dk), (v, back.dv), (q, back.dq), (gates, back.draw)):
        grads.append(None if part is None else grad.to(part.dtype))
    return grads


def _of_items(grad: Tensor, slots: Tensor, slot: int) -> Tensor:
    """The gradient of starts [b, N, D, D] where they are those in this slot."""
    many = grad.shape[1]
    mine = torch.cat([slots[:, :1], slots[:, 1:].expand(-1, many - 1)], 1) == slot
    return torch.where(mine[:, :, None, None], grad, 0.0)


class _Gradients(NamedTuple):
    """Where the backward pass writes: gradients, and the shares that memories pass on."""

    dstack: Tensor  # [b, N, D, D]
    dbegun: Tensor  # [b, N, D, D]
    dhome: Tensor | None  # [b, N, D, D]
    dy: Tensor  # [b, T, D]
    dx: Tensor
    dk: Tensor
    dv: Tensor
    dq: Tensor
    draw: Tensor  # [b, T, 2]
    dreadouts: Tensor  # [S, b, 2, D]
    dks: Tensor  # [b, N D/BO, C, D]
    dvs: Tensor
    dqs: Tensor  # [b, D/BO, C, D]
    dus: Tensor  # [b, N, C, D]
    sums: Tensor  # [b, N D/BO, 3, C]
    logs: Tensor  # [b, N D/BO]

    @staticmethod
    def empty(call: _Arguments, dstack: Tensor, dbegun: Tensor, dy: Tensor) -> _Gradients:
        b, n, d, _ = dstack.shape
        new, tile, blocks = dstack.new_empty, call.setting.learn["C"], d // call.setting.block
        tokens, parts = (b, dy.shape[1], d), n * blocks
        return _Gradients(
            dstack,
            dbegun,
            None if call.home is None else torch.zeros_like(dstack),
            dy.contiguous(),
            new(tokens),
            new(tokens),
            new(tokens),
            new(tokens),
            new(b, dy.shape[1], 2),
            new(call.cuts.shape[0], b, 2, d),
            new(b, parts, tile, d),
            new(b, parts, tile, d),
            new(b, blocks, tile, d),
            new(b, n, tile, d),
            new(b, parts, 3, tile),
            new(b, parts),
        )

    def step(
        self, call: _Arguments, results: _Results, y: Tensor, segment: int, first: int
    ) -> None:
        """One segment back; the results begin with segment `first`."""
        b, total, _ = call.inputs.x.shape
        setting, inputs, rule = call.setting, call.inputs, call.rule
        grid = (b, self.sums.shape[1])
        where = (segment, first, total, b)
        _learn_back[grid](
            call.cuts, inputs.erase, call.stacks, *results[:5], y, *results[5:8],
            self.dy, self.dstack, self.dks, self.dqs, self.dus, self.sums, self.logs, *where,
            **setting.learn_back,
        )  # fmt: skip
        _errors_back[grid](
            call.cuts, call.home, call.stacks, *results[:3], *results[6:],
            self.dy, self.dus, self.sums, self.dks, self.dvs, self.dqs, self.dbegun, self.dhome,
            *where, float(rule.clip), **setting.errors_back,
        )  # fmt: skip
        _look_back[grid](
            call.cuts, inputs.x, inputs.readout, call.valid, *results[:3], results.numbers,
            self.dks, self.dvs, self.dqs, self.sums, self.logs, self.dstack, self.dbegun,
            self.dhome, self.dk, self.dv, self.dq, self.draw, *where,
            rule.retain_max - RETAIN_MIN, RETAIN_MIN, **setting.look_back,
        )  # fmt: skip

    def gather(self, call: _Arguments, first: int, many: int) -> None:
        """The gradients of x and of the read-outs for some segments."""
        inputs, (b, total, _) = call.inputs, call.inputs.x.shape
        _gather[(many, b)](
            call.cuts, inputs.x, inputs.readout, call.home, call.stacks,
            self.dk, self.dv, self.dq, self.draw, self.dx, self.dreadouts, first, total, b,
            **call.setting.gather,
        )  # fmt: skip


def refusal(inputs: Inputs, weights: Weights, position: int | Tensor) -> str | None:
    """Why these kernels do not take a scan, or None."""
    if weights.second is not None or weights.moved is not None:
        return "it has matrix memories without momentum only"
    if isinstance(position, Tensor):
        return "all sequences must stand at the same position"
    if inputs.x.shape[-1] > LARGEST:
        return f"heads may be at most {LARGEST} wide; these are {inputs.x.shape[-1]}"
    for name in GIVEN:
        part: Tensor | None = getattr(inputs, name)
        if part is not None and part.dtype not in DTYPES:
            return f"it computes in float32, and an input is {part.dtype}"
    return where_it_runs(inputs.x)


def scan_triton(
    rule: SelfRule, inputs: Inputs, weights: Weights, start: Weights, position: int | Tensor
) -> tuple[Tensor, Weights, Weights]:
    """`scan_self_modifying` by Triton kernels, once differentiable (Eq. 83-88 in the form of 90).

    The backward pass keeps the weights before every segment and computes the rest again. Reads have
    the dtype of x, weights are float32. Heads whose width is no power of two are padded with zeros.
    """
    why = refusal(inputs, weights, position)
    if why is not None:
        raise ValueError(f"backend 'triton' cannot run this scan: {why}; use backend='chunk'")
    dtype, d = inputs.x.dtype, inputs.x.shape[-1]
    if isinstance(position, Tensor) or inputs.x.shape[1] == 0:  # (the first is refused above)
        return inputs.x, weights, start
    first, begun = weights.first, start.first
    if miss := tile_rows(d) - d:
        rows: dict[str, Any] = {name: getattr(inputs, name) for name in ("x", "readout", *"kvq")}
        rows = {n: None if part is None else pad(part, [0, miss]) for n, part in rows.items()}
        if inputs.initial is not None:
            rows["initial"] = Weights(pad(inputs.initial.first, [0, miss] * 2))
        inputs = inputs._replace(**rows)
        first, begun = (pad(part, [0, miss] * 2) for part in (first, begun))
    tile = min(longest(), tile_rows(min(rule.segment, inputs.x.shape[1])))
    y, after, last = scan_operator(rule, inputs, first, begun, position, False, tile)
    after, last = after[..., :d, :d], last[..., :d, :d]
    return y[..., :d].to(dtype), Weights(after), Weights(last)
