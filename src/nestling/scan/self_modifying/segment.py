"""The self-modifying scan as matrix products, segment by segment, in plain differentiable torch.

Everything that depends on weights is taken at `start`, the weights where each memory's chunk
starts, so only the linear recurrence of the weights runs inside a segment; it is solved as in
`nestling.scan.delta.chunk`. This form covers every option (2-layer memories, momentum, padding,
items at different positions) and derivatives of any order; `kernel` has matrix memories by hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu
from torch.utils.checkpoint import checkpoint

from nestling.norm import unit
from nestling.scan.backends import is_any_order
from nestling.scan.deep.stack import learn_chunk
from nestling.scan.self_modifying.rule import Inputs, SelfRule, Weights, clip, with_initial

__all__ = ["project", "recall", "scan_segments"]


class Decay(NamedTuple):
    """Products of retentions in a segment; `g_t` is the product up to and with token t."""

    before: Tensor  # [..., C]: g_{t-1}
    ratio: Tensor  # [..., C, C]: g_{t-1} / g_s for s < t, else 0
    tail: Tensor  # [..., C]: g_C / g_t
    whole: Tensor  # [...]: g_C


def _decays(log_retain: Tensor) -> Decay:
    """All products a segment needs, through differences of logarithms: [..., C]."""
    g = log_retain.cumsum(-1)
    before = g - log_retain
    lower = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril(-1)
    gap = (before.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~lower, -torch.inf)
    return Decay(before.exp(), gap.exp(), (g[..., -1:] - g).exp(), g[..., -1].exp())


class Momenta(NamedTuple):
    """How pushes act on: `p_ts = sum_{s<=r<=t} (g_t/g_r)(Theta_r/Theta_s)`, and the old momentum
    through `c_t = sum_{r<=t} (g_t/g_r) Theta_r` (Theta: products of theta)."""

    before_p: Tensor  # [..., C, C]: p_{t-1,s}
    before_c: Tensor  # [..., C]: c_{t-1}
    last_p: Tensor  # [..., C]: p_{C,s}
    last_c: Tensor  # [...]: c_C
    left: Tensor  # [..., C]: Theta_C / Theta_s
    whole: Tensor  # [...]: Theta_C


def _momenta(theta: Tensor, log_retain: Tensor, valid: Tensor | None) -> Momenta:
    log_theta = theta.clamp_min(1e-30).log()
    if valid is not None:
        log_theta = log_theta.masked_fill(~valid, 0.0)
    size = log_theta.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=log_theta.device).tril()

    def ratios(log: Tensor) -> Tensor:
        total = log.cumsum(-1)
        gap = total.unsqueeze(-1) - total.unsqueeze(-2)
        return gap.masked_fill(~lower, -torch.inf).exp()

    kept, pushed = ratios(log_retain), ratios(log_theta)
    if valid is not None:
        kept = kept * valid.unsqueeze(-2)
    started = log_theta.cumsum(-1).exp()
    p, c = kept @ pushed, (kept @ started.unsqueeze(-1)).squeeze(-1)
    return Momenta(
        pad(p[..., :-1, :], (0, 0, 1, 0)),
        pad(c[..., :-1], (1, 0)),
        p[..., -1, :],
        c[..., -1],
        pushed[..., -1, :],
        started[..., -1],
    )


class Layer(NamedTuple):
    """One layer of all memories (or of one) and what it takes in during a segment.

    `S_t = g_t S_0 + sum_s (g_t/g_s) w_s x_s^T`, and with momentum also
    `+ c_t Z_0 + sum_s p_ts pushed_s x_s^T`.
    """

    weight: Tensor  # [..., o, i]: S_0
    moved: Tensor | None  # [..., o, i]: Z_0
    x: Tensor  # [..., C, i]
    w: Tensor  # [..., C, o]
    pushed: Tensor | None  # [..., C, o]: eta u

    def only(self, slot: int) -> Layer:
        """The same for one memory."""
        return Layer(*(None if part is None else part[:, slot] for part in self))  # type: ignore[arg-type]


def _write(
    rule: SelfRule,
    weight: Tensor,
    moved: Tensor | None,
    pair: tuple[Tensor, Tensor],
    rate: Tensor,
    erase: Tensor | None,
    decay: Decay,
    momenta: Momenta | None,
) -> Layer:
    """Solve `w_t = eta_t (u_t - e S_{t-1} x_t)` for all tokens of a segment at once; e is one
    unless `erase` says less.

    With momentum the pushed rows stand apart and `w_t = -eta_t e S_{t-1} x_t`.
    """
    x, u = pair
    pushed = rate.unsqueeze(-1) * u
    apart = None if momenta is None or moved is None else pushed
    if not rule.erase:
        return Layer(weight, moved, x, pushed if apart is None else torch.zeros_like(u), apart)
    alike = x @ x.mT  # [..., C, C]
    right = -decay.before.unsqueeze(-1) * (x @ weight.mT)
    if momenta is not None and moved is not None:
        right = right - momenta.before_c.unsqueeze(-1) * (x @ moved.mT)
        right = right - (momenta.before_p * alike) @ pushed
    right = right if erase is None else erase * right
    right = rate.unsqueeze(-1) * (right if apart is not None else u + right)
    system = rate.unsqueeze(-1) * decay.ratio * alike  # strictly lower
    system = system if erase is None else erase * system
    w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return Layer(weight, moved, x, w, apart)


def _read(layer: Layer, q: Tensor, decay: Decay, momenta: Momenta | None) -> Tensor:
    """`S_{t-1} q_t` for every token of the segment."""
    alike = q @ layer.x.mT
    y = decay.before.unsqueeze(-1) * (q @ layer.weight.mT) + (decay.ratio * alike) @ layer.w
    if momenta is not None and layer.moved is not None and layer.pushed is not None:
        y = y + momenta.before_c.unsqueeze(-1) * (q @ layer.moved.mT)
        y = y + (momenta.before_p * alike) @ layer.pushed
    return y


def _end(layer: Layer, decay: Decay, momenta: Momenta | None) -> tuple[Tensor, Tensor | None]:
    """The weight and the momentum after the segment."""
    after = decay.whole[..., None, None] * layer.weight
    rows = decay.tail.unsqueeze(-1) * layer.w
    moved = layer.moved
    if momenta is not None and moved is not None and layer.pushed is not None:
        rows = rows + momenta.last_p.unsqueeze(-1) * layer.pushed
        after = after + momenta.last_c[..., None, None] * moved
        pushed = momenta.left.unsqueeze(-1) * layer.pushed
        moved = momenta.whole[..., None, None] * moved + pushed.mT @ layer.x
    after = after + rows.mT @ layer.x
    return after, moved


def _answers(weights: Weights, x: Tensor) -> Tensor:
    """Ask every memory about every token: [b, 1 or N, C, d] -> [b, N, C, d] (Eq. 89, 91)."""
    z = x @ weights.first.mT
    return z if weights.second is None else x + silu(z) @ weights.second.mT


def _answer(weights: Weights, slot: int, x: Tensor) -> Tensor:
    """Ask one memory: [b, C, d] -> [b, C, d] (Eq. 89, 91)."""
    z = x @ weights.first[:, slot].mT
    return z if weights.second is None else x + silu(z) @ weights.second[:, slot].mT


def recall(weights: Weights, initial: Weights | None, q: Tensor) -> Tensor:
    """Read the main memory, [b, C, d] (Eq. 83): its answer, but without the skip path
    where the weights are differences from `initial` (deviation 22)."""
    if initial is None or weights.second is None:
        return _answer(weights, 0, q)
    return _answer(with_initial(weights, initial), 0, q) - q


def project(rule: SelfRule, start: Weights, name: str, part: Inputs) -> Tensor:
    """k, v or q, [b, C, d]: static, from its memory, or the sum of both, normalised."""
    slot = rule.slot(name)
    static: Tensor | None = getattr(part, name)
    if slot is not None:
        own = _answer(start, slot, part.x)
        return unit(own if static is None else static + own)
    if static is None:
        raise ValueError(f"{name} is no memory of this rule, so Inputs.{name} must be given")
    return static


def _gates(rule: SelfRule, start: Weights, part: Inputs) -> tuple[Tensor, Tensor]:
    """Rate and the logarithm of retention, [b, C] (deviation 7)."""
    raw = []
    for i, name in enumerate(("eta", "alpha")):
        slot = rule.slot(name)
        seen = part.x if slot is None else _answer(start, slot, part.x)
        raw.append(seen @ part.readout[:, i].unsqueeze(-1))
    both = torch.cat(raw, -1) + part.bias.unsqueeze(1)
    gates = rule.gates(both if part.gates is None else both + part.gates, part.valid)
    return gates.rate, gates.log_retain


def _targets(rule: SelfRule, start: Weights, v: Tensor) -> Tensor:
    """The values all memories learn, [b, N, C, d]: their own (Eq. 87), or v for all (Eq. 81)."""
    v = v.unsqueeze(1)
    if rule.own_values:
        return unit(_answers(start, v))
    return v.expand(-1, start.first.shape[1], -1, -1)


def _pairs(
    rule: SelfRule, start: Weights, begun: Weights, k: Tensor, v: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Input and clipped error of every layer of every memory, [b, N, C, .] (Eq. 86-87, 92-93);
    `begun` are the differences that `start` is the whole of."""
    error, k = _targets(rule, start, v), k.unsqueeze(1)
    if rule.squared:
        said = _answers(begun if start.second is None else start, k)
        error = error - (said if begun is start or start.second is None else said - k)
    error = clip(error, rule.clip)
    wide = k.expand(-1, error.shape[1], -1, -1)
    if start.second is None:
        return [(wide, error)]
    z = k @ start.first.mT
    s = torch.sigmoid(z)
    inner = clip((error @ start.second) * (s * (1 + z * (1 - s))), rule.clip)
    return [(wide, inner), (clip(silu(z), 1.0), error)]


