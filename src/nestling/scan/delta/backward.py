"""The chunked scan, backward, by hand: the end of `chunk.py` derives every line and has the names.

M = sequences, C = tokens of a chunk, Q = chunks * M, Di and Do = inputs and outputs of the memory;
`dT` stands for the gradient of the loss by T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.scan.delta.forward import Options, Parts, Saved, prepare, rows_read, solve
from nestling.scan.segments import Segment, Workspace, segments

__all__ = ["Gradients", "backward"]


class Gradients(NamedTuple):
    """One gradient per input, in the input's dtype."""

    state: Tensor
    x: Tensor
    u: Tensor
    rate: Tensor
    retain: Tensor | None
    queries: Tensor | None


class Reader(NamedTuple):
    """The reads' side of a segment."""

    q: Tensor  # [Q, C, Di]
    dY: Tensor  # [Q, C, Do]
    ratios: Tensor  # [Q, C, C] rows of G
    g: Tensor  # [Q, C, 1]
    gram: Tensor  # [Q, C, C] q_t . scaled_s
    after: bool


def backward(
    dreads: Tensor | None,
    dstate: Tensor,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None,
    saved: Saved,
    options: Options,
    need_retain: bool,
) -> Gradients:
    """Gradients from those of the reads and of the end state, last segment first."""
    (sequences, tokens, inner), out = x.shape, u.shape[-1]
    work = Workspace(x, saved.starts.dtype)
    dx, du, drate = torch.empty_like(x), torch.empty_like(u), torch.empty_like(rate)
    dretain = torch.empty_like(retain) if need_retain else None
    dq = None
    if queries is not None:
        dq = torch.zeros_like(queries) if dreads is None else torch.empty_like(queries)
    dM = dstate.to(work.dtype)
    todo = list(segments(tokens, sequences, max(inner, out, options.chunk), options.chunk))
    for seg in reversed(todo):
        eta, alpha = seg.cut(rate, "rate", work), seg.cut(retain, "retain", work)
        parts = prepare(seg.cut(x, "x", work), eta, alpha, options.erase, work)
        starts = saved.starts[seg.first : seg.first + seg.chunks].flatten(0, 1)
        w, solved = _again(parts, seg, u, starts, saved, options, work)
        reader = None
        if queries is not None and dreads is not None:
            dY = seg.cut(dreads, "dY", work)
            reader = _reader(parts, seg.cut(queries, "q", work), dY, options.after, work)
        dR, dmemory = _recur_back(parts, solved, w, reader, dM, seg.chunks, work)
        dM = work("dM", *dM.shape).copy_(dmemory[0])
        dends = dmemory[1:].flatten(0, 1)
        grads = _gradients(parts, eta, starts, w, dR, dends, reader, need_retain, work)
        for part, whole in zip((dR, *grads), (du, dx, drate, dretain, dq), strict=True):
            if part is not None and whole is not None:
                seg.paste(part, whole)
    return Gradients(dM.clone(), dx, du, drate, dretain, dq)


