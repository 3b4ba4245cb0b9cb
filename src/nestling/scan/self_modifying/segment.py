"""One segment of the self-modifying scan as matrix products, in plain differentiable torch.

Everything that depends on weights is taken at `start`, the weights where each memory's chunk
starts, so only the linear recurrence of the weights runs inside the segment; it is solved as in
`nestling.scan.delta.chunk`. This form covers every option (2-layer memories, momentum,
padding, segments cut anywhere); `kernel` has the matrix memory by hand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from nestling.norm import unit
from nestling.scan.self_modifying.rule import Inputs, SelfRule, Weights, clip, whole

__all__ = ["Decay", "answer", "decays", "project", "recall", "segment"]


class Decay(NamedTuple):
    """Products of retentions in a segment; `g_t` is the product up to and with token t."""

    before: Tensor  # [..., C]: g_{t-1}
    ratio: Tensor  # [..., C, C]: g_{t-1} / g_s for s < t, else 0
    tail: Tensor  # [..., C]: g_C / g_t
    whole: Tensor  # [...]: g_C


def decays(log_retain: Tensor) -> Decay:
    """All products a segment needs, through differences of logarithms: [..., C]."""
    g = log_retain.cumsum(-1)
    before = g - log_retain
    lower = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril(-1)
    gap = (before.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~lower, -torch.inf)
    return Decay(before.exp(), gap.exp(), (g[..., -1:] - g).exp(), g[..., -1].exp())


class _Momenta(NamedTuple):
    """How pushes act on: `p_ts = sum_{s<=r<=t} (g_t/g_r)(Theta_r/Theta_s)`, and the old momentum
    through `c_t = sum_{r<=t} (g_t/g_r) Theta_r` (Theta: products of theta)."""

    before_p: Tensor  # [..., C, C]: p_{t-1,s}
    before_c: Tensor  # [..., C]: c_{t-1}
    last_p: Tensor  # [..., C]: p_{C,s}
    last_c: Tensor  # [...]: c_C
    left: Tensor  # [..., C]: Theta_C / Theta_s
    whole: Tensor  # [...]: Theta_C


def _momenta(theta: Tensor, log_retain: Tensor, valid: Tensor | None) -> _Momenta:
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
    return _Momenta(
        pad(p[..., :-1, :], (0, 0, 1, 0)),
        pad(c[..., :-1], (1, 0)),
        p[..., -1, :],
        c[..., -1],
        pushed[..., -1, :],
        started[..., -1],
    )


class _Layer(NamedTuple):
    """One layer of all memories (or of one) and what it takes in during a segment.

    `S_t = g_t S_0 + sum_s (g_t/g_s) w_s x_s^T`, and with momentum also
    `+ c_t Z_0 + sum_s p_ts pushed_s x_s^T`.
    """

    weight: Tensor  # [..., o, i]: S_0
    moved: Tensor | None  # [..., o, i]: Z_0
    x: Tensor  # [..., C, i]
    w: Tensor  # [..., C, o]
    pushed: Tensor | None  # [..., C, o]: eta u

    def only(self, slot: int) -> _Layer:
        """The same for one memory."""
        return _Layer(*(None if part is None else part[:, slot] for part in self))  # type: ignore[arg-type]


def _write(
    rule: SelfRule,
    weight: Tensor,
    moved: Tensor | None,
    pair: tuple[Tensor, Tensor],
    rate: Tensor,
    erase: Tensor | None,
    decay: Decay,
    momenta: _Momenta | None,
) -> _Layer:
    """Solve `w_t = eta_t (u_t - e S_{t-1} x_t)` for all tokens of a segment at once; e is one
    unless `erase` says less.

    With momentum the pushed rows stand apart and `w_t = -eta_t e S_{t-1} x_t`.
    """
    x, u = pair
    pushed = rate.unsqueeze(-1) * u
    if momenta is None or moved is None:
        if not rule.erase:
            return _Layer(weight, None, x, pushed, None)
        alike = x @ x.mT  # [..., C, C]
        said = decay.before.unsqueeze(-1) * (x @ weight.mT)
        right = u - (said if erase is None else erase * said)
    else:
        if not rule.erase:
            return _Layer(weight, moved, x, torch.zeros_like(pushed), pushed)
        alike = x @ x.mT
        right = -decay.before.unsqueeze(-1) * (x @ weight.mT)
        right = right - momenta.before_c.unsqueeze(-1) * (x @ moved.mT)
        right = right - (momenta.before_p * alike) @ pushed
        right = right if erase is None else erase * right
    system = rate.unsqueeze(-1) * decay.ratio * alike  # strictly lower
    system = system if erase is None else erase * system
    right = rate.unsqueeze(-1) * right
    w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return _Layer(weight, moved, x, w, None if moved is None else pushed)


def _read(layer: _Layer, q: Tensor, decay: Decay, momenta: _Momenta | None) -> Tensor:
    """`S_{t-1} q_t` for every token of the segment."""
    alike = q @ layer.x.mT
    y = decay.before.unsqueeze(-1) * (q @ layer.weight.mT) + (decay.ratio * alike) @ layer.w
    if momenta is not None and layer.moved is not None and layer.pushed is not None:
        y = y + momenta.before_c.unsqueeze(-1) * (q @ layer.moved.mT)
        y = y + (momenta.before_p * alike) @ layer.pushed
    return y


def _end(layer: _Layer, decay: Decay, momenta: _Momenta | None) -> tuple[Tensor, Tensor | None]:
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
    """What every memory says to every token: [b, 1 or N, C, d] -> [b, N, C, d] (Eq. 89, 91)."""
    z = x @ weights.first.mT
    return z if weights.second is None else x + silu(z) @ weights.second.mT


def answer(weights: Weights, slot: int, x: Tensor) -> Tensor:
    """What one memory says: [b, C, d] -> [b, C, d] (Eq. 89, 91)."""
    z = x @ weights.first[:, slot].mT
    return z if weights.second is None else x + silu(z) @ weights.second[:, slot].mT


def recall(weights: Weights, initial: Weights | None, q: Tensor) -> Tensor:
    """What the main memory is asked for, [b, C, d] (Eq. 83): its answer, but without the skip path
    where the weights are differences from `initial` (deviation 22)."""
    if initial is None or weights.second is None:
        return answer(weights, 0, q)
    return answer(whole(weights, initial), 0, q) - q


def project(rule: SelfRule, start: Weights, name: str, part: Inputs) -> Tensor:
    """k, v or q, [b, C, d]: static, from its memory, or the sum of both, normalised."""
    slot = rule.slot(name)
    static: Tensor | None = getattr(part, name)
    if slot is not None:
        own = answer(start, slot, part.x)
        return unit(own if static is None else static + own)
    if static is None:
        raise ValueError(f"{name} is no memory of this rule, so Inputs.{name} must be given")
    return static


def _gates(rule: SelfRule, start: Weights, part: Inputs) -> tuple[Tensor, Tensor]:
    """Rate and the logarithm of retention, [b, C] (deviation 7)."""
    raw = []
    for i, name in enumerate(("eta", "alpha")):
        slot = rule.slot(name)
        seen = part.x if slot is None else answer(start, slot, part.x)
        raw.append((seen @ part.readout[:, i].unsqueeze(-1)).squeeze(-1) + part.bias[:, i : i + 1])
        if part.gates is not None:
            raw[i] = raw[i] + part.gates[..., i]
    retain = rule.retain(raw[1])
    rate = retain * rule.rate_max * torch.sigmoid(raw[0])
    log_retain = retain.log()
    if part.valid is not None:
        rate = rate.masked_fill(~part.valid, 0.0)
        log_retain = log_retain.masked_fill(~part.valid, 0.0)
    return rate, log_retain


def _pairs(
    rule: SelfRule, start: Weights, begun: Weights, k: Tensor, v: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Input and clipped error of every layer of every memory, [b, N, C, .] (Eq. 86-87, 92-93);
    `begun` are the differences that `start` is the whole of."""
    k, v = k.unsqueeze(1), v.unsqueeze(1)
    many = start.first.shape[1]
    error = unit(_answers(start, v)) if rule.own_values else v.expand(-1, many, -1, -1)
    if rule.objective == "l2":
        said = _answers(begun if start.second is None else start, k)
        error = error - (said if begun is start or start.second is None else said - k)
    error = clip(error, rule.clip)
    if start.second is None:
        return [(k, error)]
    z = k @ start.first.mT
    s = torch.sigmoid(z)
    inner = clip((error @ start.second) * (s * (1 + z * (1 - s))), rule.clip)
    return [(k, inner), (clip(silu(z), 1.0), error)]