def _reads(
    layers: list[Layer],
    initial: Weights | None,
    q: Tensor,
    decay: Decay,
    momenta: Momenta | None,
) -> Tensor:
    """`recall` at the weights before each token."""
    y = _read(layers[0].only(0), q, decay, momenta)
    if len(layers) == 1:
        return y
    if initial is None or initial.second is None:
        return q + _read(layers[1].only(0), silu(y), decay, momenta)
    h = silu(y + q @ initial.first[:, 0].mT)
    return _read(layers[1].only(0), h, decay, momenta) + h @ initial.second[:, 0].mT


def _segment(
    rule: SelfRule, part: Inputs, weights: Weights, start: Weights, by_hand: bool
) -> tuple[Tensor, Weights]:
    """Reads [b, C, d] and the weights after a segment, `weights` before it (Eq. 90, deviation 2).

    Every memory learns its own pairs `k -> vhat` layer by layer, by delta gradient descent (88).
    """
    begun, start = start, with_initial(start, part.initial)
    k, v, q = (project(rule, start, name, part) for name in ("k", "v", "q"))
    rate, log_retain = _gates(rule, start, part)
    if by_hand and weights.second is not None:
        targets = _targets(rule, start, v)
        y, second, first = learn_chunk(
            weights.second, weights.first, k, q, targets, rate, log_retain.exp(),
            squared=rule.squared, erase=rule.erase, clip=rule.clip,
        )  # fmt: skip
        return y, Weights(first, second)
    decay = _decays(log_retain)
    wide = Decay(*(field.unsqueeze(1) for field in decay))  # beside [b, N, ...]
    momenta = wide_momenta = None
    if weights.moved is not None:
        if part.theta is None:
            raise ValueError("weights with momentum need Inputs.theta")
        momenta = _momenta(part.theta, log_retain, part.valid)
        wide_momenta = Momenta(*(field.unsqueeze(1) for field in momenta))
    erase = None if part.erase is None else part.erase.view(-1, 1, 1, 1)
    weighted = [weight for weight in (weights.first, weights.second) if weight is not None]
    moving = (None, None) if weights.moved is None else weights.moved
    layers = [
        _write(rule, weight, moved, pair, rate.unsqueeze(1), erase, wide, wide_momenta)
        for weight, moved, pair in zip(
            weighted, moving, _pairs(rule, start, begun, k, v), strict=False
        )
    ]
    if rule.read_start:
        y = recall(begun, part.initial, q)
    else:
        y = _reads(layers, part.initial, q, decay, momenta)
    ends = [_end(layer, wide, wide_momenta) for layer in layers]
    moves = tuple(moved for _, moved in ends if moved is not None)
    return y, Weights(ends[0][0], ends[1][0] if len(ends) > 1 else None, moves or None)


