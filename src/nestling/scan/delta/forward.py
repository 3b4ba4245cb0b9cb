"""The chunked scan, forward: plain rule, all chunks of a segment at once but for the recurrence.

`chunk.py` derives every line and has the names. M = sequences, C = tokens of a chunk,
Q = chunks * M, Di and Do = inputs and outputs of the memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.scan.blocks import decay, unit_inverse
from nestling.scan.segments import Workspace, segments

__all__ = ["Options", "Parts", "Saved", "forward", "prepare", "rows_read", "solve"]


class Options(NamedTuple):
    """What the kernel is asked to do."""

    erase: bool  # dgd; False is gd
    after: bool  # reads see their own token's write
    chunk: int
    recompute: bool  # keep only the chunks' start states for the backward pass


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass, in the compute dtype."""

    starts: Tensor  # [chunks + 1, M, Do, Di] memory at the start of every chunk, and at the end
    errors: Tensor  # [T * M * Do] surprises, chunk after chunk; empty when recomputed or gd
    inverse: Tensor  # [T * M * C] inverses (I + L)^{-1}, likewise


class Parts(NamedTuple):
    """Everything of a segment that does not depend on the memory."""

    g: Tensor  # [Q, C + 1] running products of retain
    G: Tensor  # [Q, C + 1, C] their ratios
    x: Tensor  # [Q, C, Di]
    scaled: Tensor  # [Q, C, Di] rate_s x_s
    last: Tensor  # [Q, C, Di] scaled, decayed to the end of the chunk
    seen: Tensor  # [Q, C, Di] g_{t-1} x_t; empty for gd
    gram: Tensor  # [Q, C, C] x_t . scaled_s; empty for gd


def prepare(x: Tensor, rate: Tensor, retain: Tensor, erase: bool, work: Workspace) -> Parts:
    """The parts of a segment, from x `[Q, C, Di]` and gates `[Q, C]`."""
    g, G = decay(retain, work)
    batch, size, _ = x.shape
    scaled = torch.mul(x, rate.unsqueeze(-1), out=work("scaled", *x.shape))
    last = torch.mul(scaled, G[:, -1].unsqueeze(-1), out=work("last", *x.shape))
    if not erase:
        return Parts(g, G, x, scaled, last, x[:, :0], x[:, :0])
    seen = torch.mul(x, g[:, :-1].unsqueeze(-1), out=work("seen", *x.shape))
    gram = torch.bmm(x, scaled.mT, out=work("gram", batch, size, size))
    return Parts(g, G, x, scaled, last, seen, gram)


def solve(parts: Parts, out: Tensor, work: Workspace) -> Tensor:
    """`(I + L)^{-1}` of every chunk, `L_ts = rate_s (g_{t-1} / g_s) x_t . x_s`, into `out`."""
    lower = torch.mul(parts.gram, parts.G[:, :-1], out=work("lower", *parts.gram.shape))
    return unit_inverse(lower, out, work)


def rows_read(parts: Parts, after: bool) -> tuple[Tensor, Tensor]:
    """What reads weigh writes and the start state by: rows of G `[Q, C, C]` and g `[Q, C, 1]`."""
    rows = slice(1, None) if after else slice(None, -1)
    return parts.G[:, rows], parts.g[:, rows].unsqueeze(-1)


def forward(
    state: Tensor,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None,
    options: Options,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Saved]:
    """Reads `[M, T, Do]` in the queries' dtype, and what backward needs; the end state is last."""
    (sequences, tokens, inner), out = x.shape, u.shape[-1]
    erase, chunk = options.erase, options.chunk
    work = Workspace(x, dtype)
    starts = x.new_empty((-(-tokens // chunk) + 1, *state.shape), dtype=dtype)
    starts[0] = state
    keep = sequences * tokens if erase and not options.recompute else 0
    errors = x.new_empty(keep * out, dtype=dtype)
    inverse = x.new_zeros(keep * chunk, dtype=dtype)
    reads = None if queries is None else queries.new_empty(sequences, tokens, out)
    for seg in segments(tokens, sequences, max(inner, out, chunk), chunk):
        gates = (seg.cut(rate, "rate", work), seg.cut(retain, "retain", work))
        parts = prepare(seg.cut(x, "x", work), *gates, erase, work)
        memory = starts[seg.first : seg.first + seg.chunks + 1]
        w = seg.cut(u, "u", work)
        if erase:
            shape, square = (*parts.x.shape[:2], out), (parts.x.shape[0], seg.size, seg.size)
            if keep:
                solved = solve(parts, seg.stored(inverse, sequences, chunk, seg.size), work)
                w = _recur(parts, solved, w, memory, seg.stored(errors, sequences, out, out), work)
            else:
                solved = solve(parts, work.zeros("solved", *square), work)
                w = _recur(parts, solved, w, memory, work("errors", *shape), work)
        else:
            _accumulate(parts, w, memory)
        if queries is not None and reads is not None:
            q = seg.cut(queries, "q", work)
            seg.paste(_read(parts, q, w, memory[:-1].flatten(0, 1), options.after, work), reads)
    return reads, Saved(starts, errors, inverse)


def _accumulate(parts: Parts, u: Tensor, memory: Tensor) -> None:
    """gd: the errors are the targets; fills `memory[1:]` from `memory[0]`."""
    count, sequences = memory.shape[0] - 1, memory.shape[1]
    torch.bmm(u.mT, parts.last, out=memory[1:].view(-1, *memory.shape[2:]))
    ends = parts.g[:, -1, None, None].unflatten(0, (count, sequences)).unbind(0)
    steps = memory.unbind(0)
    for i in range(count):
        steps[i + 1].addcmul_(steps[i], ends[i])


def _recur(
    parts: Parts, solved: Tensor, u: Tensor, memory: Tensor, errors: Tensor, work: Workspace
) -> Tensor:
    """dgd: walk over the chunks; fills `errors` `[Q, C, Do]` and `memory[1:]` from `memory[0]`."""
    pieces = (memory.shape[0] - 1, memory.shape[1])
    ends = parts.g[:, -1, None, None].unflatten(0, pieces).unbind(0)
    last, seen, inverse, given, w = (
        tensor.unflatten(0, pieces).unbind(0)
        for tensor in (parts.last, parts.seen, solved, u, errors)
    )
    steps = memory.unbind(0)
    surprise = work("surprise", *w[0].shape)
    for i in range(pieces[0]):
        torch.baddbmm(given[i], seen[i], steps[i].mT, alpha=-1, out=surprise)
        torch.bmm(inverse[i], surprise, out=w[i])
        torch.mul(steps[i], ends[i], out=steps[i + 1])
        steps[i + 1].baddbmm_(w[i].mT, last[i])
    return errors


def _read(
    parts: Parts, q: Tensor, w: Tensor, starts: Tensor, after: bool, work: Workspace
) -> Tensor:
    ratios, g = rows_read(parts, after)
    scores = torch.bmm(q, parts.scaled.mT, out=work("scores", *ratios.shape)).mul_(ratios)
    reads = torch.bmm(scores, w, out=work("reads", *w.shape))
    asked = torch.mul(q, g, out=work("asked", *q.shape))
    return reads.baddbmm_(asked, starts.mT)
