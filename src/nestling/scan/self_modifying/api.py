"""The self-modifying scan: which form a call takes, and the forms as torch operators.

torch.compile would unroll a scan segment by segment: minutes of compiling, and more for every
segment. As an operator it is one node of the model's graph, backward pass and recomputation
included; so is the scan in segments, in compiled models only. The rule travels as plain values
(`SelfRule.plain`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.checks import one_of
from nestling.norm import unit
from nestling.scan.backends import INSTALLED, MISSING_TRITON, is_any_order
from nestling.scan.delta.kernel import scan_chunk
from nestling.scan.opaque import differentiate_once, only_needed, opaque
from nestling.scan.self_modifying.kernel import (
    SegmentResults,
    kept_shapes,
    one_clock,
    one_token_segment,
    run_backward,
    run_forward,
    segments_of,
)
from nestling.scan.self_modifying.rule import PLAIN, Inputs, SelfRule, Weights
from nestling.scan.self_modifying.segment import scan_segments

__all__ = ["SELF_BACKENDS", "choose", "scan_operator", "scan_self_modifying"]


SELF_BACKENDS = ("auto", "chunk", "triton")
"""The back ends of `scan_self_modifying`."""


def choose(backend: str, *, any_order: bool, refusal: str | None) -> str:
    """`triton` or `chunk`: a pure function of what was asked for and why Triton cannot run it.

    What was asked for by name and cannot be had is an error, never something else.
    """
    if backend == "triton" and refusal is not None:
        raise ValueError(f"backend 'triton' cannot run this scan: {refusal}; use backend='chunk'")
    if backend == "triton" and any_order:
        raise ValueError("backend 'triton' is differentiable once; inside any_order() use 'chunk'")
    return "triton" if backend != "chunk" and refusal is None and not any_order else "chunk"


def scan_self_modifying(
    rule: SelfRule,
    inputs: Inputs,
    weights: Weights,
    start: Weights,
    position: int | Tensor,
    recompute: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Weights, Weights]:
    """Reads [b, T, d], the running weights after the last token, and where their chunks start.

    Eq. 83-88 in the chunked form of Eq. 90. `position` is the number of tokens seen before, one for
    all items or [b]; `start` the weights at the last multiple of each memory's chunk.

    Matrix memories without momentum, all items at one position, take the kernel by hand; one token
    of them without gradients (generation) a shorter form of it; memories with static projections
    the matrix scan (`_static`). All else goes segment by segment through autograd.

    backend: `chunk` is that, and runs everywhere; `triton` has kernels for CUDA (`triton` beside
        this file); `auto` is `triton` on CUDA where it has a form for the scan, else `chunk`.
    """
    if backend not in SELF_BACKENDS:
        one_of("backend", backend, SELF_BACKENDS)
    why: str | None = "not on CUDA"
    if inputs.x.is_cuda or backend == "triton":
        why = MISSING_TRITON
        if "triton" in INSTALLED:
            from nestling.scan.self_modifying.triton import refusal

            why = refusal(inputs, weights, position)
    if choose(backend, any_order=is_any_order(), refusal=why) == "triton":
        from nestling.scan.self_modifying.triton import scan_triton

        with torch.autocast(inputs.x.device.type, enabled=False):
            return scan_triton(rule, inputs, weights, start, position)
    matrix = weights.second is None and weights.moved is None and not is_any_order()
    with _full_precision(inputs.x):
        if matrix and inputs.x.shape[1] == 1 and not torch.is_grad_enabled():
            return _one_token(rule, inputs, weights, start, position)
        if matrix and not isinstance(position, Tensor):
            fixed = not isinstance(inputs.x.shape[1], torch.SymInt)  # `_static` cuts by the length
            if fixed and is_static(rule, inputs):
                return _static(rule, inputs, weights, start, position, recompute)
            y, first, begun = scan_operator(
                rule, inputs, weights.first, start.first, position, recompute
            )
            return y, Weights(first), Weights(begun)
        if torch.compiler.is_compiling():
            return _segments_operator(rule, inputs, weights, start, position)
        return scan_segments(rule, inputs, weights, start, position)


def is_static(rule: SelfRule, inputs: Inputs) -> bool:
    """Whether nothing but the values that a memory writes can depend on it, as the matrix scan
    needs it: static or steered projections (Eq. 76), `dot`, and no padding."""
    plain = rule.erase and not (rule.adaptive or rule.squared or rule.read_start)
    known = inputs.initial is not None or not rule.own_values
    return plain and known and rule.clip >= 1 and inputs.valid is None


def _static(
    rule: SelfRule, inputs: Inputs, weights: Weights, start: Weights, position: int, recompute: bool
) -> tuple[Tensor, Weights, Weights]:
    """The matrix scan: what does not depend on the memory is computed for all chunks at once.

    Own values are those of the memory where a chunk starts, so a chunk that was begun before stands
    apart; one that is not full stands apart for the start to be known.
    """
    k, v, q, home = inputs.k, inputs.v, inputs.q, None
    if k is None or v is None or q is None:
        raise ValueError("k, v and q are no memories of this rule, so Inputs must have them")
    if rule.own_values and inputs.initial is not None:
        home = inputs.initial.first[:, 0]
    raw = torch.baddbmm(inputs.bias.unsqueeze(1), inputs.x, inputs.readout.mT)
    eta, alpha = rule.rate_and_retain(raw if inputs.gates is None else raw + inputs.gates)
    tokens = (k, v, eta, alpha, q)
    weight, begun = weights.first[:, 0], start.first[:, 0]
    head = min(-position % rule.chunk, q.shape[1])
    tail = (q.shape[1] - head) % rule.chunk
    sizes = (head, q.shape[1] - head - tail, tail)
    reads: list[Tensor] = []
    pieces = zip(sizes, *(part.split(sizes, 1) for part in tokens), strict=True)
    for i, (size, key, value, rate, retain, asked) in enumerate(pieces):
        if not size:
            continue
        inside = i == 0  # of a chunk that began before: its values do not wait for the walk
        begun = begun if inside else weight
        if inside and home is not None:
            value = unit(value @ (home + begun).mT)
        y, weight = scan_chunk(
            weight, key, value, rate, retain, asked,
            erase=True, read="before", chunk=rule.chunk, momentum=None, recompute=recompute,
            share=inputs.erase, home=None if inside else home,
        )  # fmt: skip
        reads += [] if y is None else [y]
    begun = weight if (position + q.shape[1]) % rule.chunk == 0 else begun
    read = reads[0] if len(reads) == 1 else torch.cat(reads, 1)
    return read, Weights(weight.unsqueeze(1)), Weights(begun.unsqueeze(1))


def _full_precision(x: Tensor) -> torch.autocast:
    """Autocast off; it does not know the meta device."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


