"""Matrix memories in the self-modifying scan, by hand: forwards, backwards, and one token.

The memories are one stack of rows, [b, N d, d], so that all of them take one product. With
`g_t` the running product of retentions, D_ts = g_{t-1} / g_s for s < t (else 0), and eta, alpha, k
shared by all memories, and e = 1 (`Inputs.erase` may say less), a segment is

    w = (I + eta e D (K K^T))^-1 eta (U - e g_{t-1} K S^T)     rows written, [C, N d]
    S' = g_C S + (g_C/g_t w)^T K                               the stack after the segment
    y = g_{t-1} Q S_mem^T + (D (Q K^T)) w_mem                  reads

Backwards, let `z_t = drhs_t . w_t`, where `drhs = (I + ...)^-T dw`. Scaling alpha_t scales
everything behind t, and eta = alpha beta, so the many gradients of D cancel and leave

    d log beta_t = z_t,     d log alpha_t = <S', dS'> + sum_{r > t} (dy_r . y_r - dU_r . U_r).

Projections, gates and self-generated values are taken at `start`, the memories where the chunk
starts. It is `begun`, the stack of that moment, or trained weights plus it (deviation 22).

Segments come first in this file, then the walk over all of them: `run_forward`, `run_backward`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.norm import EPS
from nestling.scan.numerics import Workspace
from nestling.scan.self_modifying.rule import Inputs, SelfRule

__all__ = [
    "SegmentResults",
    "kept_shapes",
    "one_clock",
    "one_token_segment",
    "run_backward",
    "run_forward",
    "segments_of",
]

Kept = Mapping[str, Tensor]
"""The tensors of a segment that the backward pass needs; `kept_shapes` has the names."""


def kept_shapes(rule: SelfRule, b: int, size: int, d: int) -> dict[str, tuple[int, ...]]:
    """The shapes of what a segment of `size` tokens leaves for the backward pass."""
    many = len(rule.names)
    shapes: dict[str, tuple[int, ...]] = {
        "raw": (b, size, 2),  # read-outs of rate and retention
        "kv": (b, 2 * size, d),  # k, then v
        "gap": (b, size, size),  # D
        "w": (b, size, many * d),
    }
    shapes |= {f"scale {name}": (b, size, 1) for name in ("k", "v", "q") if name in rule.adaptive}
    if "q" in rule.adaptive:
        shapes["q"] = (b, size, d)
    if rule.erase:
        shapes["inverse"] = (b, size, size)  # of I + eta e D (K K^T)
    if rule.own_values:
        shapes |= {"own": (b, size, many, d), "own scale": (b, size, many, 1)}
    if rule.squared or rule.clip < 1:  # otherwise errors are the values as they are
        shapes |= {"u": (b, size, many, d), "short": (b, size, many, 1)}  # short: the clip's factor
    return shapes


class RetainProducts(NamedTuple):
    """Products of retentions in a segment."""

    before: Tensor  # [b, C, 1]: g_{t-1}
    tail: Tensor  # [b, C, 1]: g_C / g_t
    whole: Tensor  # [b, 1, 1]: g_C


def _scale(x: Tensor, out: Tensor) -> Tensor:
    """1 / sqrt(|x|^2 + eps) along the last dimension."""
    torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=out)
    return out.square_().add_(EPS).rsqrt_()


def _unit_back_(dy: Tensor, y: Tensor, scale: Tensor, work: Workspace) -> Tensor:
    """Through `y = x scale`, the normalisation of the last dimension; in the place of `dy`."""
    along = torch.mul(dy, y, out=work("some", *dy.shape)).sum(-1, keepdim=True)
    return dy.addcmul_(y, along, value=-1).mul_(scale)


def _rows(rule: SelfRule, name: str, stack: Tensor) -> Tensor | None:
    """The rows of one memory in a stack: a view [b, d, d], None for a static projection."""
    if name not in rule.adaptive:
        return None
    slot, d = rule.names.index(name), stack.shape[-1]
    return stack[:, slot * d : (slot + 1) * d]


def _project(rule: SelfRule, part: Inputs, start: Tensor, kept: Kept) -> Tensor:
    """Write k and v to `kept["kv"]`; return q."""
    size = part.x.shape[1]
    kv, q = kept["kv"], part.q
    rooms = {"k": kv[:, :size], "v": kv[:, size:], "q": kept.get("q")}
    for name, given in (("k", part.k), ("v", part.v), ("q", part.q)):
        rows, room = _rows(rule, name, start), rooms[name]
        if rows is None or room is None:
            if room is not None and given is not None:
                room.copy_(given)
            continue
        raw = part.x @ rows.mT if given is None else torch.baddbmm(given, part.x, rows.mT)
        torch.mul(raw, _scale(raw, kept[f"scale {name}"]), out=room)
    q = q if rooms["q"] is None else rooms["q"]
    if q is None:
        raise ValueError("q is no memory of this rule, so Inputs.q must be given")
    return q


def _looks(rule: SelfRule, part: Inputs, start: Tensor) -> Tensor:
    """The vectors on which the gates look at x, [b, 2, d]: read-outs through M_eta, M_alpha."""
    looks = []
    for i, name in enumerate(("eta", "alpha")):
        look, rows = part.readout[:, i : i + 1], _rows(rule, name, start)
        looks.append(look if rows is None else look @ rows)
    return torch.cat(looks, 1)


def _read_out(part: Inputs, looks: Tensor, out: Tensor) -> Tensor:
    """The gates' read-outs, [b, C, 2]."""
    torch.baddbmm(part.bias.unsqueeze(1), part.x, looks.mT, out=out)
    return out if part.gates is None else out.add_(part.gates)


