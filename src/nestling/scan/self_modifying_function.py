"""All segments of matrix memories under one autograd function with the backward pass by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestling.scan.self_modifying_matrix import backward, forward
from nestling.scan.self_modifying_tape import TAPE, Tape, shapes
from nestling.scan.self_modifying_types import Inputs, SelfRule, take

__all__ = ["scan_matrix"]


GIVEN = Inputs._fields.index("theta")
"""How many fields of `Inputs` the function takes as tensors: those before theta."""


class Piece(NamedTuple):
    """A segment's tokens, and which memories start a chunk with it."""

    tokens: slice
    fresh: tuple[bool, ...]


def pieces(rule: SelfRule, position: int, total: int) -> Iterator[Piece]:
    """Cut tokens at absolute multiples of the rule's segment."""
    done, size = 0, rule.segment
    while done < total:
        here = position + done
        step = min(size - here % size, total - done)
        yield Piece(slice(done, done + step), tuple(here % chunk == 0 for chunk in rule.chunks))
        done += step


def scan_matrix(
    rule: SelfRule, inputs: Inputs, first: Tensor, start: Tensor, position: int, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Reads [b, T, d] and both weights [b, N, d, d] after the last token, for one position.

    Padding (`inputs.valid`) must stand behind each item's tokens; the start returned is that of the
    item's own last chunk.
    """
    home = None if inputs.initial is None else inputs.initial.first
    return _Scan.apply(rule, position, recompute, inputs.valid, first, start, home, *inputs[:GIVEN])


def _fresh(rule: SelfRule, flags: tuple[bool, ...], stack: Tensor, start: Tensor) -> Tensor:
    """The start of each memory's chunk: the stack's rows where a chunk begins."""
    if all(flags):
        return stack
    if not any(flags):
        return start
    mask = torch.tensor(flags, device=stack.device).repeat_interleave(stack.shape[-1])
    return torch.where(mask.view(1, -1, 1), stack, start)


class _Scan(torch.autograd.Function):
    """Forward keeps each segment's start weights (and its tape unless `recompute`), all by
    `save_for_backward`, so that activation checkpointing and offloading can take them away."""

    @staticmethod
    def forward(
        ctx: Any,
        rule: SelfRule,
        position: int,
        recompute: bool,
        valid: Tensor | None,
        first: Tensor,
        start: Tensor,
        home: Tensor | None,
        *given: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = _inputs(given, valid)
        b, total, d = inputs.x.shape
        stack, begun = first.reshape(b, -1, d), start.reshape(b, -1, d)
        home = None if home is None else home.reshape(b, -1, d)
        keep = any(ctx.needs_input_grad)
        constants = shapes(rule.segment, stack)
        y = inputs.x.new_empty(b, total, d)
        kept: list[Tensor | None] = []
        starts: list[Tensor] = []
        for piece in pieces(rule, position, total):
            begun = _fresh(rule, piece.fresh, stack, begun)
            part = take(inputs, piece.tokens)
            after, tape = forward(rule, part, stack, begun, _whole(begun, home), constants)
            y[:, piece.tokens] = tape.y
            if keep:
                same = begun is stack
                kept += (stack, None if same else begun, *([] if recompute else tape.flat()))
            starts.append(begun)
            stack = after
        ends = tuple((position + total) % chunk == 0 for chunk in rule.chunks)
        last = _fresh(rule, ends, stack, begun)
        ctx.choice = None
        if valid is not None:
            ctx.choice = _last_segment(rule, position, valid)
            last = last.clone()
            for i, begun in enumerate(starts):
                torch.where((ctx.choice == i).view(-1, 1, 1), begun, last, out=last)
        ctx.rule, ctx.position, ctx.recompute, ctx.ends = rule, position, recompute, ends
        ctx.save_for_backward(valid, stack, home, *given, *kept)
        return y, stack.view_as(first), last.reshape(start.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dfirst: Tensor, dstart: Tensor) -> tuple[Any, ...]:
        with torch.autocast(dy.device.type, enabled=False):
            return _scan_backward(ctx, dy, dfirst, dstart)


def _scan_backward(ctx: Any, dy: Tensor, dfirst: Tensor, dstart: Tensor) -> tuple[Any, ...]:
    """Segments from the last to the first, each by its hand-written backward."""
    rule: SelfRule = ctx.rule
    valid, after, home, *rest = ctx.saved_tensors
    given, kept = rest[:GIVEN], rest[GIVEN:]
    each = 2 if ctx.recompute else 2 + TAPE
    inputs = _inputs(given, valid)
    b, total, d = inputs.x.shape
    dstack, dlast = dfirst.reshape(b, -1, d), dstart.reshape(b, -1, d)
    cuts = list(pieces(rule, ctx.position, total))
    dstack, dbegun = _join(ctx.ends, dstack, _chosen(ctx.choice, len(cuts), dlast))
    grads = [None if part is None else torch.empty_like(part) for part in given]
    dreadout, dbias = torch.zeros_like(inputs.readout), torch.zeros_like(inputs.bias)
    grads[1], grads[2] = dreadout, dbias
    dhome = None if home is None else torch.zeros_like(home)
    constants = shapes(rule.segment, after)
    for i, piece in reversed(list(enumerate(cuts))):
        stack, begun, *taped = kept[i * each : (i + 1) * each]
        begun = stack if begun is None else begun
        part = take(inputs, piece.tokens)
        memories = _whole(begun, home)
        if taped:
            tape = Tape.of(taped)
        else:
            _, tape = forward(rule, part, stack, begun, memories, constants)
        dpart = dy[:, piece.tokens]
        some = backward(rule, part, stack, begun, memories, after, tape, dpart, dstack)
        dstack = some.stack
        ended = None if ctx.choice is None else _chosen(ctx.choice, i, dlast)
        for more in (some.begun, some.start, ended):
            if more is not None:
                dbegun = more if dbegun is None else dbegun + more
        dstack, dbegun = _join(piece.fresh, dstack, dbegun)
        if dhome is not None and some.start is not None:
            dhome += some.start
        dreadout += some.readout
        dbias += some.gates.sum(1)
        tokenwise = (some.x, None, None, some.k, some.v, some.q, some.gates)
        for slot, grad in enumerate(tokenwise):
            room = grads[slot]
            if room is not None and grad is not None:
                room[:, piece.tokens] = grad
        after = stack
    n = len(rule.names)
    shape = (b, n, d, d)
    if dbegun is None:
        dbegun = torch.zeros_like(dstack)
    dhome = None if dhome is None else dhome.view(shape)
    return None, None, None, None, dstack.view(shape), dbegun.view(shape), dhome, *grads


def _whole(begun: Tensor, home: Tensor | None) -> Tensor:
    """The memories where a chunk starts: the stack, or the trained weights plus it."""
    return begun if home is None else home + begun


def _last_segment(rule: SelfRule, position: int, valid: Tensor) -> Tensor:
    """The segment in which each item's next token falls, [b]."""
    size = rule.segment
    return (position + valid.sum(1)) // size - position // size


def _chosen(choice: Tensor | None, segment: int, grad: Tensor) -> Tensor:
    """The gradient of the items whose last chunk starts with this segment."""
    return grad if choice is None else torch.where((choice == segment).view(-1, 1, 1), grad, 0.0)


def _inputs(given: Any, valid: Tensor | None) -> Inputs:
    x, readout, bias, k, v, q, gates = given
    return Inputs(x, readout, bias, k, v, q, gates, valid=valid)


def _join(
    fresh: tuple[bool, ...], dstack: Tensor, dbegun: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Where a chunk begins its start is the running stack: gradients of the start flow there."""
    if dbegun is None or not any(fresh):
        return dstack, dbegun
    if all(fresh):
        return dstack + dbegun, None
    d = dstack.shape[-1]
    mask = torch.tensor(fresh, device=dstack.device).repeat_interleave(d).view(1, -1, 1)
    return dstack + torch.where(mask, dbegun, 0.0), torch.where(mask, 0.0, dbegun)
