"""Run one rule over many parameters: one by one, stacked, or joined into one flat vector.

By contract a rule treats leading dimensions as batch, so same-shaped parameters can be stacked and
updated by one call; an elementwise rule does not even need the same shape. Many small kernels
become few large ones: for small parameters that is what counts, large ones gain nothing and are not
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.rules import Gates, Rule, Write
from nestling.tree import tree_dict, tree_from_dict

SMALL = 1 << 16
"""Parameters of at most this many elements are batched by default; larger ones run one by one."""
LARGEST = 1 << 22
"""A batch holds at most this many elements: its temporaries then stay within the heap."""


Leaves = dict[str, Tensor]
Step = Callable[[Write, Leaves, Tensor, Gates], tuple[Tensor, Leaves]]


class Item(NamedTuple):
    """One parameter's turn: all tensors in the parameter's shape, in the dtype to compute in."""

    weight: Tensor
    grad: Tensor
    leaves: Leaves
    x: Tensor | None = None  # [n, Di], where captured
    u: Tensor | None = None  # [n, Do]


@dataclass(frozen=True)
class StepResult:
    """The direction to step along and the state after it, for `items[index]`.

    `shared`: the state is part of a larger tensor, to be copied rather than kept.
    """

    index: int
    direction: Tensor
    leaves: Leaves
    shared: bool


def matrix(tensor: Tensor) -> Tensor:
    """Any tensor as a matrix: vectors are one row, convolution kernels `[out, in * kh * kw]`."""
    if tensor.ndim < 2:
        return tensor.reshape(1, -1)
    return tensor if tensor.ndim == 2 else tensor.flatten(1)


def flat_step(rule: Rule) -> Step:
    """The rule's step with its state as a flat dictionary before and after."""
    template = rule.init(torch.empty(1, 1, device="meta"))  # only its structure counts

    def step(write: Write, leaves: Leaves, weight: Tensor, gates: Gates) -> tuple[Tensor, Leaves]:
        after, state = rule.step(write, tree_from_dict(template, leaves), weight, gates)
        return after.grad, tree_dict(state)

    return step


def run_batched(
    rule: Rule, step: Step, items: Sequence[Item], gates: Gates, foreach: bool | None = None
) -> Iterator[StepResult]:
    """One step of `rule` for every item. `foreach`: True batches, False loops, None decides.

    `step` is `flat_step(rule)`, compiled or not.
    """
    for indices in _batches(rule, items, foreach):
        yield from _together(rule, step, indices, items, gates)


def _batches(rule: Rule, items: Sequence[Item], foreach: bool | None) -> list[list[int]]:
    """Which items go together; every item in exactly one batch, in order of first appearance."""
    open_batch: dict[object, tuple[list[int], int]] = {}
    batches: list[list[int]] = []
    for index, item in enumerate(items):
        weight, size = item.weight, item.weight.numel()
        batched = (size <= SMALL or not weight.is_cpu) if foreach is None else foreach
        if not batched or item.x is not None:
            batches.append([index])
            continue
        key = (weight.dtype, weight.device, None if rule.elementwise else matrix(weight).shape)
        members, total = open_batch.get(key, ([], 0))
        if not members or total + size > LARGEST:
            members, total = [], 0
            batches.append(members)
        members.append(index)
        open_batch[key] = (members, total + size)
    return batches


def _together(
    rule: Rule, step: Step, indices: list[int], items: Sequence[Item], gates: Gates
) -> Iterator[StepResult]:
    """One call of the rule for items that go together.

    One parameter goes as it is (as a matrix, if the rule needs one), without copies. Several are
    joined into one vector for an elementwise rule, and stacked as matrices for any other.
    """
    batch = [items[i] for i in indices]
    alone, first = len(batch) == 1, batch[0].weight
    as_is = alone and (rule.elementwise or first.ndim == 2)

    def inside(tensor: Tensor, item: Item) -> Tensor:
        if as_is or (not rule.elementwise and tensor.shape != item.weight.shape):
            return tensor
        return tensor.reshape(-1) if rule.elementwise else matrix(tensor)

    def join(tensors: list[Tensor]) -> Tensor:
        if alone:
            return tensors[0]
        return torch.cat(tensors) if rule.elementwise else torch.stack(tensors)

    def parts(joined: Tensor) -> Sequence[Tensor]:
        if alone:
            return (joined,)
        sizes = [item.weight.numel() for item in batch]
        return joined.split(sizes) if rule.elementwise else joined.unbind()

    weight = join([inside(item.weight, item) for item in batch])
    grad = join([inside(item.grad, item) for item in batch])
    leaves = {k: join([inside(i.leaves[k], i) for i in batch]) for k in batch[0].leaves}
    write = Write(grad, batch[0].x, batch[0].u)  # what was captured goes alone
    after, state = step(write, leaves, weight, gates)
    directions, states = parts(after), {k: parts(v) for k, v in state.items()}
    whole = inside(first, batch[0]).shape
    for place, (index, item) in enumerate(zip(indices, batch, strict=True)):

        def outside(tensor: Tensor, shape: torch.Size = item.weight.shape) -> Tensor:
            back = rule.elementwise or tensor.shape == whole
            return tensor.reshape(shape) if back and tensor.shape != shape else tensor

        own = {k: outside(v[place]) for k, v in states.items()}
        if as_is:  # a state must not be the gradient itself: `zero_grad` would erase it
            own = {k: v.clone() if v is item.grad else v for k, v in own.items()}
        yield StepResult(index, outside(directions[place]), own, not as_is)