def _again(
    parts: Parts, seg: Segment, u: Tensor, starts: Tensor, saved: Saved, options: Options,
    work: Workspace,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The segment's errors and inverses, from what was saved or once more from the inputs."""
    sequences, out = saved.starts.shape[1], u.shape[-1]
    if not options.erase:
        return seg.cut(u, "u", work), None
    if not options.recompute:
        solved = seg.stored(saved.inverse, sequences, options.chunk, seg.size)
        return seg.stored(saved.errors, sequences, out, out), solved
    solved = solve(parts, work.zeros("solved", *parts.gram.shape), work)
    given = seg.cut(u, "u", work)
    surprise = work("surprise", *given.shape)
    torch.baddbmm(given, parts.seen, starts.mT, alpha=-1, out=surprise)
    return torch.bmm(solved, surprise, out=work("errors", *given.shape)), solved


def _reader(parts: Parts, q: Tensor, dY: Tensor, after: bool, work: Workspace) -> Reader:
    ratios, g = rows_read(parts, after)
    gram = torch.bmm(q, parts.scaled.mT, out=work("scores", *ratios.shape))
    return Reader(q, dY, ratios, g, gram, after)


def _recur_back(
    parts: Parts, solved: Tensor | None, w: Tensor, reader: Reader | None, dM: Tensor, count: int,
    work: Workspace,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Adjoint of the recurrence: dR `[Q, C, Do]`, and dM at all chunk borders."""
    pieces = (count, dM.shape[0])
    dmemory = work("dmemory", count + 1, *dM.shape)
    dmemory[-1] = dM
    dw, dR = work("dw", *w.shape), work("dR", *w.shape)
    if reader is None:
        dw.zero_()
        dmemory[:-1].zero_()
    else:
        scores = torch.mul(reader.gram, reader.ratios, out=work("lower", *reader.gram.shape))
        torch.bmm(scores.mT, reader.dY, out=dw)
        asked = torch.mul(reader.q, reader.g, out=work("asked", *reader.q.shape))
        torch.bmm(reader.dY.mT, asked, out=dmemory[:-1].view(-1, *dM.shape[1:]))
    ends = parts.g[:, -1, None, None].unflatten(0, pieces).unbind(0)
    last, given, total = (t.unflatten(0, pieces).unbind(0) for t in (parts.last, dw, dR))
    steps = dmemory.unbind(0)
    if solved is None:
        for i in reversed(range(count)):
            steps[i].addcmul_(steps[i + 1], ends[i])
        return dw.baddbmm_(parts.last, dmemory[1:].flatten(0, 1).mT), dmemory
    inverse, seen = (t.unflatten(0, pieces).unbind(0) for t in (solved, parts.seen))
    for i in reversed(range(count)):
        given[i].baddbmm_(last[i], steps[i + 1].mT)
        torch.bmm(inverse[i].mT, given[i], out=total[i])
        steps[i].addcmul_(steps[i + 1], ends[i]).baddbmm_(total[i].mT, seen[i], alpha=-1)
    return dR, dmemory


def _gradients(
    parts: Parts, rate: Tensor, starts: Tensor, w: Tensor, dR: Tensor, dends: Tensor,
    reader: Reader | None, need_retain: bool, work: Workspace,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """dx, drate, dretain and dqueries of a segment, all chunks at once."""
    shape, square = parts.x.shape, parts.G[:, 1:].shape
    dscaled = torch.bmm(w, dends, out=work("dscaled", *shape))
    dG, dg = work("dG", *square), work("dg", *square[:2])  # rows t = 1..C
    if need_retain:
        dG.zero_()
        dg.zero_()
        dG[:, -1] = _dot(dscaled, parts.scaled, work)
        dg[:, -1] = _dot(dends.flatten(1), starts.flatten(1), work)
    dscaled.mul_(parts.G[:, -1].unsqueeze(-1))
    dx, dq = work("dx", *shape), None
    if reader is not None:
        dA = torch.bmm(reader.dY, w.mT, out=work("dA", *square))
        dq = torch.bmm(reader.dY, starts, out=work("dq", *shape))
        if need_retain:
            skip = 0 if reader.after else 1
            kept = slice(None, square[1] - skip)
            dG[:, kept].addcmul_(dA[:, skip:], reader.gram[:, skip:])
            dg[:, kept] += _dot(dq, reader.q, work)[:, skip:]
        dA.mul_(reader.ratios)
        dq.mul_(reader.g).baddbmm_(dA, parts.scaled)
        dscaled.baddbmm_(dA.mT, reader.q)
    if parts.gram.shape[1]:
        dL = torch.bmm(dR, w.mT, out=work("dA", *square))  # minus dL, and minus dseen below
        torch.bmm(dR, starts, out=dx)
        if need_retain:
            dG[:, :-1].addcmul_(dL[:, 1:], parts.gram[:, 1:], value=-1)
            dg[:, :-1] -= _dot(dx, parts.x, work)[:, 1:]
        dL.mul_(parts.G[:, :-1])
        dx.mul_(parts.g[:, :-1].unsqueeze(-1)).baddbmm_(dL, parts.scaled, beta=-1, alpha=-1)
        dscaled.baddbmm_(dL.mT, parts.x, alpha=-1)
        dx.addcmul_(dscaled, rate.unsqueeze(-1))
    else:
        torch.mul(dscaled, rate.unsqueeze(-1), out=dx)
    drate = _dot(dscaled, parts.x, work)
    dretain = _decay_back(parts, dG, dg, work) if need_retain else None
    return dx, drate, dretain, dq


def _decay_back(parts: Parts, dG: Tensor, dg: Tensor, work: Workspace) -> Tensor:
    """`dretain_r = sum_{t >= r} G_tr (sum_{s < r} dG_ts G_{r-1,s} + dg_t g_{r-1})`: no division."""
    later = parts.G[:, 1:].mT  # row r, column t: G_tr
    sums = _dot(torch.bmm(later, dG, out=work("dA", *dG.shape)), parts.G[:, :-1], work)
    return sums.addcmul_(torch.bmm(later, dg.unsqueeze(-1)).squeeze(-1), parts.g[:, :-1])


def _dot(left: Tensor, right: Tensor, work: Workspace) -> Tensor:
    return torch.mul(left, right, out=work("dot", *left.shape)).sum(-1)