def _run(
    rule: SelfRule, part: Inputs, weights: Weights, start: Weights, fresh: bool
) -> tuple[Tensor, Weights]:
    """One segment; in training only its ends are kept and the inside is computed again.

    Two-layer memories have a backward pass by hand where a segment starts all chunks (`fresh`).
    """
    plain = part.valid is None and weights.moved is None and not rule.read_start
    plain = plain and part.initial is None and part.erase is None and not is_any_order()
    if not torch.is_grad_enabled() or is_any_order():
        return _segment(rule, part, weights, start, fresh and plain)
    result: Any = checkpoint(
        _segment, rule, part, weights, start, fresh and plain,
        use_reentrant=False, preserve_rng_state=False,
    )  # fmt: skip
    return result


def scan_segments(
    rule: SelfRule, inputs: Inputs, weights: Weights, start: Weights, position: int | Tensor
) -> tuple[Tensor, Weights, Weights]:
    """Reads [b, T, d], the weights after the last token, and where their chunks start (Eq. 90)."""
    if isinstance(position, Tensor):
        return _scan_apart(rule, inputs, weights, start, position)
    reads = []
    total, done = inputs.x.shape[1], 0
    where: int | Tensor = position
    while done < total:
        step = min(rule.segment - (position + done) % rule.segment, total - done)
        part = inputs.at(slice(done, done + step))
        start = rule.begin(weights, start, where)
        fresh = all(rule.fresh(position + done))
        y, weights = _run(rule, part, weights, start, fresh)
        reads.append(y)
        done += step
        where = where + (step if part.valid is None else part.valid.sum(1))
    return torch.cat(reads, 1), weights, rule.begin(weights, start, where)


