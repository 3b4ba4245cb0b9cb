"""The step of parameters that are sharded over processes (`nestling.shards`).

An elementwise rule runs on each rank's own shard. Any other rule needs whole matrices: they are
shared out over the ranks, each rank collects the shards of its matrices, runs the rule on them, and
sends everyone's shards back (two `all_to_all` per step), so no matrix is orthogonalised twice.
State stays sharded like its parameter. Layouts other than one mesh dimension with `Shard(0)` are
gathered on every rank instead: the same result, without sharing the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nestling.optim.batch import Item, StepResult
from nestling.rules import Rule
from nestling.shards import cut, full, is_sharded, joined, local, rows_of, share_of

RunItems = Callable[[Sequence[Item]], Iterator[StepResult]]


def start(
    rule: Rule, weight: Tensor, dtype: torch.dtype, initial: Callable[[Rule, Tensor], dict]
) -> dict[str, Tensor]:
    """The first state of a parameter: sharded like it where it has its shape."""
    if not is_sharded(weight):
        return initial(rule, weight.to(dtype))
    if rule.elementwise:
        return {k: joined(v, weight) for k, v in initial(rule, local(weight).to(dtype)).items()}
    return {k: _like(v, weight) for k, v in initial(rule, full(weight).to(dtype)).items()}


def run_sharded(rule: Rule, items: Sequence[Item], inner: RunItems) -> Iterator[StepResult]:
    """`inner` over the items, whole or sharded; directions come back as this rank's part."""
    split = [i for i, item in enumerate(items) if is_sharded(item.weight)]
    if not split:
        yield from inner(items)
        return
    plain = [i for i in range(len(items)) if i not in set(split)]
    for result in inner([items[i] for i in plain]):
        yield replace(result, index=plain[result.index])
    pieces = [_aligned(items[i]) for i in split]
    if rule.elementwise:
        results = inner([_map(local, item) for item in pieces])
    elif all(_exchangeable(item, pieces[0]) for item in pieces):
        results = _exchanged(pieces, inner)
    else:
        results = _gathered(pieces, inner)
    for result in results:
        item = pieces[result.index]
        leaves = {
            k: joined(v, item.weight) if is_sharded(item.leaves[k]) else v
            for k, v in result.leaves.items()
        }
        yield replace(result, index=split[result.index], leaves=leaves)


def _gathered(items: Sequence[Item], inner: RunItems) -> Iterator[StepResult]:
    """Every rank runs the rule on whole matrices and keeps its own part of the results."""
    for result in inner([_map(full, item) for item in items]):
        like = items[result.index].weight
        leaves = {k: local(_like(v, like)) for k, v in result.leaves.items()}
        yield StepResult(result.index, local(_like(result.direction, like)), leaves, True)


def _exchanged(items: Sequence[Item], inner: RunItems) -> Iterator[StepResult]:
    """Each rank runs the rule on its share of the matrices."""
    mesh, names = items[0].weight.device_mesh, list(items[0].leaves)  # type: ignore[attr-defined]
    ranks, me, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    owner = _owners(items, ranks)
    owned = [[item for item, o in zip(items, owner, strict=True) if o == r] for r in range(ranks)]

    # out: each owner gets the shards of its items' tensors
    send = [[local(t) for item in owned[r] for t in _tensors(item)] for r in range(ranks)]
    shapes = [[_part(t, r, ranks) for i in owned[me] for t in _tensors(i)] for r in range(ranks)]
    received = _all_to_all(send, shapes, local(items[0].weight), group)  # [ranks][my tensors]
    whole = iter([torch.cat(shards) for shards in zip(*received, strict=True)])
    mine = [Item(next(whole), next(whole), {k: next(whole) for k in names}) for _ in owned[me]]

    # back: each rank gets its rows of the directions and the new state
    done = sorted(inner(mine), key=lambda result: result.index)
    after = [t for result in done for t in (result.direction, *(result.leaves[k] for k in names))]
    send = [[t[slice(*share_of(len(t), r, ranks))] for t in after] for r in range(ranks)]
    shapes = [
        [_part(t, me, ranks) for i in owned[r] for t in _tensors(i)[1:]] for r in range(ranks)
    ]
    queues = [iter(parts) for parts in _all_to_all(send, shapes, local(items[0].weight), group)]
    for index, o in enumerate(owner):
        direction = next(queues[o])
        yield StepResult(index, direction, {k: next(queues[o]) for k in names}, True)


def _all_to_all(
    send: list[list[Tensor]], shapes: list[list[list[int]]], like: Tensor, group: Any
) -> list[list[Tensor]]:
    """Send `send[r]` to rank r; returns what each rank sent, cut into the given shapes."""
    import torch.distributed as dist

    sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
    flat = torch.cat([like.new_empty(0), *(t.reshape(-1) for part in send for t in part)])
    received = like.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        received,
        flat,
        output_split_sizes=[sum(of_rank) for of_rank in sizes],
        input_split_sizes=[sum(t.numel() for t in part) for part in send],
        group=group,
    )
    parts = iter(received.split([size for of_rank in sizes for size in of_rank]))
    return [[next(parts).view(shape) for shape in of_rank] for of_rank in shapes]


def _owners(items: Sequence[Item], ranks: int) -> list[int]:
    """The rank that works on each item: the costliest first, each to the rank with least to do."""
    cost = [item.weight.numel() * min(len(item.weight), item.weight[0].numel()) for item in items]
    load, owner = [0] * ranks, [0] * len(items)
    for i in sorted(range(len(items)), key=lambda i: (-cost[i], i)):
        owner[i] = load.index(min(load))
        load[owner[i]] += cost[i]
    return owner


def _part(tensor: Tensor, rank: int, ranks: int) -> list[int]:
    """The shape of a rank's shard."""
    start, stop = share_of(tensor.shape[0], rank, ranks)
    return [stop - start, *tensor.shape[1:]]


def _tensors(item: Item) -> list[Tensor]:
    return [item.weight, item.grad, *item.leaves.values()]


def _map(function: Callable[[Tensor], Tensor], item: Item) -> Item:
    leaves = {k: function(v) for k, v in item.leaves.items()}
    return Item(function(item.weight), function(item.grad), leaves)


def _aligned(item: Item) -> Item:
    """The gradient laid out like the weight (FSDP2 sees to that; others may not)."""
    weight: Any = item.weight
    grad: Any = item.grad
    if grad.placements == weight.placements:
        return item
    return item._replace(grad=grad.redistribute(weight.device_mesh, weight.placements))


def _exchangeable(item: Item, first: Item) -> bool:
    """One mesh dimension, cut into rows, and all state of the weight's shape."""
    weight: Any = item.weight
    return (
        weight.device_mesh == first.weight.device_mesh  # type: ignore[attr-defined]
        and rows_of(weight) is not None
        and weight.dtype == first.weight.dtype
        and all(is_sharded(leaf) for leaf in item.leaves.values())
    )


def _like(whole: Tensor, weight: Tensor) -> Tensor:
    """State that has its weight's shape, cut as that is; other state whole."""
    return cut(whole, weight) if whole.shape == weight.shape else whole
