"""The chunked scan by hand, forwards and backwards: plain rule, all chunks of a segment at once but
for the recurrence.

`chunk.py` derives every line and has the names. M = sequences, C = tokens of a chunk,
Q = chunks * M, Di and Do = inputs and outputs of the memory; `dT` stands for the gradient of the
loss by T. A segment is some chunks of all sequences; inside it tensors are laid out chunk after
chunk, `[Q, C, ...]`: the recurrence walks over contiguous slices, everything else is one batched
operation over Q.

Two things that only some memories ask for (`Extra`): heads that erase less or nothing, where
`share` stands beside x in what is erased, `L = G^- o (share X) (nX)^T`; and values that the memory
makes itself (Eq. 84), `U = unit((home + M_0) V)` with `M_0` the start of the chunk. Then only U
waits for the walk; backwards `dM_0`, `dhome` and `dV` take what comes through it.

Both directions are torch operators, which autograd and torch.compile know; `scan_chunk` calls them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from nestling.norm import EPS
from nestling.scan.delta.chunk import scan_chunk_autograd
from nestling.scan.delta.naive import run_naive
from nestling.scan.delta.types import MatrixAndVelocity, Options
from nestling.scan.numerics import Workspace, compute_dtype, decay, unit_inverse
from nestling.scan.opaque import differentiate_once, only_needed

GIVEN = "Tensor state, Tensor x, Tensor u, Tensor rate, Tensor retain, Tensor? queries"
"""The tensors of a scan, in an operator's schema."""

EXTRA = "Tensor? home, Tensor? share"
FORM = "bool erase, bool after, int chunk, bool recompute"

SEGMENT = 1 << 18
"""Numbers in one tensor of a segment on a CPU (1 MB in float32): enough work to hide the cost of a
call, and a dozen such tensors stay in cache, so the time per token does not grow with the sequence.
Other devices want few large launches: there a segment is all whole chunks."""


TILES = {32: 16, 128: 32}
"""Tokens that are solved together on a CPU, by the widest memory (its narrow side) that is quickest
so; wider ones take 64. Start states, one a chunk, then take about as much as keys and values."""


class ChunkRange(NamedTuple):
    """Tokens `[start, stop)`: `chunks` chunks of `size` tokens, the first being chunk `first`."""

    start: int
    stop: int
    first: int
    chunks: int
    size: int

    def cut(self, tensor: Tensor, name: str, work: Workspace) -> Tensor:
        """`[M, T, ...]` -> this segment, chunk after chunk `[Q, C, ...]`; a view if it can be."""
        part = tensor[:, self.start : self.stop]
        if self.chunks == 1 and part.dtype == work.dtype:
            return part
        part = part.unflatten(1, (self.chunks, self.size)).transpose(0, 1)
        copy = work(name, *part.shape)
        return copy.copy_(part).flatten(0, 1)

    def paste(self, part: Tensor, tensor: Tensor) -> None:
        """The inverse of `cut`: write `[Q, C, ...]` into `tensor[:, start:stop]`."""
        whole = tensor[:, self.start : self.stop].unflatten(1, (self.chunks, self.size))
        whole.copy_(part.unflatten(0, (self.chunks, -1)).transpose(0, 1))

    def stored(self, flat: Tensor, sequences: int, width: int, columns: int) -> Tensor:
        """This segment's part of a flat store `[T * M * width]`, as `[Q, C, columns]`."""
        shape = (self.chunks * sequences, self.size, columns)
        return flat.narrow(0, self.start * sequences * width, math.prod(shape)).view(shape)


