"""All segments of matrix memories under one autograd function with the backward pass by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestling.scan.self_modifying.kernel import backward, forward
from nestling.scan.self_modifying.rule import Inputs, SelfRule, take
from nestling.scan.self_modifying.tape import FLAT, Desk, Shelf, Tape

__all__ = [
    "GIVEN",
    "NOTHING",
    "STARTS",
    "TAPES",
    "Run",
    "given_inputs",
    "pieces",
    "run_backward",
    "run_forward",
    "scan_matrix",
]


GIVEN = Inputs._fields.index("theta")
"""How many fields of `Inputs` the function takes as tensors: those before theta."""

NOTHING, STARTS, TAPES = range(3)
"""What is kept of a segment for the backward pass: its start weights, also all it computed."""


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


class Run(NamedTuple):
    """What all segments give: reads, the stack after the last one, where its chunks start, and for
    every segment its stack, its start (None where that is the stack) and its flat tape."""

    y: Tensor  # [b, T, d]
    stack: Tensor  # [b, N d, d]
    last: Tensor  # [b, N d, d]
    kept: list[list[Tensor | None]]


def run_forward(
    rule: SelfRule,
    position: int,
    inputs: Inputs,
    first: Tensor,
    start: Tensor,
    home: Tensor | None,
    keep: int,
    shelf: Shelf | None = None,
) -> Run:
    """Segments from the first to the last; `keep` says how much of each: NOTHING, STARTS, TAPES."""
    b, total, d = inputs.x.shape
    stack, begun = first.reshape(b, -1, d), start.reshape(b, -1, d)
    home = None if home is None else home.reshape(b, -1, d)
    if keep == TAPES and shelf is None:
        shelf = _fresh_tensors(stack)
    desk = Desk(rule.segment, stack, shelf)
    y = inputs.x.new_empty(b, total, d)
    kept: list[list[Tensor | None]] = []
    starts: list[Tensor] = []
    for piece in pieces(rule, position, total):
        begun = _fresh(rule, piece.fresh, stack, begun)
        part = take(inputs, piece.tokens)
        after, tape = forward(rule, part, stack, begun, _whole(begun, home, desk), desk)
        y[:, piece.tokens] = tape.y
        if keep:
            taped = tape.flat() if keep == TAPES else []
            kept.append([stack, None if begun is stack else begun, *taped])
        if inputs.valid is not None:
            starts.append(begun)
        stack = after
    last = _fresh(rule, _ends(rule, position, total), stack, begun)
    if inputs.valid is not None:
        choice = _last_segment(rule, position, inputs.valid)
        last = last.clone()
        for i, begun in enumerate(starts):
            torch.where((choice == i).view(-1, 1, 1), begun, last, out=last)
    return Run(y, stack, last, kept)


def run_backward(
    rule: SelfRule,
    position: int,
    inputs: Inputs,
    home: Tensor | None,
    after: Tensor,
    kept: list[list[Any]],
    dy: Tensor,
    dstack: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor | None]]:
    """Gradients of the stack, of the start, of home, and of the first `GIVEN` inputs; segments from
    the last, `after` which the stack was as given, to the first, with what was `kept` of each."""
    b, total, d = inputs.x.shape
    home = None if home is None else home.reshape(b, -1, d)
    choice = None if inputs.valid is None else _last_segment(rule, position, inputs.valid)
    dstack, dlast = dstack.reshape(b, -1, d), dlast.reshape(b, -1, d)
    cuts = list(pieces(rule, position, total))
    ends = _ends(rule, position, total)
    dstack, dbegun = _join(ends, dstack, _chosen(choice, len(cuts), dlast))
    tokenwise = (inputs.x, None, None, inputs.k, inputs.v, inputs.q, inputs.gates, None)
    grads = [None if part is None else torch.empty_like(part) for part in tokenwise]
    dreadout, dbias = torch.zeros_like(inputs.readout), torch.zeros_like(inputs.bias)
    dhome = None if home is None else torch.zeros_like(home)
    desk = Desk(rule.segment, dstack)
    for i, piece in reversed(list(enumerate(cuts))):
        stack, begun, *taped = kept[i]
        begun = stack if begun is None else begun
        part = take(inputs, piece.tokens)
        memories = _whole(begun, home, desk)
        if taped:
            tape = Tape.of(taped)
        else:
            _, tape = forward(rule, part, stack, begun, memories, desk)
        dpart = dy[:, piece.tokens]
        some = backward(rule, part, stack, begun, memories, after, tape, dpart, dstack, desk)
        dstack = some.stack
        ended = None if choice is None else _chosen(choice, i, dlast)
        for more in (some.begun, some.start, ended):
            if more is not None and all(piece.fresh):
                dstack += more
            elif more is not None:
                dbegun = more.clone() if dbegun is None else dbegun + more
        dstack, dbegun = _join(piece.fresh, dstack, dbegun)
        if dhome is not None and some.start is not None:
            dhome += some.start
        dreadout += some.readout
        dbias += some.gates.sum(1)
        found = (some.x, None, None, some.k, some.v, some.q, some.gates, None)
        for room, grad in zip(grads, found, strict=True):
            if room is not None and grad is not None:
                room[:, piece.tokens] = grad
        after = stack
    grads[1], grads[2] = dreadout, dbias
    return dstack, torch.zeros_like(dstack) if dbegun is None else dbegun, dhome, grads


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
        keep = NOTHING if not any(ctx.needs_input_grad) else STARTS if recompute else TAPES
        run = run_forward(rule, position, given_inputs(given, valid), first, start, home, keep)
        ctx.rule, ctx.position, ctx.each = rule, position, 2 + len(FLAT) * (keep == TAPES)
        kept = [part for segment in run.kept for part in segment]
        ctx.save_for_backward(valid, run.stack, home, *given, *kept)
        return run.y, run.stack.view_as(first), run.last.reshape(start.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dfirst: Tensor, dstart: Tensor) -> tuple[Any, ...]:
        valid, stack, home, *rest = ctx.saved_tensors
        flat, each = rest[GIVEN:], ctx.each
        kept = [flat[i : i + each] for i in range(0, len(flat), each)]
        with torch.autocast(dy.device.type, enabled=False):
            dstack, dbegun, dhome, grads = run_backward(
                ctx.rule, ctx.position, given_inputs(rest[:GIVEN], valid), home,
                stack, kept, dy, dfirst, dstart,
            )  # fmt: skip
        shape = dfirst.shape
        dhome = None if dhome is None else dhome.view(shape)
        return None, None, None, None, dstack.view(shape), dbegun.view(shape), dhome, *grads


def given_inputs(given: Sequence[Tensor | None], valid: Tensor | None = None) -> Inputs:
    """The inputs of the scan from the tensors an operator takes."""
    x, readout, bias, k, v, q, gates, erase = given
    if x is None or readout is None or bias is None:
        raise AssertionError("unreachable: x, readout and bias are tensors")
    return Inputs(x, readout, bias, k, v, q, gates, erase, valid=valid)


def _fresh_tensors(like: Tensor) -> Shelf:
    """A shelf with a new tensor for everything."""

    def shelf(_: str, *shape: int) -> Tensor:
        return like.new_empty(shape)

    return shelf


def _ends(rule: SelfRule, position: int, total: int) -> tuple[bool, ...]:
    """Which memories' chunks end with the last token."""
    return tuple((position + total) % chunk == 0 for chunk in rule.chunks)


def _whole(begun: Tensor, home: Tensor | None, desk: Desk) -> Tensor:
    """The memories where a chunk starts: the stack, or the trained weights plus it."""
    if home is None:
        return begun
    return torch.add(home, begun, out=desk.place("memories", *begun.shape))


def _last_segment(rule: SelfRule, position: int, valid: Tensor) -> Tensor:
    """The segment in which each item's next token falls, [b]."""
    size = rule.segment
    return (position + valid.sum(1)) // size - position // size


def _chosen(choice: Tensor | None, segment: int, grad: Tensor) -> Tensor:
    """The gradient of the items whose last chunk starts with this segment."""
    return grad if choice is None else torch.where((choice == segment).view(-1, 1, 1), grad, 0.0)


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