def _one_token(
    rule: SelfRule, inputs: Inputs, weights: Weights, start: Weights, position: int | Tensor
) -> tuple[Tensor, Weights, Weights]:
    start = rule.begin(weights, start, position)
    stack = weights.first.flatten(1, 2)
    begun = stack if start.first is weights.first else start.first.flatten(1, 2)
    initial = inputs.initial
    memories = begun if initial is None else initial.first.flatten(1, 2) + begun
    y, after = one_token_segment(rule, inputs, stack, begun, memories)
    weights = Weights(after.view_as(weights.first))
    step = 1 if inputs.valid is None else inputs.valid.sum(1)
    return y, weights, rule.begin(weights, start, position + step)


RULE = ", ".join(f"{kind} {name}" for name, kind in PLAIN.items())
"""The rule, in an operator's schema."""

TENSORS = (
    "Tensor first, Tensor start, Tensor? home, Tensor x, Tensor readout, Tensor bias, Tensor? k,"
    " Tensor? v, Tensor? q, Tensor? gates, Tensor? share, Tensor? valid"
)
"""The weights, where their chunks start, the trained weights they are added to, the inputs."""

NOTHING, STARTS, ALL = range(3)
"""How much of each segment is kept for the backward pass."""


def scan_operator(
    rule: SelfRule,
    inputs: Inputs,
    first: Tensor,
    start: Tensor,
    position: int,
    recompute: bool,
    tile: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reads [b, T, d] and both weights [b, N, d, d] after the last token, for one position.

    Padding (`inputs.valid`) must stand behind each item's tokens; the start returned is that of the
    item's own last chunk. tile: tokens of a segment at most in Triton's kernels; 0 takes `kernel`.
    """
    home = None if inputs.initial is None else inputs.initial.first
    given = (first, start, home, *inputs[:8], inputs.valid)
    derived = any(part is not None and part.requires_grad for part in given)
    keep = (STARTS if recompute else ALL) if derived and torch.is_grad_enabled() else NOTHING
    y, after, last, *_ = _scan(*rule.plain, position, tile, keep, *given)
    return y, after, last


def _rule(arguments: tuple[Any, ...]) -> SelfRule:
    adaptive, *rest = arguments[: len(PLAIN)]
    return SelfRule.of(tuple(adaptive), *rest)


def _inputs(tensors: Sequence[Any]) -> Inputs:
    """The inputs among `TENSORS`."""
    *given, valid = tensors[3:]
    return Inputs(*given)._replace(valid=valid)


@torch.library.custom_op(
    "nestling::self_modifying",
    mutates_args=(),
    schema=f"({RULE}, int position, int tile, int keep, {TENSORS}) -> Tensor[]",
)
def _scan(*arguments: Any) -> list[Tensor]:
    """Reads, weights, starts; then what is kept of all segments (as in `SegmentResults`)."""
    rule = _rule(arguments)
    position, tile, keep, *tensors = arguments[len(PLAIN) :]
    first, start, home = tensors[:3]
    if tile:
        from nestling.scan.self_modifying.triton import run_forward as run_triton

        return run_triton(rule, position, tile, _inputs(tensors), first, start, home, keep > 0)
    with torch.no_grad(), _full_precision(first):
        run = run_forward(
            rule, position, _inputs(tensors), first, start, home,
            starts=keep > NOTHING, all_kept=keep == ALL,
        )  # fmt: skip
        ends = run.stack.reshape(first.shape).clone(), run.last.reshape(first.shape).clone()
    kept = [] if keep == NOTHING else [run.stacks, run.starts, *run.kept.values()]
    return [run.y, *ends, *kept]


@_scan.register_fake
def _(*arguments: Any) -> list[Tensor]:
    rule = _rule(arguments)
    position, tile, keep, first, _, _, x, *_ = arguments[len(PLAIN) :]
    b, total, d = x.shape
    if tile:
        from nestling.scan.self_modifying.triton import slots

        first, many = first.float(), slots(rule, position, total, tile)
        made = [torch.empty_like(x, dtype=first.dtype), *(torch.empty_like(first) for _ in "ab")]
        return [*made, first.new_empty(many, *first.shape)] if keep else made
    made = [torch.empty_like(x), torch.empty_like(first), torch.empty_like(first)]
    if keep == NOTHING:
        return made
    sizes = [s.tokens.stop - s.tokens.start for s in segments_of(rule, position, total)]
    stacks = first.new_empty(len(sizes), b, first.shape[1] * d, d)
    made += [stacks, first.new_empty(0) if one_clock(rule, position) else torch.empty_like(stacks)]
    if keep == ALL:
        shapes = kept_shapes(rule, b, max(sizes), d).values()
        made += [first.new_empty(len(sizes), math.prod(shape)) for shape in shapes]
    return made


@torch.library.custom_op(
    "nestling::self_modifying_backward",
    mutates_args=(),
    schema=f"({RULE}, int position, int tile, {TENSORS}, Tensor[] made, Tensor? dy,"
    " Tensor? dfirst, Tensor? dstart) -> Tensor[]",
)
def _scan_backward(*arguments: Any) -> list[Tensor]:
    """Gradients of `TENSORS`; empty where there is nothing to derive."""
    rule = _rule(arguments)
    position, tile, *tensors, made, dy, dfirst, dstart = arguments[len(PLAIN) :]
    first, _, home = tensors[:3]
    y, stacks, *kept = made
    if dy is None:
        dy = torch.zeros_like(y)
    inputs = _inputs(tensors)
    found: Sequence[Tensor | None]
    if tile:
        from nestling.scan.self_modifying.triton import run_backward as run_triton

        found = run_triton(rule, position, tile, inputs, home, y, stacks, dy, dfirst, dstart)
    else:
        b, total, d = y.shape
        size = max(s.tokens.stop - s.tokens.start for s in segments_of(rule, position, total))
        starts, *rest = kept
        named = dict(zip(kept_shapes(rule, b, size, d), rest, strict=True)) if rest else {}
        with torch.no_grad(), _full_precision(y):
            dweights, dbegun, dhome, dinputs = run_backward(
                rule, position, inputs, first, home,
                SegmentResults(y, stacks[-1], y, stacks, starts, named),
                torch.zeros_like(first) if dfirst is None else dfirst,
                torch.zeros_like(first) if dstart is None else dstart,
                dy,
            )  # fmt: skip
        found = (dweights.clone(), dbegun, dhome, *dinputs)
    shape = first.shape
    ends = [None if part is None else part.reshape(shape) for part in found[:3]]
    return [_or_empty(part, y) for part in (*ends, *found[3:], None, None)]


def _or_empty(part: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if part is None else part


@_scan_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    *tensors, made, _, _, _ = arguments[len(PLAIN) + 2 :]
    derived = (*tensors[:10], None, None)  # (neither what is erased nor what is valid)
    return [
        _or_empty(None if part is None else torch.empty_like(part), made[0]) for part in derived
    ]


PLACES = len(PLAIN) + 3
"""The arguments of the operator before its tensors: the rule, position, tile, keep."""


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.plain = inputs[: PLACES - 1]
    ctx.save_for_backward(*inputs[PLACES:], output[0], *output[3:])
    ctx.given = len(inputs) - PLACES
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # (once: checkpointing unpacks no tensor twice)
    given, made = saved[: ctx.given], saved[ctx.given :]
    found = _scan_backward(*ctx.plain, *given, list(made), *grads[:3])
    return (*(None for _ in range(PLACES)), *only_needed(found, ctx.needs_input_grad[PLACES:]))


differentiate_once(
    _scan, _scan_backward, _setup, _backward,
    "the self-modifying scan is differentiable once; second derivatives need an eager model"
    " inside nestling.scan.any_order()",
)  # fmt: skip


def _segments_operator(
    rule: SelfRule, inputs: Inputs, weights: Weights, start: Weights, position: int | Tensor
) -> tuple[Tensor, Weights, Weights]:
    """`scan_segments` as one node of a graph."""
    apart = position if isinstance(position, Tensor) else None
    moved = weights.moved or ()
    initial = inputs.initial or (None, None)
    y, *made = _segments(
        *rule.plain, 0 if isinstance(position, Tensor) else position, apart, *weights[:2],
        *start[:2], *moved, *(None for _ in range(2 - len(moved))), *inputs[:10], *initial[:2],
    )  # fmt: skip
    deep = weights.second is not None
    parts = iter(made)
    ends = [Weights(next(parts), next(parts) if deep else None) for _ in range(2)]
    return y, ends[0]._replace(moved=tuple(parts) or None), ends[1]


def _run_segments(plain: Any, tensors: Any) -> list[Tensor]:
    *rule, position = plain
    apart, first, second, first0, second0, *rest = tensors
    moved = tuple(part for part in rest[:2] if part is not None) or None
    initial = None if rest[12] is None else Weights(*rest[12:14])
    y, weights, start = scan_segments(
        _rule(tuple(rule)),
        Inputs(*rest[2:12])._replace(initial=initial),
        Weights(first, second, moved),
        Weights(first0, second0),
        position if apart is None else apart,
    )
    made = (y, *weights[:2], *start[:2], *(weights.moved or ()))
    return [part for part in made if part is not None]


def _fake_segments(plain: Any, tensors: Any) -> list[Tensor]:
    _, first, second, first0, second0, moved1, moved2, x, *_ = tensors
    made = (x, first, second, first0, second0, moved1, moved2)
    return [torch.empty_like(part) for part in made if part is not None]


_segments = opaque(
    "self_modifying_segments",
    [*RULE.split(", "), "int position"],
    "apart first second first0 second0 moved1 moved2 x readout bias k v q gates share theta valid"
    " initial1 initial2".split(),
    _run_segments,
    _fake_segments,
)
