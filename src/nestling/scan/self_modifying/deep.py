"""Two-layer memories in the self-modifying scan: segments by the two-layer kernel's own passes.

What a segment takes from its start weights (k, v, q, gates, self-generated values) is a small
differentiable function; the learning and the reads, where the work is, go through `deep.chunk`,
forwards and backwards by hand, with the N memories of an item stacked along its batch.
Only the segments' start weights are kept; the backward pass computes each segment again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu as plain_silu

from nestling.norm import unit
from nestling.scan.deep import chunk as two
from nestling.scan.deep.types import silu
from nestling.scan.self_modifying.rule import Inputs, SelfRule, Weights, take

__all__ = ["fits", "scan_deep"]


def fits(rule: SelfRule, inputs: Inputs, weights: Weights, position: int) -> bool:
    """Whether `scan_deep` covers this: whole chunks of one size, no padding, no momentum, no
    trained weights beside the fast ones, all items alike in what they erase."""
    same = rule.chunk == rule.chunk_others and position % rule.chunk == 0
    plain = inputs.valid is None and weights.moved is None and not rule.read_start
    plain = plain and inputs.initial is None and inputs.gates is None and inputs.erase is None
    return same and plain and weights.second is not None


def scan_deep(rule: SelfRule, inputs: Inputs, weights: Weights) -> tuple[Tensor, Weights, Weights]:
    """Reads [b, T, d], the weights after the last token, and where their chunk starts (Eq. 90)."""
    if weights.second is None:
        raise ValueError("scan_deep is for 2-layer memories")
    y, first, second, first_start, second_start = _Scan.apply(
        rule, weights.first, weights.second, *inputs[:6]
    )
    return y, Weights(first, second), Weights(first_start, second_start)


class _Taken(NamedTuple):
    """What a segment takes from its start weights."""

    k: Tensor  # [b, C, d]
    q: Tensor  # [b, C, d]
    targets: Tensor  # [b, N, C, d]
    g: Tensor  # [b, C + 1]
    rated: Tensor  # [b, C + 1, C]


def _take(rule: SelfRule, part: Inputs, first: Tensor, second: Tensor) -> _Taken:
    """Projections, targets and gates of a segment (Eq. 79-81, 83-87), differentiable."""

    def answer(slot: int, x: Tensor) -> Tensor:
        return x + plain_silu(x @ first[:, slot].mT) @ second[:, slot].mT

    made: dict[str, Tensor] = {}
    for name, given in (("k", part.k), ("v", part.v), ("q", part.q)):
        slot = rule.slot(name)
        if slot is not None:
            made[name] = unit(answer(slot, part.x))
        elif given is not None:
            made[name] = given
    raw = []
    for i, name in enumerate(("eta", "alpha")):
        slot = rule.slot(name)
        seen = part.x if slot is None else answer(slot, part.x)
        raw.append((seen @ part.readout[:, i].unsqueeze(-1)).squeeze(-1) + part.bias[:, i : i + 1])
    retain = rule.retain(raw[1])
    rate = retain * rule.rate_max * torch.sigmoid(raw[0])
    values = made["v"].unsqueeze(1)
    if rule.own_values:
        targets = unit(values + plain_silu(values @ first.mT) @ second.mT)
    else:
        targets = values.expand(-1, first.shape[1], -1, -1)
    return _Taken(made["k"], made["q"], targets, *two.tables(rate, retain))


class _Pass(NamedTuple):
    """A segment's forward pass, as its backward pass wants it."""

    stack: two.Weights
    chunk: two.Chunk
    gates: two.Gates
    layer: two.FirstLayer
    writing: two.Writing
    k: Tensor  # [b N, C, F]
    reading: two.Reading
    one: tuple[two.Weights, two.Chunk, two.Gates, two.FirstLayer]


def _spread(part: Tensor, many: int) -> Tensor:
    """[b, ...] -> [b N, ...]: the same for all memories of an item."""
    return part.repeat_interleave(many, 0)


def _forward(
    how: two.How, taken: _Taken, first: Tensor, second: Tensor
) -> tuple[Tensor, two.Weights, _Pass]:
    many = first.shape[1]
    gates = two.gates(taken.g, taken.rated, False)
    layer = two.first_layer(taken.k, taken.q, gates.Lb, how.erase)
    stack = two.Weights(second.flatten(0, 1), first.flatten(0, 1))
    chunk = two.Chunk(_spread(taken.k, many), taken.targets.flatten(0, 1), None)
    wide = two.Gates(*(_spread(field, many) for field in gates))
    wide_layer = two.FirstLayer(*(f if f is None else _spread(f, many) for f in layer))
    after, writing, k = two.write(stack, chunk, wide, wide_layer, how)
    main = two.Weights(second[:, 0], first[:, 0])
    asked = two.Chunk(taken.k, taken.targets[:, 0], taken.q)
    y, reading = two.read(
        main, asked, gates, layer, writing.e1[::many], writing.e2[::many], k[::many], how
    )
    one = (main, asked, gates, layer)
    return y, after, _Pass(stack, chunk, wide, wide_layer, writing, k, reading, one)