def _decay(log: Tensor) -> tuple[RetainProducts, Tensor, Tensor]:
    """The products [b, C] of retentions from their logarithms; and log g_{t-1}, log g_t."""
    g = log.cumsum(-1)
    past = g - log
    tail = (g[:, -1:] - g).exp_().unsqueeze(-1)
    return RetainProducts(past.exp().unsqueeze(-1), tail, g[:, -1, None, None].exp()), past, g


def _errors(
    rule: SelfRule, kept: Kept, begun: Tensor, start: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Errors of all memories [b, C, N, d]; and `K begun^T` where it was needed."""
    kv = kept["kv"]
    size, d, many = kv.shape[1] // 2, kv.shape[2], len(rule.names)
    seen = None
    if rule.own_values:
        own = kept["own"]
        torch.bmm(kv[:, size:], start.mT, out=own.flatten(2))
        u = own.mul_(_scale(own, kept["own scale"]))
    else:
        u = kv[:, size:].unsqueeze(2).expand(-1, -1, many, -1)
    if rule.squared:
        seen = kv[:, :size] @ begun.mT
        u = u - seen.unflatten(2, (many, d))
    if "u" in kept:
        length = torch.linalg.vector_norm(u, dim=-1, keepdim=True).clamp_min_(rule.clip)
        u = torch.mul(u, torch.div(rule.clip, length, out=kept["short"]), out=kept["u"])
    return u, seen


def one_token_segment(
    rule: SelfRule, part: Inputs, stack: Tensor, begun: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """A segment of one token: its read [b, 1, d], and the stack after it (Eq. 88).

    The kernel below would do, in four times as many operations: there is no system to solve, and
    items may stand at different positions.
    """
    b, _, d = part.x.shape
    shapes = kept_shapes(rule, b, 1, d)
    kept = {n: stack.new_empty(s) for n, s in shapes.items() if n not in ("gap", "inverse", "w")}
    q = _project(rule, part, start, kept)
    k = kept["kv"][:, :1]
    y = q @ (begun if rule.read_start else stack)[:, :d].mT
    raw = _read_out(part, _looks(rule, part, start), kept["raw"])
    eta, alpha = rule.rate_and_retain(raw, part.valid)
    u, seen = _errors(rule, kept, begun, start)
    w = u.flatten(2)
    if rule.erase:
        said = k @ stack.mT if seen is None or begun is not stack else seen
        w = w - (said if part.erase is None else said * part.erase.view(-1, 1, 1))
    w = w * eta.unsqueeze(-1)
    return y, torch.baddbmm(stack * alpha.unsqueeze(-1), w.mT, k)


def _forward(
    rule: SelfRule, part: Inputs, stack: Tensor, begun: Tensor, start: Tensor, kept: Kept,
    after: Tensor, y: Tensor, work: Workspace,
) -> None:  # fmt: skip
    """One segment: fill `kept`, the stack `after` it, and its reads `y`."""
    b, size, d = part.x.shape
    rows, square = (b, size, stack.shape[1]), (b, size, size)
    q = _project(rule, part, start, kept)
    k, gap, w = kept["kv"][:, :size], kept["gap"], kept["w"]
    gates = rule.gates(_read_out(part, _looks(rule, part, start), kept["raw"]), part.valid)
    eta = gates.rate.unsqueeze(-1)
    decay, past, g = _decay(gates.log_retain)
    torch.sub(past.unsqueeze(-1), g.unsqueeze(-2), out=gap)
    gap.add_(work.above(size)).exp_()
    u, seen = _errors(rule, kept, begun, start)
    if rule.erase:
        if seen is None or begun is not stack:
            seen = torch.bmm(k, stack.mT, out=work("rows", *rows))
        erased, rate = (
            p if part.erase is None else p * part.erase.view(-1, 1, 1) for p in (decay.before, eta)
        )
        right = torch.addcmul(u.flatten(2), seen, erased, value=-1, out=seen).mul_(eta)
        system = torch.bmm(k, k.mT, out=work("square", *square)).mul_(gap).mul_(rate)
        eye = work.eye(size).expand_as(system)
        torch.linalg.solve_triangular(
            system, eye, upper=False, unitriangular=True, out=kept["inverse"]
        )
        torch.bmm(kept["inverse"], right, out=w)
    else:
        torch.mul(u.flatten(2), eta, out=w)
    if rule.read_start:
        y.copy_(q @ begun[:, :d].mT)
    else:
        reads = torch.bmm(q, stack[:, :d].mT, out=work("reads", b, size, d)).mul_(decay.before)
        alike = torch.bmm(q, k.mT, out=work("square", *square))
        torch.baddbmm(reads, alike.mul_(gap), w[..., :d], out=y)
    faded = torch.mul(w, decay.tail, out=work("rows", *rows))
    torch.mul(stack, decay.whole, out=after).baddbmm_(faded.mT, k)


class Grads(NamedTuple):
    """Gradients of one segment; `begun` is None where the chunk starts with the segment, `start`
    where it is the same as begun. All of them may lie in the workspace."""

    stack: Tensor  # [b, N d, d]
    begun: Tensor | None  # [b, N d, d]
    start: Tensor | None  # [b, N d, d]
    x: Tensor  # [b, C, d]
    readout: Tensor  # [b, 2, d]
    gates: Tensor  # [b, C, 2]
    k: Tensor | None
    v: Tensor | None
    q: Tensor | None


def _backward(
    rule: SelfRule, part: Inputs, stack: Tensor, begun: Tensor, start: Tensor, kept: Kept,
    after: Tensor, y: Tensor, dy: Tensor, dafter: Tensor, work: Workspace,
) -> Grads:  # fmt: skip
    """All gradients of a segment from those of its reads and of the stack after it."""
    b, size, d = part.x.shape
    kv, gap, w, inverse = kept["kv"], kept["gap"], kept["w"], kept.get("inverse")
    k, q = kv[:, :size], kept.get("q", part.q)
    if q is None:
        raise AssertionError("unreachable: the forward pass had queries")
    gates = rule.gates(kept["raw"], part.valid)
    decay, _, _ = _decay(gates.log_retain)
    eta, same = gates.rate.unsqueeze(-1), begun is stack
    token, rows, square = (b, size, d), w.shape, (b, size, size)
    # End of the segment and reads.
    dw = torch.bmm(k, dafter.mT, out=work("dw", *rows)).mul_(decay.tail)
    faded = torch.mul(w, decay.tail, out=work("rows", *rows))
    dk = torch.bmm(faded, dafter, out=work("dk", *token))
    dstack = work("dstack", *stack.shape)
    both = torch.mul(after, dafter, out=work("stack", *stack.shape))
    log = both.sum((1, 2)).unsqueeze(-1)  # <S', dS'>
    torch.mul(dafter, decay.whole, out=dstack)
    dbegun = dstack if same else work("dbegun", *stack.shape).zero_()
    dstart = dbegun if start is begun else work("dstart", *stack.shape).zero_()
    if rule.read_start:
        dq = dy @ begun[:, :d]
        dbegun[:, :d] += dy.mT @ q
        moving = torch.zeros_like(gates.rate)
    else:
        faded = torch.mul(dy, decay.before, out=work("faded", *token))
        dstack[:, :d] += torch.bmm(faded.mT, q, out=work("matrix", b, d, d))
        alike = torch.bmm(q, k.mT, out=work("square", *square)).mul_(gap)
        dw[..., :d] += torch.bmm(alike.mT, dy, out=work("some", *token))
        cross = torch.bmm(dy, w[..., :d].mT, out=work("square", *square)).mul_(gap)
        dq = torch.bmm(cross, k, out=work("dq", *token)).baddbmm_(faded, stack[:, :d])
        dk.baddbmm_(cross.mT, q)
        moving = torch.mul(dy, y, out=work("some", *token)).sum(-1)  # [b, C]
    # The triangular system.
    drhs = dw
    if inverse is not None:
        drhs = torch.bmm(inverse.mT, dw, out=work("drhs", *rows))
    z = torch.mul(drhs, w, out=work("rows", *rows)).sum(-1)  # d log beta
    du = drhs.mul_(eta)
    dseen = None
    if inverse is not None:
        pair = torch.bmm(du, w.mT, out=work("square", *square)).mul_(gap)
        erased = decay.before
        if part.erase is not None:
            share = part.erase.view(-1, 1, 1)
            pair, erased = pair.mul_(share), erased * share
        dk.baddbmm_(pair + pair.mT, k, alpha=-1)
        dseen = torch.mul(du, -erased, out=work("dseen", *rows))
    # Errors.
    dseen_begun, dv, down, along = _errors_back(rule, kept, du, dseen if same else None, work)
    if dseen is not None and not same:
        dk.baddbmm_(dseen, stack)
        dstack.baddbmm_(dseen.mT, k)
    if dseen_begun is not None:
        dk.baddbmm_(dseen_begun, begun)
        dbegun.baddbmm_(dseen_begun.mT, k)
    if down is not None:
        dv = torch.bmm(down, start, out=work("dv", *token))
        dstart.baddbmm_(down.mT, kv[:, size:])
    # Gates: d log alpha_t = <S', dS'> + sum behind t of (dy . y - dU . U).
    moving = moving - along
    dlog = log + moving.flip(-1).cumsum(-1).flip(-1) - moving
    draw = rule.gates_backward(gates.write, gates.keep, z, dlog, part.valid)
    dx, dreadout, given = _project_back(rule, part, start, kept, draw, (dk, dv, dq), dstart, work)
    return Grads(
        dstack,
        None if same else dbegun,
        None if start is begun else dstart,
        dx,
        dreadout,
        draw,
        *given,
    )


def _errors_back(
    rule: SelfRule, kept: Kept, du: Tensor, dseen: Tensor | None, work: Workspace
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """Through the errors: gradients of `K begun^T` (added to `dseen`), of v where it is shared, of
    the memories' answers to v; and `dU . U`, [b, C]."""
    own, short, kv, many = kept.get("own"), kept.get("short"), kept["kv"], len(rule.names)
    wide = du.unflatten(2, (many, -1))  # [b, C, N, d]
    u = kept.get("u")
    if u is None:
        shared = kv[:, kv.shape[1] // 2 :].unsqueeze(2).expand(-1, -1, many, -1)
        u = shared if own is None else own
    room = work("rows", *du.shape).view(wide.shape)
    dots = torch.mul(wide, u, out=room).sum(-1, keepdim=True)  # [b, C, N, 1]
    along = dots.sum((2, 3))
    derror = wide
    if short is not None:
        cut = torch.where(short < 1, dots / (rule.clip * rule.clip), 0.0)
        derror = torch.addcmul(wide, u, cut, value=-1).mul_(short)
    if rule.squared:
        dseen = -derror.flatten(2) if dseen is None else dseen.sub_(derror.flatten(2))
    if own is None:
        return dseen, derror.sum(2), None, along
    if short is not None:
        dots = (derror * own).sum(-1, keepdim=True)
    down = torch.addcmul(derror, own, dots, value=-1, out=room).mul_(kept["own scale"])
    return dseen, None, down.flatten(2), along


def _project_back(
    rule: SelfRule, part: Inputs, start: Tensor, kept: Kept, draw: Tensor,
    grads: tuple[Tensor, Tensor | None, Tensor], dstart: Tensor, work: Workspace,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:  # fmt: skip
    """Through the projections and the gates' read-outs to x and to the weights at the start."""
    size = part.x.shape[1]
    dlooks = draw.mT @ part.x  # [b, 2, d]
    dx = draw @ _looks(rule, part, start)
    dreadout = dlooks.clone()
    for i, name in enumerate(("eta", "alpha")):
        rows, into = _rows(rule, name, start), _rows(rule, name, dstart)
        if rows is not None and into is not None:
            look = dlooks[:, i : i + 1]
            dreadout[:, i : i + 1] = look @ rows.mT
            outer = work("matrix", *into.shape)
            into += torch.mul(part.readout[:, i : i + 1].mT, look, out=outer)
    given: list[Tensor | None] = []
    known = (kept["kv"][:, :size], kept["kv"][:, size:], kept.get("q"))
    for name, grad, y in zip(("k", "v", "q"), grads, known, strict=True):
        rows, into = _rows(rule, name, start), _rows(rule, name, dstart)
        if rows is None or into is None or grad is None or y is None:
            given.append(grad)
            continue
        graw = _unit_back_(grad, y, kept[f"scale {name}"], work)
        given.append(None if getattr(part, name) is None else graw)
        dx.baddbmm_(graw, rows)
        into += torch.bmm(graw.mT, part.x, out=work("matrix", *into.shape))
    return dx, dreadout, given


class SegmentTokens(NamedTuple):
    """A segment's tokens, and which memories start a chunk with it."""

    tokens: slice
    fresh: tuple[bool, ...]


def segments_of(rule: SelfRule, position: int, total: int) -> Iterator[SegmentTokens]:
    """Cut tokens at absolute multiples of the rule's segment."""
    done, size = 0, rule.segment
    while done < total:
        here = position + done
        step = min(size - here % size, total - done)
        yield SegmentTokens(slice(done, done + step), rule.fresh(here))
        done += step


def one_clock(rule: SelfRule, position: int) -> bool:
    """Whether all chunks of a call begin with its segments, so that starts are the weights."""
    return len(set(rule.chunks)) == 1 and position % rule.segment == 0


class SegmentResults(NamedTuple):
    """The results of all S segments. The last three are empty unless they are to be kept."""

    y: Tensor  # [b, T, d]
    stack: Tensor  # [b, N d, d]: after the last segment
    last: Tensor  # [b, N d, d]: where the chunks of the last segment start
    stacks: Tensor  # [S, b, N d, d]: the stack after each segment
    starts: Tensor  # [S, b, N d, d]: where its chunks start; empty where that is the stack
    kept: dict[str, Tensor]  # by name, [S, numbers]; a shorter segment fills the front of its row


def run_forward(
    rule: SelfRule,
    position: int,
    inputs: Inputs,
    first: Tensor,
    start: Tensor,
    home: Tensor | None,
    *,
    starts: bool,
    all_kept: bool,
) -> SegmentResults:
    """Segments from the first to the last, keeping where each starts, and all it computed."""
    b, total, d = inputs.x.shape
    stack, begun = first.reshape(b, -1, d), start.reshape(b, -1, d)
    home = None if home is None else home.reshape(b, -1, d)
    work = Workspace(stack, stack.dtype)
    segments = list(segments_of(rule, position, total))
    most = max(s.tokens.stop - s.tokens.start for s in segments)
    keep = {}
    if all_kept:
        shapes = kept_shapes(rule, b, most, d)
        keep = {n: stack.new_empty(len(segments), math.prod(s)) for n, s in shapes.items()}
    rows = _Rows(rule, keep, inputs.x, most, work)
    stacks = stack.new_empty(len(segments) if starts else 0, *stack.shape)
    begins = stack.new_empty(0) if one_clock(rule, position) else torch.empty_like(stacks)
    y = torch.empty_like(inputs.x)
    choice = None if inputs.valid is None else _last_segment(rule, position, inputs.valid)
    last = None
    for i, (tokens, fresh) in enumerate(segments):
        part = inputs.at(tokens)
        begun = _begin(fresh, stack, begun)
        kept = rows(i, part.x.shape[1])
        after = stacks[i] if starts else torch.empty_like(stack)
        memories = _memories(begun, home, work)
        _forward(rule, part, stack, begun, memories, kept, after, y[:, tokens], work)
        if begins.numel():
            begins[i] = begun
        if choice is not None:
            last = begun if last is None else torch.where(choice == i, begun, last)
        stack = after
    end = _begin(rule.fresh(position + total), stack, begun)
    if choice is not None and last is not None:
        end = torch.where(choice == len(segments), end, last)
    return SegmentResults(y, stack, end, stacks, begins, keep)


def run_backward(
    rule: SelfRule,
    position: int,
    inputs: Inputs,
    first: Tensor,
    home: Tensor | None,
    run: SegmentResults,
    dfirst: Tensor,
    dlast: Tensor,
    dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor | None]]:
    """Gradients of the weights, of the start, of home, and of the inputs up to `gates`; from the
    last segment to the first, each from what was kept of it, or computed again."""
    b, total, d = inputs.x.shape
    home = None if home is None else home.reshape(b, -1, d)
    choice = None if inputs.valid is None else _last_segment(rule, position, inputs.valid)
    dstack, dlast = dfirst.reshape(b, -1, d), dlast.reshape(b, -1, d)
    segments = list(segments_of(rule, position, total))
    chosen = _chosen(choice, len(segments), dlast)
    dstack, dbegun = _join(rule.fresh(position + total), dstack, chosen)
    given = (inputs.x, inputs.k, inputs.v, inputs.q, inputs.gates)
    rooms = [None if part is None else torch.empty_like(part) for part in given]
    dreadout, dbias = torch.zeros_like(inputs.readout), torch.zeros_like(inputs.bias)
    dhome = None if home is None else torch.zeros_like(home)
    work = Workspace(dstack, dstack.dtype)
    most = max(s.tokens.stop - s.tokens.start for s in segments)
    rows = _Rows(rule, run.kept, inputs.x, most, work)
    for i, (tokens, fresh) in reversed(list(enumerate(segments))):
        after, part, y = run.stacks[i], inputs.at(tokens), run.y[:, tokens]
        stack = run.stacks[i - 1] if i else first.reshape(b, -1, d)
        begun = stack if all(fresh) else run.starts[i]
        memories = _memories(begun, home, work)
        kept = rows(i, part.x.shape[1])
        if not run.kept:
            again, spare = work("again", *stack.shape), work("y", *y.shape)
            _forward(rule, part, stack, begun, memories, kept, again, spare, work)
        some = _backward(
            rule, part, stack, begun, memories, kept, after, y, dy[:, tokens], dstack, work
        )
        dstack = some.stack
        ended = None if choice is None else _chosen(choice, i, dlast)
        for more in (some.begun, some.start, ended):
            if more is not None and all(fresh):
                dstack += more
            elif more is not None:
                dbegun = more.clone() if dbegun is None else dbegun + more
        dstack, dbegun = _join(fresh, dstack, dbegun)
        if dhome is not None and some.start is not None:
            dhome += some.start
        dreadout += some.readout
        dbias += some.gates.sum(1)
        found = (some.x, some.k, some.v, some.q, some.gates)
        for room, grad in zip(rooms, found, strict=True):
            if room is not None and grad is not None:
                room[:, tokens] = grad
    dx, *rest = rooms
    dbegun = torch.zeros_like(dstack) if dbegun is None else dbegun
    return dstack, dbegun, dhome, [dx, dreadout, dbias, *rest]


class _Rows:
    """The tensors of a segment: rows of what is kept, or scratch that the next one overwrites."""

    def __init__(
        self, rule: SelfRule, keep: Mapping[str, Tensor], like: Tensor, most: int, work: Workspace
    ) -> None:
        self.rule, self.keep, self.most, self.work = rule, keep, most, work
        self.b, _, self.d = like.shape
        shapes = kept_shapes(rule, self.b, most, self.d)
        self.full = {name: keep[name].view(-1, *shapes[name]).unbind(0) for name in keep}

    def __call__(self, i: int, size: int) -> Kept:
        if self.keep and size == self.most:
            return {name: rows[i] for name, rows in self.full.items()}
        shapes = kept_shapes(self.rule, self.b, size, self.d)
        if not self.keep:
            return {name: self.work(f"kept {name}", *shape) for name, shape in shapes.items()}
        return {n: self.keep[n][i, : math.prod(s)].view(s) for n, s in shapes.items()}


def _mask(fresh: tuple[bool, ...], stack: Tensor) -> Tensor:
    """Rows of the memories that start a chunk, [1, N d, 1]."""
    mask = torch.tensor(fresh).repeat_interleave(stack.shape[-1]).view(1, -1, 1)
    return mask.to(stack.device, non_blocking=True)


def _begin(fresh: tuple[bool, ...], stack: Tensor, start: Tensor) -> Tensor:
    """The start of each memory's chunk: the stack's rows where a chunk begins."""
    if all(fresh):
        return stack
    return torch.where(_mask(fresh, stack), stack, start) if any(fresh) else start


def _memories(begun: Tensor, home: Tensor | None, work: Workspace) -> Tensor:
    """The memories where a chunk starts: the stack, or the trained weights plus it."""
    if home is None:
        return begun
    return torch.add(home, begun, out=work("memories", *begun.shape))


def _last_segment(rule: SelfRule, position: int, valid: Tensor) -> Tensor:
    """The segment in which each item's next token falls, [b, 1, 1]."""
    size = rule.segment
    return ((position + valid.sum(1)) // size - position // size).view(-1, 1, 1)


def _chosen(choice: Tensor | None, segment: int, grad: Tensor) -> Tensor:
    """The gradient of the items whose last chunk starts with this segment."""
    return grad if choice is None else torch.where(choice == segment, grad, 0.0)


def _join(
    fresh: tuple[bool, ...], dstack: Tensor, dbegun: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Add the gradient of a chunk's start to that of the stack, where the chunk begins."""
    if dbegun is None or not any(fresh):
        return dstack, dbegun
    if all(fresh):
        return dstack + dbegun, None
    mask = _mask(fresh, dstack)
    return dstack + torch.where(mask, dbegun, 0.0), torch.where(mask, 0.0, dbegun)
