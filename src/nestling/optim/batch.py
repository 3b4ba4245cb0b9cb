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
        if len(indices) == 1:
            yield _one(rule, step, indices[0], items[indices[0]], gates)
        elif rule.elementwise:
            yield from _flat(step, indices, items, gates)
        else:
            yield from _stacked(step, indices, items, gates)


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


def _one(rule: Rule, step: Step, index: int, item: Item, gates: Gates) -> StepResult:
    """A single parameter, without copies."""
    shape = item.weight.shape
    if rule.elementwise or item.weight.ndim == 2:
        write = Write(item.grad, item.x, item.u)
        after, leaves = step(write, item.leaves, item.weight, gates)
        # a state must not be the gradient itself: `zero_grad` would erase it
        own = {k: v.clone() if v is item.grad else v for k, v in leaves.items()}
        return StepResult(index, after, own, False)
    inside = matrix(item.weight)
    leaves = {k: matrix(v) if v.shape == shape else v for k, v in item.leaves.items()}
    after, leaves = step(Write(matrix(item.grad)), leaves, inside, gates)
    leaves = {k: v.reshape(shape) if v.shape == inside.shape else v for k, v in leaves.items()}
    return StepResult(index, after.reshape(shape), leaves, True)


def _stacked(
    step: Step, indices: list[int], items: Sequence[Item], gates: Gates
) -> Iterator[StepResult]:
    """Same-shaped matrices, stacked along a new first dimension."""
    batch = [items[i] for i in indices]
    inside = matrix(batch[0].weight).shape
    weight = torch.stack([matrix(item.weight) for item in batch])  # [N, rows, columns]
    grad = torch.stack([matrix(item.grad) for item in batch])
    leaves = {
        key: torch.stack(
            [
                matrix(item.leaves[key])
                if item.leaves[key].shape == item.weight.shape
                else item.leaves[key]
                for item in batch
            ]
        )
        for key in batch[0].leaves
    }
    after, state = step(Write(grad), leaves, weight, gates)
    for place, (index, item) in enumerate(zip(indices, batch, strict=True)):
        shape = item.weight.shape
        parts = {k: v[place] for k, v in state.items()}
        parts = {k: v.reshape(shape) if v.shape == inside else v for k, v in parts.items()}
        yield StepResult(index, after[place].reshape(shape), parts, True)


def _flat(
    step: Step, indices: list[int], items: Sequence[Item], gates: Gates
) -> Iterator[StepResult]:
    """An elementwise rule on parameters of any shape, joined into one vector."""
    batch = [items[i] for i in indices]
    sizes = [item.weight.numel() for item in batch]
    weight = torch.cat([item.weight.reshape(-1) for item in batch])
    grad = torch.cat([item.grad.reshape(-1) for item in batch])
    leaves = {
        key: torch.cat([item.leaves[key].reshape(-1) for item in batch]) for key in batch[0].leaves
    }
    after, state = step(Write(grad), leaves, weight, gates)
    directions = after.split(sizes)
    parts = {k: v.split(sizes) for k, v in state.items()}
    for place, (index, item) in enumerate(zip(indices, batch, strict=True)):
        shape = item.weight.shape
        own = {k: v[place].reshape(shape) for k, v in parts.items()}
        yield StepResult(index, directions[place].reshape(shape), own, True)
