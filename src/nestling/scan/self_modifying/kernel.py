"""Matrix memories in the self-modifying scan, by hand: one segment forwards and backwards.

The memories are one stack of rows, [b, N d, d], so that all of them take one product. With
`g_t` the running product of retentions, D_ts = g_{t-1} / g_s for s < t (else 0), and eta, alpha, k
shared by all memories, and e = 1 (`Inputs.erase` may say less):

    w = (I + eta e D (K K^T))^-1 eta (U - e g_{t-1} K S^T)     rows written, [C, N d]
    S' = g_C S + (g_C/g_t w)^T K                               the stack after the segment
    y = g_{t-1} Q S_mem^T + (D (Q K^T)) w_mem                  reads

Backwards, let `z_t = drhs_t . w_t`, where `drhs = (I + ...)^-T dw`. Scaling alpha_t scales
everything behind t, and eta = alpha beta, so the many gradients of D cancel and leave

    d log beta_t = z_t,     d log alpha_t = <S', dS'> + sum_{r > t} (dy_r . y_r - dU_r . U_r).

Projections, gates and self-generated values are taken at `start`, the memories where the chunk
starts. It is `begun`, the stack of that moment, or trained weights plus it (deviation 22).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nestling.scan.self_modifying.rule import RETAIN_MIN, Inputs, SelfRule
from nestling.scan.self_modifying.tape import Desk, Grads, Tape

__all__ = ["backward", "forward", "one_token"]

EPS = 1e-6


def _length(x: Tensor) -> Tensor:
    """1 / sqrt(|x|^2 + eps) along the last dimension."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(EPS).rsqrt_()


def _unit_back_(dy: Tensor, y: Tensor, scale: Tensor, desk: Desk) -> Tensor:
    """Through `y = x scale`, the normalisation of the last dimension; in the place of `dy`."""
    along = torch.mul(dy, y, out=desk.place("some", *dy.shape)).sum(-1, keepdim=True)
    return dy.addcmul_(y, along, value=-1).mul_(scale)


def _rows(rule: SelfRule, name: str, stack: Tensor) -> Tensor | None:
    """The rows of one memory in a stack: a view [b, d, d], None for a static projection."""
    slot, d = rule.slot(name), stack.shape[-1]
    return None if slot is None else stack[:, slot * d : (slot + 1) * d]


