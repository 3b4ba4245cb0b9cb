"""The self-modifying scan: all tokens of a call, cut into segments at absolute chunk boundaries.

Three ways to the same result. With one position for all items, a matrix memory without momentum
takes the hand-written backward (`kernel`), as one operator where tokens fill whole
segments (`op`) and under an autograd function where they do not or are padded;
everything else recomputes each segment in the backward pass. Items at different positions are
re-cut so that each item's own boundaries fall between segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nestling.objectives import dot, l2
from nestling.scan.deep.scan import scan_mlp
from nestling.scan.deep.types import MLPState
from nestling.scan.orders import is_any_order
from nestling.scan.self_modifying.deep import fits, scan_deep
from nestling.scan.self_modifying.function import scan_matrix
from nestling.scan.self_modifying.kernel import one_token
from nestling.scan.self_modifying.op import scan_operator
from nestling.scan.self_modifying.rule import Inputs, SelfRule, Weights, restart, take
from nestling.scan.self_modifying.segment import project, recall, segment

__all__ = ["project", "recall", "run", "scan_self_modifying"]


def scan_self_modifying(
    rule: SelfRule,
    inputs: Inputs,
    weights: Weights,
    start: Weights,
    position: int | Tensor,
    recompute: bool = False,
) -> tuple[Tensor, Weights, Weights]:
    """Reads [b, T, d], the running weights after the last token, and where their chunks start.

    Eq. 83-88 in the chunked form of Eq. 90. `position` is the number of tokens seen before, one for
    all items or [b]; `start` the weights at the last multiple of each memory's chunk.
    In compiled models it is one operator (`op`); what that has no form for runs
    uncompiled.
    """
    if torch.compiler.is_compiling():
        plain = weights.second is None and weights.moved is None and inputs.valid is None
        if plain and not isinstance(position, Tensor):
            y, first, begun = scan_operator(
                rule, inputs, weights.first, start.first, position, recompute
            )
            return y, Weights(first), Weights(begun)
        from nestling.scan.self_modifying.uncompiled import run_uncompiled

        result: tuple[Tensor, Weights, Weights] = run_uncompiled(
            rule, inputs, weights, start, position, recompute
        )
        return result
    return run(rule, inputs, weights, start, position, recompute)


def run(
    rule: SelfRule,
    inputs: Inputs,
    weights: Weights,
    start: Weights,
    position: int | Tensor,
    recompute: bool,
) -> tuple[Tensor, Weights, Weights]:
    """`scan_self_modifying` itself, in full precision."""
    with torch.autocast(inputs.x.device.type, enabled=False):
        return _scan(rule, inputs, weights, start, position, recompute)


def _scan(
    rule: SelfRule,
    inputs: Inputs,
    weights: Weights,
    start: Weights,
    position: int | Tensor,
    recompute: bool,
) -> tuple[Tensor, Weights, Weights]:
    if is_any_order() and not isinstance(position, Tensor):
        return _scan_together(rule, inputs, weights, start, position)
    plain = weights.second is None and weights.moved is None
    if plain and inputs.x.shape[1] == 1 and not torch.is_grad_enabled():
        return _scan_one(rule, inputs, weights, start, position)
    if plain and not isinstance(position, Tensor):
        whole = position % rule.segment == 0 == inputs.x.shape[1] % rule.segment
        scan = scan_operator if whole and inputs.valid is None else scan_matrix
        y, first, begun = scan(rule, inputs, weights.first, start.first, position, recompute)
        return y, Weights(first), Weights(begun)
    if isinstance(position, Tensor):
        return _scan_apart(rule, inputs, weights, start, position)
    known = not rule.adaptive and not rule.own_values and not rule.read_start
    known = known and inputs.initial is None and inputs.gates is None and inputs.erase is None
    if known and weights.second is not None and inputs.valid is None:
        return _scan_known(rule, inputs, weights, start, position, recompute)
    if fits(rule, inputs, weights, position):
        return scan_deep(rule, inputs, weights)
    return _scan_together(rule, inputs, weights, start, position)


def _scan_one(
    rule: SelfRule, inputs: Inputs, weights: Weights, start: Weights, position: int | Tensor
) -> tuple[Tensor, Weights, Weights]:
    """One token of matrix memories, as in generation."""

    def begin(weights: Weights, start: Weights, where: int | Tensor) -> Weights:
        if isinstance(where, Tensor):
            return restart(rule, weights, start, where)
        fresh = [where % chunk == 0 for chunk in rule.chunks]
        if not any(fresh):
            return start
        if all(fresh):
            return Weights(weights.first)
        return restart(rule, weights, start, torch.full((inputs.x.shape[0],), where))

    start = begin(weights, start, position)
    stack = weights.first.flatten(1, 2)
    begun = stack if start.first is weights.first else start.first.flatten(1, 2)
    memories = begun
    if inputs.initial is not None:
        memories = inputs.initial.first.flatten(1, 2) + begun
    y, after = one_token(rule, inputs, stack, begun, memories)
    weights = Weights(after.view_as(weights.first))
    step = 1 if inputs.valid is None else inputs.valid.sum(1)
    return y, weights, begin(weights, start, position + step)


def _scan_known(
    rule: SelfRule,
    inputs: Inputs,
    weights: Weights,
    start: Weights,
    position: int,
    recompute: bool,
) -> tuple[Tensor, Weights, Weights]:
    """Stage 1 (Eq. 76-78): nothing that goes in depends on the memory, so `scan_mlp` takes it."""
    if weights.second is None or inputs.k is None or inputs.v is None or inputs.q is None:
        raise ValueError("static projections need Inputs.k, Inputs.v and Inputs.q")
    raw = inputs.x @ inputs.readout.mT + inputs.bias.unsqueeze(1)  # [b, T, 2]
    retain = rule.retain(raw[..., 1])
    rate = retain * rule.rate_max * torch.sigmoid(raw[..., 0])
    inside = position % rule.chunk != 0
    moved = (None, None) if weights.moved is None else weights.moved
    state = MLPState(
        weights.second[:, 0],
        weights.first[:, 0],
        start.second[:, 0] if inside and start.second is not None else None,
        start.first[:, 0] if inside else None,
        None if moved[1] is None else moved[1][:, 0],
        None if moved[0] is None else moved[0][:, 0],
        position,
    )
    y, end = scan_mlp(
        state,
        inputs.k,
        inputs.v,
        rate,
        retain,
        inputs.q,
        objective=l2 if rule.objective == "l2" else dot,
        rule="dgd" if rule.erase else "gd",
        read="before",
        chunk=rule.chunk,
        clip=rule.clip,
        momentum=inputs.theta,
        recompute=recompute,
        check=False,
    )
    if y is None:
        raise AssertionError("unreachable: queries were given")
    first, second = end.w2.unsqueeze(1), end.w1.unsqueeze(1)
    running = Weights(first, second)
    if end.velocity1 is not None and end.velocity2 is not None:
        running = running._replace(moved=(end.velocity2.unsqueeze(1), end.velocity1.unsqueeze(1)))
    if end.start1 is None or end.start2 is None:
        return y, running, Weights(first, second)
    return y, running, Weights(end.start2.unsqueeze(1), end.start1.unsqueeze(1))


def _run(rule: SelfRule, part: Inputs, weights: Weights, start: Weights) -> tuple[Tensor, Weights]:
    """One segment; in training only its ends are kept and the inside is computed again."""
    if not torch.is_grad_enabled() or is_any_order():
        return segment(rule, part, weights, start)
    result: Any = checkpoint(
        segment, rule, part, weights, start, use_reentrant=False, preserve_rng_state=False
    )
    return result


def _scan_together(
    rule: SelfRule, inputs: Inputs, weights: Weights, start: Weights, position: int
) -> tuple[Tensor, Weights, Weights]:
    reads = []
    size, total = rule.segment, inputs.x.shape[1]
    where = torch.full_like(inputs.bias[:, 0], position, dtype=torch.int64)
    done = 0
    while done < total:
        step = min(size - (position + done) % size, total - done)
        part = take(inputs, slice(done, done + step))
        start = restart(rule, weights, start, where)
        y, weights = _run(rule, part, weights, start)
        reads.append(y)
        done += step
        where = where + (step if part.valid is None else part.valid.sum(1))
    return torch.cat(reads, 1), weights, restart(rule, weights, start, where)


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
        part = take(layout, slice(i * width, (i + 1) * width))
        start = restart(rule, weights, start, position)
        y, weights = _run(rule, part, weights, start)
        reads.append(y)
        position = position + (0 if part.valid is None else part.valid.sum(1))
    y = torch.cat(reads, 1)
    back = place.clamp_max(pieces * width - 1).unsqueeze(-1).expand(-1, -1, y.shape[-1])
    return y.gather(1, back), weights, restart(rule, weights, start, position)


def _lay_out(inputs: Inputs, place: Tensor, size: int) -> Inputs:
    """Move token j of item b to `place[b, j]`; what is sent to `size` is dropped."""

    def move(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        index = place if part.dim() == 2 else place.unsqueeze(-1).expand_as(part)
        room = part.new_zeros(part.shape[0], size + 1, *part.shape[2:])
        return room.scatter(1, index, part)[:, :size]

    x = move(inputs.x)
    if x is None:
        raise AssertionError("unreachable: x is a tensor")
    k, v, q, gates, theta, valid = (
        move(part)
        for part in (inputs.k, inputs.v, inputs.q, inputs.gates, inputs.theta, inputs.valid)
    )
    return inputs._replace(x=x, k=k, v=v, q=q, gates=gates, theta=theta, valid=valid)