def _reads(
    layers: list[_Layer],
    initial: Weights | None,
    q: Tensor,
    decay: Decay,
    momenta: _Momenta | None,
) -> Tensor:
    """`recall` at the weights before each token."""
    y = _read(layers[0].only(0), q, decay, momenta)
    if len(layers) == 1:
        return y
    if initial is None or initial.second is None:
        return q + _read(layers[1].only(0), silu(y), decay, momenta)
    h = silu(y + q @ initial.first[:, 0].mT)
    return _read(layers[1].only(0), h, decay, momenta) + h @ initial.second[:, 0].mT


def segment(
    rule: SelfRule, part: Inputs, weights: Weights, start: Weights
) -> tuple[Tensor, Weights]:
    """Reads [b, C, d] and the weights after a segment, `weights` before it (Eq. 90, deviation 2).

    Every memory learns its own pairs `k -> vhat` layer by layer, by delta gradient descent (88).
    """
    begun, start = start, whole(start, part.initial)
    k, v = project(rule, start, "k", part), project(rule, start, "v", part)
    q = project(rule, start, "q", part)
    rate, log_retain = _gates(rule, start, part)
    decay = decays(log_retain)
    wide = Decay(*(field.unsqueeze(1) for field in decay))  # beside [b, N, ...]
    momenta = wide_momenta = None
    if weights.moved is not None:
        if part.theta is None:
            raise ValueError("weights with momentum need Inputs.theta")
        momenta = _momenta(part.theta, log_retain, part.valid)
        wide_momenta = _Momenta(*(field.unsqueeze(1) for field in momenta))
    layers = []
    weighted = [weight for weight in (weights.first, weights.second) if weight is not None]
    for i, pair in enumerate(_pairs(rule, start, begun, k, v)):
        moved = None if weights.moved is None else weights.moved[i]
        pair = (pair[0].expand(-1, pair[1].shape[1], -1, -1), pair[1])
        erase = None if part.erase is None else part.erase.view(-1, 1, 1, 1)
        wide_rate = rate.unsqueeze(1)
        layers.append(_write(rule, weighted[i], moved, pair, wide_rate, erase, wide, wide_momenta))
    if rule.read_start:
        y = recall(begun, part.initial, q)
    else:
        y = _reads(layers, part.initial, q, decay, momenta)
    ends = [_end(layer, wide, wide_momenta) for layer in layers]
    moves = tuple(moved for _, moved in ends if moved is not None)
    return y, Weights(ends[0][0], ends[1][0] if len(ends) > 1 else None, moves or None)
