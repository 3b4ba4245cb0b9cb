"""The self-modifying scan as one torch operator, in eager and in compiled models.

torch.compile would unroll a scan segment by segment: minutes of compiling, and more for every
segment. As an operator it is one node of the model's graph, backward pass and recomputation
included. What runs inside is the loop over segments of `function` (compiling a
segment by itself was no quicker).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from nestling.scan.self_modifying.function import (
    GIVEN,
    NOTHING,
    STARTS,
    TAPES,
    given_inputs,
    pieces,
    run_backward,
    run_forward,
)
from nestling.scan.self_modifying.kernel import forward
from nestling.scan.self_modifying.rule import Inputs, SelfRule, take
from nestling.scan.self_modifying.tape import FLAT, Desk, Piles, restore, slim

__all__ = ["scan_operator"]


def scan_operator(
    rule: SelfRule, inputs: Inputs, first: Tensor, start: Tensor, position: int, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`function.scan_matrix` without padding, as one node of a graph.

    Where tokens do not fill all segments only their start weights are kept (`recompute`).
    """
    home = None if inputs.initial is None else inputs.initial.first
    given = (first, start, home, *inputs[:GIVEN])
    derived = any(isinstance(part, Tensor) and part.requires_grad for part in given)
    ragged = position % rule.segment or inputs.x.shape[1] % rule.segment
    keep = STARTS if recompute or ragged else TAPES
    keep = keep if derived and torch.is_grad_enabled() else NOTHING
    y, after, last, *_ = _scan(rule.text, position, keep, *given)
    return y, after, last


@functools.cache
def _rule(text: str) -> SelfRule:
    return SelfRule.of(text)


@torch.library.custom_op("nestling::self_modifying", mutates_args=())
def _scan(
    rule: str,
    position: int,
    keep: int,
    first: Tensor,
    start: Tensor,
    home: Tensor | None,
    x: Tensor,
    readout: Tensor,
    bias: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    q: Tensor | None,
    gates: Tensor | None,
    erase: Tensor | None,
) -> list[Tensor]:
    """Reads, weights, starts; then what is kept of each segment, [S, ...]: the weights after it,
    where its chunks start, a slim tape."""
    how, inputs = _rule(rule), given_inputs((x, readout, bias, k, v, q, gates, erase))
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        piles = Piles(len(list(pieces(how, position, x.shape[1]))), first)
        shelf = piles if keep == TAPES else None
        run = run_forward(how, position, inputs, first, start, home, keep, shelf)
        apart = not _one_clock(how, position)
        for row, (stack, begun, *taped) in enumerate(run.kept):
            if row:
                piles.put(row - 1, "after", stack)
            if apart:
                piles.put(row, "begun", stack if begun is None else begun)
            if taped:
                for name, part in zip(FLAT, slim(how, taped), strict=True):
                    piles.put(row, name, part)
        kept: list[Tensor] = []
        if keep:
            piles.put(len(run.kept) - 1, "after", run.stack)
            kept = [piles.get(name) for name in ("after", "begun", *(FLAT if shelf else ()))]
        ends = run.stack.reshape(first.shape).clone(), run.last.reshape(start.shape).clone()
        return [run.y, *ends, *kept]


def _one_clock(rule: SelfRule, position: int) -> bool:
    """Whether all chunks of a call begin with its segments, so that starts are the weights."""
    return len(set(rule.chunks)) == 1 and position % rule.segment == 0


@_scan.register_fake
def _(
    rule: str,
    position: int,
    keep: int,
    first: Tensor,
    start: Tensor,
    home: Tensor | None,
    *given: Tensor | None,
) -> list[Tensor]:
    how, inputs = _rule(rule), given_inputs(given)
    x = inputs.x
    b, total, d = x.shape
    many = (position % how.segment + total + how.segment - 1) // how.segment
    stack = first.reshape(b, -1, d)
    kept: list[Tensor | None] = []
    if keep:
        kept = [stack, None if _one_clock(how, position) else stack]
    if keep == TAPES:  # one segment tells the shapes of all
        part = take(inputs, slice(0, how.segment))
        _, tape = forward(how, part, stack, stack, stack, Desk(how.segment, stack))
        kept += slim(how, tape.flat())
    piles = [x.new_empty(0) if p is None else p.new_empty(many, *p.shape) for p in kept]
    ends = (first.new_empty(first.shape), first.new_empty(first.shape))
    return [x.new_empty(b, total, d), *ends, *piles]