def _backward(
    how: two.How, done: _Pass, many: int, dy: Tensor, dafter: two.Weights
) -> tuple[two.Weights, list[Tensor]]:
    """Gradients of the stack, and of k, q, targets, g and rated."""
    w, n = done.writing, many
    some, near = two.read_backward(
        dy, *done.one, done.reading, w.e1[::n], w.e2[::n], done.k[::n], how
    )

    def among(grad: Tensor) -> Tensor:
        """The main memory's gradient among all memories'."""
        room = grad.new_zeros(grad.shape[0] * n, *grad.shape[1:])
        room[::n] = grad
        return room

    add = two.Adjoint(
        two.Weights(among(near.weights.s1), among(near.weights.s2)),
        among(near.k),
        among(near.e1),
        among(near.e2),
        among(near.x),
    )
    more = two.write_backward(
        dafter, add, done.stack, done.chunk, done.gates, done.layer, w, done.k, how
    )

    def total(grad: Tensor) -> Tensor:
        return grad.unflatten(0, (-1, n)).sum(1)

    b, size = dy.shape[:2]
    dg, drated = dy.new_zeros(b, size + 1), dy.new_zeros(b, size + 1, size)
    into = two.gates(dg, drated, False)
    into.Rb.add_(some.Rb)
    into.r.add_(some.r)
    into.cb.add_(total(more.cb))
    into.gC.add_(total(more.gC))
    if more.Lb is not None and more.gp is not None:
        into.Lb.add_(total(more.Lb))
        into.gp.add_(total(more.gp))
    dtargets = more.v.unflatten(0, (-1, n))
    return more.weights, [total(more.x), some.q, dtargets, dg, drated]


class _Scan(torch.autograd.Function):
    """All segments, from a position where a chunk starts."""

    @staticmethod
    def forward(
        ctx: Any, rule: SelfRule, first: Tensor, second: Tensor, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        inputs = Inputs(*given)  # type: ignore[arg-type]
        how = two.How(rule.objective == "l2", rule.erase, rule.clip, True, silu)
        ctx.rule, ctx.how, ctx.starts = rule, how, []
        ctx.save_for_backward(*given)
        total = inputs.x.shape[1]
        y = torch.empty_like(inputs.x)
        begun = (first, second)
        for at in range(0, total, rule.chunk):
            now = slice(at, min(at + rule.chunk, total))
            begun = (first, second)
            ctx.starts.append(begun)
            taken = _take(rule, take(inputs, now), first, second)
            y[:, now], after, _ = _forward(how, taken, first, second)
            second, first = after.s1.view_as(second), after.s2.view_as(first)
        ends = total % rule.chunk == 0
        last = (first.clone(), second.clone()) if ends else tuple(part.clone() for part in begun)
        ctx.ends = ends
        return y, first, second, *last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dends: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(dy.device.type, enabled=False):
            return _scan_backward(ctx, dy, *dends)


def _scan_backward(
    ctx: Any, dy: Tensor, dfirst: Tensor, dsecond: Tensor, dfirst0: Tensor, dsecond0: Tensor
) -> tuple[Tensor | None, ...]:
    rule: SelfRule = ctx.rule
    given = ctx.saved_tensors
    inputs = Inputs(*given)
    total, many = inputs.x.shape[1], dfirst.shape[1]
    grads = [None if part is None else torch.zeros_like(part) for part in given]
    if ctx.ends:
        dfirst, dsecond = dfirst + dfirst0, dsecond + dsecond0
    last = (total - 1) // rule.chunk
    for i in range(last, -1, -1):
        now = slice(i * rule.chunk, min((i + 1) * rule.chunk, total))
        first, second = ctx.starts[i]  # stays: the graph may be used twice
        part = take(inputs, now)
        leaves = [
            None if p is None else p.detach().requires_grad_() for p in (*part[:6], first, second)
        ]
        with torch.enable_grad():
            taken = _take(rule, Inputs(*leaves[:6]), leaves[6], leaves[7])  # type: ignore[arg-type]
        _, _, done = _forward(ctx.how, _Taken(*(t.detach() for t in taken)), first, second)
        dafter = two.Weights(dsecond.flatten(0, 1), dfirst.flatten(0, 1))
        dstack, dtaken = _backward(ctx.how, done, many, dy[:, now], dafter)
        wanted = [leaf for leaf in leaves if leaf is not None]
        pairs = [(t, d) for t, d in zip(taken, dtaken, strict=True) if t.requires_grad]
        found = iter(
            torch.autograd.grad(
                [t for t, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True
            )
        )
        through = [None if leaf is None else next(found) for leaf in leaves]
        dfirst, dsecond = dstack.s2.view_as(first), dstack.s1.view_as(second)
        dfirst = dfirst if through[6] is None else dfirst + through[6]
        dsecond = dsecond if through[7] is None else dsecond + through[7]
        if i == last and not ctx.ends:
            dfirst, dsecond = dfirst + dfirst0, dsecond + dsecond0
        for slot, grad in enumerate(through[:6]):
            room = grads[slot]
            if room is None or grad is None:
                continue
            if slot in (1, 2):  # read-outs and biases serve all segments
                room += grad
            else:
                room[:, now] = grad
    return None, dfirst, dsecond, *grads