def _scan_apart(
    rule: SelfRule, inputs: Inputs, weights: Weights, start: Weights, position: Tensor
) -> tuple[Tensor, Weights, Weights]:
    """Items at different positions: token j of item b goes to the segment of its own chunk."""
    b, total, _ = inputs.x.shape
    size = rule.segment
    valid = inputs.valid
    if valid is None:
        valid = inputs.x.new_ones(b, total, dtype=torch.bool)
    count = valid.sum(1)
    offset = position % size
    pieces = int((offset + count - 1).div(size, rounding_mode="floor").max()) + 1
    width = size if pieces > 1 else int(count.max())
    spread = offset.unsqueeze(1) + torch.arange(total, device=position.device)
    # Inside a segment tokens stand at the front; only the first segment may begin in mid-chunk.
    first = spread < size
    place = torch.where(first, spread - offset.unsqueeze(1), spread)  # [b, T] in the cut layout
    place = torch.where(first, place, (spread // size) * width + spread % size)
    place = place.masked_fill(~valid, pieces * width)  # padding goes behind the end
    layout = _lay_out(inputs._replace(valid=valid), place, pieces * width)
    reads = []
    for i in range(pieces):
        part = layout.at(slice(i * width, (i + 1) * width))
        start = rule.begin(weights, start, position)
        y, weights = _run(rule, part, weights, start, fresh=False)
        reads.append(y)
        position = position + (0 if part.valid is None else part.valid.sum(1))
    y = torch.cat(reads, 1)
    back = place.clamp_max(pieces * width - 1).unsqueeze(-1).expand(-1, -1, y.shape[-1])
    return y.gather(1, back), weights, rule.begin(weights, start, position)


def _lay_out(inputs: Inputs, place: Tensor, size: int) -> Inputs:
    """Move token j of item b to `place[b, j]`; what is sent to `size` is dropped."""

    def move(part: Any) -> Any:
        if part is None:
            return None
        index = place if part.dim() == 2 else place.unsqueeze(-1).expand_as(part)
        room = part.new_zeros(part.shape[0], size + 1, *part.shape[2:])
        return room.scatter(1, index, part)[:, :size]

    names = ("x", "k", "v", "q", "gates", "theta", "valid")
    return inputs._replace(**{name: move(getattr(inputs, name)) for name in names})