@torch.library.custom_op("nestling::self_modifying_backward", mutates_args=())
def _scan_backward(
    rule: str,
    position: int,
    dy: Tensor,
    dfirst: Tensor | None,
    dstart: Tensor | None,
    first: Tensor,
    home: Tensor | None,
    x: Tensor,
    readout: Tensor,
    bias: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    q: Tensor | None,
    gates: Tensor | None,
    erase: Tensor | None,
    y: Tensor,
    kept: list[Tensor],
) -> list[Tensor]:
    """Gradients of first, start, home and the inputs; empty where there is nothing to derive."""
    how, inputs = _rule(rule), given_inputs((x, readout, bias, k, v, q, gates, erase))
    b, total, d = x.shape
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        stacks, starts, *tapes = kept
        stack = first.reshape(b, -1, d)
        segments: list[list[Tensor | None]] = []
        for i, piece in enumerate(pieces(how, position, total)):
            begun = None if all(piece.fresh) else starts[i]
            taped: list[Tensor | None] = []
            if tapes:
                some = [pile[i] if pile.numel() else None for pile in tapes]
                part, reads = take(inputs, piece.tokens), y[:, piece.tokens]
                taped = restore(some, part, reads, _values(how, some))
            segments.append([stack, begun, *taped])
            stack = stacks[i]
        ends = [torch.zeros_like(first) if grad is None else grad for grad in (dfirst, dstart)]
        dstack, dbegun, dhome, grads = run_backward(
            how, position, inputs, home, stack, segments, dy, ends[0], ends[1]
        )
    shape = first.shape
    found = [dstack.reshape(shape), dbegun.reshape(shape)]
    found.append(x.new_empty(0) if dhome is None else dhome.reshape(shape))
    return found + [x.new_empty(0) if grad is None else grad for grad in grads]


def _values(rule: SelfRule, flat: list[Tensor | None]) -> Tensor:
    """What a segment's memories learn, [b, C, N, d], from its tape."""
    kv, own = (flat[FLAT.index(name)] for name in ("kv", "own"))
    if own is not None:
        return own
    if kv is None:
        raise AssertionError("unreachable: keys and values are on every tape")
    return kv[:, kv.shape[1] // 2 :].unsqueeze(2).expand(-1, -1, len(rule.names), -1)


@_scan_backward.register_fake
def _(
    rule: str,
    position: int,
    dy: Tensor,
    dfirst: Tensor | None,
    dstart: Tensor | None,
    first: Tensor,
    home: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    *derived, _ = rest[:GIVEN]  # (all but what is erased)
    like = (first, first, None if home is None else first, *derived, None)
    return [dy.new_empty(0) if part is None else torch.empty_like(part) for part in like]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rule, position, _, first, _, *given = inputs
    ctx.save_for_backward(first, *given, output[0], *output[3:])
    ctx.rule, ctx.position, ctx.given = rule, position, 1 + len(given)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    dy, dfirst, dstart, *_ = grads
    saved = ctx.saved_tensors  # (once: checkpointing unpacks no tensor twice)
    given, (y, *kept) = saved[: ctx.given], saved[ctx.given :]
    if dy is None:
        dy = torch.zeros_like(y)
    found = _scan_backward(ctx.rule, ctx.position, dy, dfirst, dstart, *given, y, list(kept))
    wanted = ctx.needs_input_grad[3:]
    shown = [grad if want else None for grad, want in zip(found, wanted, strict=True)]
    return (None, None, None, *shown)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "the self-modifying scan is differentiable once; second derivatives need an eager model"
        " inside nestling.scan.any_order()"
    )


_scan.register_autograd(_backward, setup_context=_setup)
_scan_backward.register_autograd(_refuse)