def segments(x: Tensor, width: int, chunk: int) -> Iterator[ChunkRange]:
    """Cut x [M, T, ...] into segments of whole chunks, and one shorter chunk where T is ragged."""
    sequences, tokens = x.shape[:2]
    whole = tokens // chunk
    step = max(1, whole)
    if x.device.type == "cpu":
        step = max(1, SEGMENT // max(1, sequences * chunk * width))
    for first in range(0, whole, step):
        count = min(step, whole - first)
        yield ChunkRange(first * chunk, (first + count) * chunk, first, count, chunk)
    if tokens % chunk:
        yield ChunkRange(whole * chunk, tokens, whole, 1, tokens % chunk)


class Form(NamedTuple):
    """The options of one call of the kernel."""

    erase: bool
    after: bool  # reads see their own token's write
    chunk: int
    recompute: bool  # keep only the chunks' start states for the backward pass


class Extra(NamedTuple):
    """Inputs of some memories only; both need `Form.erase`."""

    share: Tensor | None = None  # [M] how much of a write's rate erases, a constant; None is one
    home: Tensor | None = None  # [M, Do, Di] makes values of u, which is then [M, T, Di]


PLAIN = Extra()


class SavedForward(NamedTuple):
    """Tensors the forward pass keeps for the backward pass, in the compute dtype."""

    starts: Tensor  # [chunks + 1, M, Do, Di] memory at the start of every chunk, and at the end
    errors: Tensor  # [T * M * Do] surprises, chunk after chunk; empty when recomputed or gd
    inverse: Tensor  # [T * M * C] inverses (I + L)^{-1}, likewise


class Parts(NamedTuple):
    """Everything of a segment that does not depend on the memory."""

    g: Tensor  # [Q, C + 1] running products of retain
    G: Tensor  # [Q, C + 1, C] their ratios
    x: Tensor  # [Q, C, Di]
    left: Tensor  # [Q, C, Di] share x: what is erased
    share: Tensor | None  # [Q, 1, 1]
    scaled: Tensor  # [Q, C, Di] rate_s x_s
    last: Tensor  # [Q, C, Di] scaled, decayed to the end of the chunk
    seen: Tensor  # [Q, C, Di] g_{t-1} left_t; empty for gd
    gram: Tensor  # [Q, C, C] left_t . scaled_s; empty for gd


def _prepare(
    x: Tensor, rate: Tensor, decays: tuple[Tensor, Tensor], erase: bool, share: Tensor | None,
    work: Workspace,
) -> Parts:  # fmt: skip
    """The parts of a segment, from x `[Q, C, Di]`, rates `[Q, C]` and what `decay` returns."""
    g, G = decays
    batch, size, _ = x.shape
    scaled = torch.mul(x, rate.unsqueeze(-1), out=work("scaled", *x.shape))
    last = torch.mul(scaled, G[:, -1].unsqueeze(-1), out=work("last", *x.shape))
    if not erase:
        return Parts(g, G, x, x, None, scaled, last, x[:, :0], x[:, :0])
    left = x
    if share is not None:
        share = share.repeat(batch // share.shape[0]).view(-1, 1, 1)
        left = torch.mul(x, share, out=work("left", *x.shape))
    seen = torch.mul(left, g[:, :-1].unsqueeze(-1), out=work("seen", *x.shape))
    gram = torch.bmm(left, scaled.mT, out=work("gram", batch, size, size))
    return Parts(g, G, x, left, share, scaled, last, seen, gram)


def _lower(parts: Parts, work: Workspace) -> Tensor:
    """L of every chunk, `L_ts = rate_s (g_{t-1} / g_s) x_t . x_s`; its errors take `(I + L)^-1`."""
    return torch.mul(parts.gram, parts.G[:, :-1], out=work("lower", *parts.gram.shape))


def _rows_read(parts: Parts, after: bool) -> tuple[Tensor, Tensor]:
    """The weights of writes and start state in the reads: G `[Q, C, C]` and g `[Q, C, 1]`."""
    rows = slice(1, None) if after else slice(None, -1)
    return parts.G[:, rows], parts.g[:, rows].unsqueeze(-1)


@torch.library.custom_op(
    "nestling::scan",
    mutates_args=(),
    schema=f"({GIVEN}, {EXTRA}, {FORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _scan(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reads `[M, T, Do]` in the queries' dtype (empty without), end state, and `SavedForward`."""
    state, x, u, rate, retain, queries, home, share, *form = arguments
    erase, after, chunk, recompute = form
    dtype = compute_dtype(state, x, u, rate, retain, queries)
    (sequences, tokens, inner), out = x.shape, state.shape[-2]
    work = Workspace(x, dtype)
    starts = x.new_empty((-(-tokens // chunk) + 1, *state.shape), dtype=dtype)
    starts[0] = state
    keep = sequences * tokens if erase and not recompute else 0
    errors = x.new_empty(keep * out, dtype=dtype)
    inverse = x.new_zeros(keep * chunk, dtype=dtype)
    reads = x.new_empty(0) if queries is None else queries.new_empty(sequences, tokens, out)
    for seg in segments(x, max(inner, out, chunk), chunk):
        eta, alpha = seg.cut(rate, "rate", work), seg.cut(retain, "retain", work)
        decays = decay(alpha, work)
        parts = _prepare(seg.cut(x, "x", work), eta, decays, erase, share, work)
        memory = starts[seg.first : seg.first + seg.chunks + 1]
        w = seg.cut(u, "u", work)
        if erase:
            if keep:
                solved = seg.stored(inverse, sequences, chunk, seg.size)
                room = seg.stored(errors, sequences, out, out)
            else:
                solved = work.zeros("solved", *parts.gram.shape)
                room = work("errors", *parts.x.shape[:2], out)
            solved = unit_inverse(_lower(parts, work), solved, work)
            w = _recur(parts, solved, w, home, memory, room, work)
        else:
            _accumulate(parts, w, memory)
        if queries is not None:
            q = seg.cut(queries, "q", work)
            seg.paste(_read(parts, q, w, memory[:-1].flatten(0, 1), after, work), reads)
    return reads, starts[-1].clone(), starts, errors, inverse


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


def _accumulate(parts: Parts, u: Tensor, memory: Tensor) -> None:
    """Without `erase` the errors are the targets; fills `memory[1:]` from `memory[0]`."""
    count, sequences = memory.shape[0] - 1, memory.shape[1]
    torch.bmm(u.mT, parts.last, out=memory[1:].view(-1, *memory.shape[2:]))
    ends = parts.g[:, -1, None, None].unflatten(0, (count, sequences)).unbind(0)
    steps = memory.unbind(0)
    for i in range(count):
        steps[i + 1].addcmul_(steps[i], ends[i])


def _own(v: Tensor, memories: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """The values that memories `[Q, Do, Di]` make of v `[Q, C, Di]`, of unit length."""
    torch.bmm(v, memories.mT, out=values)
    torch.linalg.vector_norm(values, dim=-1, keepdim=True, out=scale)
    return values.mul_(scale.square_().add_(EPS).rsqrt_())


def _recur(
    parts: Parts, solved: Tensor, u: Tensor, home: Tensor | None, memory: Tensor, errors: Tensor,
    work: Workspace,
) -> Tensor:  # fmt: skip
    """Over chunks that erase: fills `errors` `[Q, C, Do]`, and `memory[1:]` from `memory[0]`."""
    pieces = (memory.shape[0] - 1, memory.shape[1])
    ends = parts.g[:, -1, None, None].unflatten(0, pieces).unbind(0)
    last, seen, inverse, given, w = (
        tensor.unflatten(0, pieces).unbind(0)
        for tensor in (parts.last, parts.seen, solved, u, errors)
    )
    steps = memory.unbind(0)
    surprise = work("surprise", *w[0].shape)
    for i in range(pieces[0]):
        if home is None:
            torch.baddbmm(given[i], seen[i], steps[i].mT, alpha=-1, out=surprise)
        else:
            memories = torch.add(steps[i], home, out=work("memories", *home.shape))
            _own(given[i], memories, surprise, work("scale", *surprise.shape[:2], 1))
            surprise.baddbmm_(seen[i], steps[i].mT, alpha=-1)
        torch.bmm(inverse[i], surprise, out=w[i])
        torch.mul(steps[i], ends[i], out=steps[i + 1])
        steps[i + 1].baddbmm_(w[i].mT, last[i])
    return errors


def _read(
    parts: Parts, q: Tensor, w: Tensor, starts: Tensor, after: bool, work: Workspace
) -> Tensor:
    ratios, g = _rows_read(parts, after)
    scores = torch.bmm(q, parts.scaled.mT, out=work("scores", *ratios.shape)).mul_(ratios)
    reads = torch.bmm(scores, w, out=work("reads", *w.shape))
    asked = torch.mul(q, g, out=work("asked", *q.shape))
    return reads.baddbmm_(asked, starts.mT)


class Gradients(NamedTuple):
    """One gradient per input, in the input's dtype."""

    state: Tensor
    x: Tensor
    u: Tensor
    rate: Tensor
    retain: Tensor | None
    queries: Tensor | None
    home: Tensor | None


class ReadSide(NamedTuple):
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
    saved: SavedForward,
    form: Form,
    need_retain: bool,
    extra: Extra = PLAIN,
) -> Gradients:
    """Gradients from those of the reads and of the end state, last segment first."""
    inner, out = x.shape[-1], dstate.shape[-2]
    work = Workspace(x, saved.starts.dtype)
    dx, du, drate = torch.empty_like(x), torch.empty_like(u), torch.empty_like(rate)
    dretain = torch.empty_like(retain) if need_retain else None
    dq = None
    if queries is not None:
        dq = torch.zeros_like(queries) if dreads is None else torch.empty_like(queries)
    dM, dhome = dstate.to(work.dtype), None
    if extra.home is not None:
        dhome = torch.zeros_like(dM)
    todo = list(segments(x, max(inner, out, form.chunk), form.chunk))
    for seg in reversed(todo):
        eta, alpha = seg.cut(rate, "rate", work), seg.cut(retain, "retain", work)
        decays = decay(alpha, work)
        parts = _prepare(seg.cut(x, "x", work), eta, decays, form.erase, extra.share, work)
        starts = saved.starts[seg.first : seg.first + seg.chunks].flatten(0, 1)
        values = _values(seg, u, starts, extra.home, work)
        w, solved = _again(parts, seg, u, values, starts, saved, form, work)
        reader = None
        if queries is not None and dreads is not None:
            dY = seg.cut(dreads, "dY", work)
            reader = _reader(parts, seg.cut(queries, "q", work), dY, form.after, work)
        dR, dmemory = _recur_back(parts, solved, w, reader, values, dM, dhome, seg.chunks, work)
        dM = work("dM", *dM.shape).copy_(dmemory[0])
        dends = dmemory[1:].flatten(0, 1)
        grads = _gradients(parts, eta, starts, w, dR, dends, reader, need_retain, work)
        if values is not None:
            dR = torch.bmm(values.back, values.memories, out=work("dvalues", *values.v.shape))
        for part, whole in zip((dR, *grads), (du, dx, drate, dretain, dq), strict=True):
            if part is not None and whole is not None:
                seg.paste(part, whole)
    return Gradients(dM.clone(), dx, du, drate, dretain, dq, dhome)


class Values(NamedTuple):
    """Values that the memory makes itself, of a segment."""

    v: Tensor  # [Q, C, Di]
    memories: Tensor  # [Q, Do, Di] that make them
    own: Tensor  # [Q, C, Do] the values
    scale: Tensor  # [Q, C, 1] by which they were made units
    back: Tensor  # [Q, C, Do] room for the gradient of `memories v`


def _values(
    seg: ChunkRange, u: Tensor, starts: Tensor, home: Tensor | None, work: Workspace
) -> Values | None:
    """The segment's own values once more, all chunks at once; None where they were given."""
    if home is None:
        return None
    v = seg.cut(u, "u", work)
    memories = work("memories", seg.chunks, *home.shape)
    torch.add(starts.view_as(memories), home, out=memories)
    own, back = work("own", 2, *v.shape[:2], home.shape[1])
    scale = work("scale", *v.shape[:2], 1)
    _own(v, memories.flatten(0, 1), own, scale)
    return Values(v, memories.flatten(0, 1), own, scale, back)


def _again(
    parts: Parts, seg: ChunkRange, u: Tensor, values: Values | None, starts: Tensor,
    saved: SavedForward, form: Form, work: Workspace,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The segment's errors and inverses, from what was saved or once more from the inputs."""
    sequences, out = saved.starts.shape[1:3]
    if not form.erase:
        return seg.cut(u, "u", work), None
    if not form.recompute:
        solved = seg.stored(saved.inverse, sequences, form.chunk, seg.size)
        return seg.stored(saved.errors, sequences, out, out), solved
    room = work.zeros("solved", *parts.gram.shape)
    solved = unit_inverse(_lower(parts, work), room, work)
    given = seg.cut(u, "u", work) if values is None else values.own
    surprise = work("surprise", *given.shape)
    torch.baddbmm(given, parts.seen, starts.mT, alpha=-1, out=surprise)
    return torch.bmm(solved, surprise, out=work("errors", *given.shape)), solved


def _reader(parts: Parts, q: Tensor, dY: Tensor, after: bool, work: Workspace) -> ReadSide:
    ratios, g = _rows_read(parts, after)
    gram = torch.bmm(q, parts.scaled.mT, out=work("scores", *ratios.shape))
    return ReadSide(q, dY, ratios, g, gram, after)


def _recur_back(
    parts: Parts, solved: Tensor | None, w: Tensor, reader: ReadSide | None, values: Values | None,
    dM: Tensor, dhome: Tensor | None, count: int, work: Workspace,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Adjoint of the recurrence: dR `[Q, C, Do]`, and dM at all chunk borders.

    Own values: fills `values.back`, and adds what home gets to `dhome`.
    """
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
    made = None
    if values is not None:
        made = [
            tuple(
                t.unflatten(0, pieces)[i] for t in (values.v, values.own, values.scale, values.back)
            )
            for i in range(count)
        ]
    for i in reversed(range(count)):
        given[i].baddbmm_(last[i], steps[i + 1].mT)
        torch.bmm(inverse[i].mT, given[i], out=total[i])
        steps[i].addcmul_(steps[i + 1], ends[i]).baddbmm_(total[i].mT, seen[i], alpha=-1)
        if made is not None and dhome is not None:
            v, own, scale, back = made[i]
            along = torch.mul(total[i], own, out=back).sum(-1, keepdim=True)
            torch.addcmul(total[i], own, along, value=-1, out=back).mul_(scale)
            pushed = torch.bmm(back.mT, v, out=work("pushed", *dM.shape))
            steps[i].add_(pushed)
            dhome.add_(pushed)
    return dR, dmemory


def _gradients(
    parts: Parts, rate: Tensor, starts: Tensor, w: Tensor, dR: Tensor, dends: Tensor,
    reader: ReadSide | None, need_retain: bool, work: Workspace,
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
            dg[:, :-1] -= _dot(dx, parts.left, work)[:, 1:]
        dL.mul_(parts.G[:, :-1])
        dx.mul_(parts.g[:, :-1].unsqueeze(-1)).baddbmm_(dL, parts.scaled, beta=-1, alpha=-1)
        if parts.share is not None:
            dx.mul_(parts.share)
        dscaled.baddbmm_(dL.mT, parts.left, alpha=-1)
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


@torch.library.custom_op(
    "nestling::scan_backward",
    mutates_args=(),
    schema=f"(Tensor? dreads, Tensor? dstate, {GIVEN}, {EXTRA}, Tensor starts, Tensor errors,"
    f" Tensor inverse, {FORM}, bool need_retain) -> Tensor[]",
)
def _scan_backward(dreads: Tensor | None, dstate: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Gradients of state, x, u, rate, retain, queries, home; empty where not needed."""
    state, x, u, rate, retain, queries, home, share = arguments[:8]
    saved, form, need_retain = (
        SavedForward(*arguments[8:11]),
        Form(*arguments[11:15]),
        arguments[15],
    )
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


def quickest(x: Tensor, u: Tensor) -> int:
    """The most tokens to solve together: the work of a chunk grows with the square of its length.

    On a CPU it is work that counts, elsewhere how many launches there are.
    """
    if x.device.type != "cpu":
        return x.shape[-2]
    narrow = min(x.shape[-1], u.shape[-1])
    return next((tokens for width, tokens in TILES.items() if narrow <= width), 64)


def scan_chunk(
    state: Any, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: Tensor | None, *,
    share: Tensor | None = None, home: Tensor | None = None, **options: Unpack[Options],
) -> tuple[Tensor | None, Any]:  # fmt: skip
    """The chunked scan (Eq. 90) with a hand-written backward pass, once differentiable.

    Chunks are at most as long as they are `quickest`, unless `home` is given, whose values hang on
    them. With momentum it is the form that autograd differentiates. `share` [M] and `home`
    [M, Do, Di] are the kernel's `Extra`, for one leading dimension and `erase`.
    """
    tensors = (state, x, u, rate, retain, queries)
    if options["momentum"] is not None or isinstance(state, MatrixAndVelocity):
        return scan_chunk_autograd(*tensors, **options)
    if 0 in (*x.shape, *u.shape):
        return run_naive(*tensors, **options)
    lead = x.shape[:-2]
    derived = (*tensors, home)
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in derived)
    size = math.prod(lead)
    flat = [None if t is None else t.reshape(size, *t.shape[len(lead) :]) for t in tensors]
    chunk = min(options["chunk"], max(1, x.shape[-2]))
    form = Form(
        options["erase"],
        options["read"] == "after",
        chunk if home is not None else min(chunk, quickest(x, u)),
        options["recompute"] or not needed,
    )
    reads, end, *_ = _scan(*flat, home, share, *form)
    end = end.view(*lead, *end.shape[1:])
    return (None if queries is None else reads.view(*lead, *reads.shape[1:])), end