def _project(
    rule: SelfRule, part: Inputs, start: Tensor, kv: Tensor
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """k and v in `kv`, q, and the scales of those that memories make."""
    size = part.x.shape[1]
    rooms = {"k": kv[:, :size], "v": kv[:, size:]}
    scales: list[Tensor | None] = []
    q = part.q
    for name, given in (("k", part.k), ("v", part.v), ("q", part.q)):
        rows = _rows(rule, name, start)
        if rows is None:
            scales.append(None)
            if name != "q" and given is not None:
                rooms[name].copy_(given)
            continue
        raw = part.x @ rows.mT if given is None else torch.baddbmm(given, part.x, rows.mT)
        scale = _length(raw)
        scales.append(scale)
        if name == "q":
            q = raw.mul_(scale)
        else:
            torch.mul(raw, scale, out=rooms[name])
    if q is None:
        raise ValueError("q is no memory of this rule, so Inputs.q must be given")
    return q, (scales[0], scales[1], scales[2])


def _sights(rule: SelfRule, part: Inputs, start: Tensor) -> Tensor:
    """The vectors on which the gates look at x, [b, 2, d]: read-outs through M_eta, M_alpha."""
    sights = []
    for i, name in enumerate(("eta", "alpha")):
        look, rows = part.readout[:, i : i + 1], _rows(rule, name, start)
        sights.append(look if rows is None else look @ rows)
    return torch.cat(sights, 1)


def _gates(rule: SelfRule, part: Inputs, start: Tensor) -> Tensor:
    """The sigmoids behind rate and retention, [b, C, 2]."""
    raw = torch.baddbmm(part.bias.unsqueeze(1), part.x, _sights(rule, part, start).mT)
    return (raw if part.gates is None else raw.add_(part.gates)).sigmoid_()


def _errors(
    rule: SelfRule, kv: Tensor, begun: Tensor, start: Tensor, own: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Errors of all memories [b, C, N, d], and what made them, `own` values among them (which are
    written here); `K begun^T` where it was needed."""
    size, d, many = kv.shape[1] // 2, kv.shape[2], len(rule.names)
    own_scale = seen = short = None
    if own is not None:
        torch.bmm(kv[:, size:], start.mT, out=own.flatten(2))
        own_scale = _length(own)
        u = own.mul_(own_scale)
    else:
        u = kv[:, size:].unsqueeze(2).expand(-1, -1, many, -1)
    if rule.objective == "l2":
        seen = kv[:, :size] @ begun.mT
        u = u - seen.unflatten(2, (many, d))
    if rule.objective == "l2" or rule.clip < 1:
        short = torch.linalg.vector_norm(u, dim=-1, keepdim=True).clamp_min_(rule.clip)
        short = rule.clip / short
        u = u * short
    return u, own_scale, short, seen


def one_token(
    rule: SelfRule, part: Inputs, stack: Tensor, begun: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """A segment of one token without a tape: its read [b, 1, d], the stack after it (Eq. 88)."""
    b, _, d = part.x.shape
    kv = part.x.new_empty(b, 2, d)
    q, _ = _project(rule, part, start, kv)
    k = kv[:, :1]
    y = q @ (begun if rule.read_start else stack)[:, :d].mT
    sig = _gates(rule, part, start)
    retain = sig[..., 1:] * (rule.retain_max - RETAIN_MIN) + RETAIN_MIN  # [b, 1, 1]
    eta = retain * sig[..., :1] * rule.rate_max
    if part.valid is not None:
        eta = eta.masked_fill_(~part.valid.unsqueeze(-1), 0.0)
        retain = retain.masked_fill_(~part.valid.unsqueeze(-1), 1.0)
    own = kv.new_empty(b, 1, len(rule.names), d) if rule.own_values else None
    u, _, _, seen = _errors(rule, kv, begun, start, own)
    w = u.flatten(2)
    if rule.erase:
        said = k @ stack.mT if seen is None or begun is not stack else seen
        w = w - (said if part.erase is None else said * part.erase.view(-1, 1, 1))
    return y, torch.baddbmm(stack * retain, (w * eta).mT, k)


def forward(
    rule: SelfRule,
    part: Inputs,
    stack: Tensor,
    begun: Tensor,
    start: Tensor,
    desk: Desk,
) -> tuple[Tensor, Tape]:
    """The stack after a segment, and its tape (with the reads)."""
    b, size, d = part.x.shape
    lower, eye = desk.lower[:size, :size], desk.eye[:size, :size]
    rows = (b, size, stack.shape[1])
    kv = desk.keep("kv", b, 2 * size, d)
    q, scales = _project(rule, part, start, kv)
    k = kv[:, :size]
    sig = _gates(rule, part, start)
    retain = sig[..., 1] * (rule.retain_max - RETAIN_MIN) + RETAIN_MIN
    eta = retain * sig[..., 0] * rule.rate_max
    log = retain.log()
    if part.valid is not None:
        eta, log = eta.masked_fill_(~part.valid, 0.0), log.masked_fill_(~part.valid, 0.0)
    eta = eta.unsqueeze(-1)
    g = log.cumsum(-1)
    past = g - log
    gap = torch.sub(past.unsqueeze(-1), g.unsqueeze(-2), out=desk.keep("gap", b, size, size))
    gap.add_(lower).exp_()
    before, tail = past.exp_().unsqueeze(-1), (g[:, -1:] - g).exp_().unsqueeze(-1)
    whole = g[:, -1, None, None].exp()
    own = desk.keep("own", b, size, len(rule.names), d) if rule.own_values else None
    u, own_scale, short, seen = _errors(rule, kv, begun, start, own)
    flat = u.flatten(2)
    inverse = None
    if rule.erase:
        if seen is None or begun is not stack:
            seen = torch.bmm(k, stack.mT, out=desk.place("rows", *rows))
        erased, rate = (
            p if part.erase is None else p * part.erase.view(-1, 1, 1) for p in (before, eta)
        )
        right = torch.addcmul(flat, seen, erased, value=-1, out=seen).mul_(eta)
        system = torch.bmm(k, k.mT, out=desk.place("square", b, size, size)).mul_(gap).mul_(rate)
        inverse = torch.linalg.solve_triangular(
            system,
            eye.expand_as(system),
            upper=False,
            unitriangular=True,
            out=desk.keep("inverse", b, size, size),
        )
        w = torch.bmm(inverse, right, out=desk.keep("w", *rows))
    else:
        w = torch.mul(flat, eta, out=desk.keep("w", *rows))
    if rule.read_start:
        y = q @ begun[:, :d].mT
    else:
        y = (q @ stack[:, :d].mT).mul_(before)
        alike = torch.bmm(q, k.mT, out=desk.place("square", b, size, size))
        y.baddbmm_(alike.mul_(gap), w[..., :d])
    faded = torch.mul(w, tail, out=desk.place("rows", *rows))
    after = torch.mul(stack, whole, out=desk.keep("after", *stack.shape)).baddbmm_(faded.mT, k)
    return after, Tape(
        kv, scales, q, sig, eta, gap, before, tail, whole, inverse, own, own_scale, u, short, w, y
    )


def backward(
    rule: SelfRule,
    part: Inputs,
    stack: Tensor,
    begun: Tensor,
    start: Tensor,
    after: Tensor,
    tape: Tape,
    dy: Tensor,
    dafter: Tensor,
    desk: Desk,
) -> Grads:
    """All gradients of a segment from those of its reads and of the stack after it."""
    b, size, d = part.x.shape
    k = tape.kv[:, :size]
    same = begun is stack
    token, rows, square = (b, size, d), tape.w.shape, (b, size, size)
    # End of the segment and reads.
    dw = torch.bmm(k, dafter.mT, out=desk.place("dw", *rows)).mul_(tape.tail)
    faded = torch.mul(tape.w, tape.tail, out=desk.place("rows", *rows))
    dk = torch.bmm(faded, dafter, out=desk.place("dk", *token))
    dstack = desk.place("dstack", *stack.shape)
    both = torch.mul(after, dafter, out=desk.place("stack", *stack.shape))
    log = both.sum((1, 2)).unsqueeze(-1)  # <S', dS'>
    torch.mul(dafter, tape.whole, out=dstack)
    dbegun = dstack if same else desk.place("dbegun", *stack.shape).zero_()
    dstart = dbegun if start is begun else desk.place("dstart", *stack.shape).zero_()
    if rule.read_start:
        dq = dy @ begun[:, :d]
        dbegun[:, :d] += dy.mT @ tape.q
        moving = torch.zeros_like(tape.sig[..., 0])
    else:
        faded = torch.mul(dy, tape.before, out=desk.place("faded", *token))
        dstack[:, :d] += torch.bmm(faded.mT, tape.q, out=desk.place("matrix", b, d, d))
        alike = torch.bmm(tape.q, k.mT, out=desk.place("square", *square)).mul_(tape.gap)
        dw[..., :d] += torch.bmm(alike.mT, dy, out=desk.place("some", *token))
        cross = torch.bmm(dy, tape.w[..., :d].mT, out=desk.place("square", *square))
        cross.mul_(tape.gap)
        dq = torch.bmm(cross, k, out=desk.place("dq", *token)).baddbmm_(faded, stack[:, :d])
        dk.baddbmm_(cross.mT, tape.q)
        moving = torch.mul(dy, tape.y, out=desk.place("some", *token)).sum(-1)  # [b, C]
    # The triangular system.
    drhs = dw
    if tape.inverse is not None:
        drhs = torch.bmm(tape.inverse.mT, dw, out=desk.place("drhs", *rows))
    z = torch.mul(drhs, tape.w, out=desk.place("rows", *rows)).sum(-1)  # d log beta
    du = drhs.mul_(tape.eta)
    dseen = None
    if tape.inverse is not None:
        pair = torch.bmm(du, tape.w.mT, out=desk.place("square", *square)).mul_(tape.gap)
        erased = tape.before
        if part.erase is not None:
            share = part.erase.view(-1, 1, 1)
            pair, erased = pair.mul_(share), erased * share
        dk.baddbmm_(pair + pair.mT, k, alpha=-1)
        dseen = torch.mul(du, -erased, out=desk.place("dseen", *rows))
    # Errors.
    dseen_begun, dv, down, along = _errors_back(rule, tape, du, dseen if same else None, desk)
    if dseen is not None and not same:
        dk.baddbmm_(dseen, stack)
        dstack.baddbmm_(dseen.mT, k)
    if dseen_begun is not None:
        dk.baddbmm_(dseen_begun, begun)
        dbegun.baddbmm_(dseen_begun.mT, k)
    if down is not None:
        dv = torch.bmm(down, start, out=desk.place("dv", *token))
        dstart.baddbmm_(down.mT, tape.kv[:, size:])
    # Gates: d log alpha_t = <S', dS'> + sum behind t of (dy . y - dU . U).
    moving = moving - along
    dlog = log + moving.flip(-1).cumsum(-1).flip(-1) - moving
    slope = 1 - tape.sig
    dretain = dlog * (rule.retain_max - RETAIN_MIN) * tape.sig[..., 1] * slope[..., 1]
    retain = tape.sig[..., 1] * (rule.retain_max - RETAIN_MIN) + RETAIN_MIN
    draw = torch.stack([z * slope[..., 0], dretain / retain], -1)  # [b, C, 2]
    if part.valid is not None:
        draw.masked_fill_(~part.valid.unsqueeze(-1), 0.0)
    dx, dreadout, given = _project_back(rule, part, start, tape, draw, (dk, dv, dq), dstart, desk)
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
    rule: SelfRule, tape: Tape, du: Tensor, dseen: Tensor | None, desk: Desk
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """Through the errors: gradients of `K begun^T` (added to `dseen`), of v where it is shared, of
    the memories' answers to v; and `dU . U`, [b, C]."""
    wide = du.view(tape.u.shape)
    room = desk.place("rows", *du.shape).view(tape.u.shape)
    dots = torch.mul(wide, tape.u, out=room).sum(-1, keepdim=True)  # [b, C, N, 1]
    along = dots.sum((2, 3))
    derror = wide
    if tape.short is not None:
        cut = torch.where(tape.short < 1, dots / (rule.clip * rule.clip), 0.0)
        derror = torch.addcmul(wide, tape.u, cut, value=-1).mul_(tape.short)
    if rule.objective == "l2":
        dseen = -derror.flatten(2) if dseen is None else dseen.sub_(derror.flatten(2))
    if tape.own is None or tape.own_scale is None:
        return dseen, derror.sum(2), None, along
    if tape.short is not None:
        dots = (derror * tape.own).sum(-1, keepdim=True)
    down = torch.addcmul(derror, tape.own, dots, value=-1, out=room).mul_(tape.own_scale)
    return dseen, None, down.flatten(2), along


def _project_back(
    rule: SelfRule,
    part: Inputs,
    start: Tensor,
    tape: Tape,
    draw: Tensor,
    grads: tuple[Tensor, Tensor | None, Tensor],
    dstart: Tensor,
    desk: Desk,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Through the projections and the gates' read-outs to x and to the weights at the start."""
    size = part.x.shape[1]
    dsights = draw.mT @ part.x  # [b, 2, d]
    dx = draw @ _sights(rule, part, start)
    dreadout = dsights.clone()
    for i, name in enumerate(("eta", "alpha")):
        rows = _rows(rule, name, start)
        if rows is not None:
            look = dsights[:, i : i + 1]
            dreadout[:, i : i + 1] = look @ rows.mT
            into = _rows(rule, name, dstart)
            if into is not None:
                outer = desk.place("matrix", *into.shape)
                into += torch.mul(part.readout[:, i : i + 1].mT, look, out=outer)
    given: list[Tensor | None] = []
    known = (tape.kv[:, :size], tape.kv[:, size:], tape.q)
    for name, grad, y, scale in zip(("k", "v", "q"), grads, known, tape.scales, strict=True):
        rows, into = _rows(rule, name, start), _rows(rule, name, dstart)
        if rows is None or into is None or scale is None or grad is None:
            given.append(grad)
            continue
        graw = _unit_back_(grad, y, scale, desk)
        given.append(None if getattr(part, name) is None else graw)
        dx.baddbmm_(graw, rows)
        into += torch.bmm(graw.mT, part.x, out=desk.place("matrix", *into.shape))
    return dx, dreadout, given
