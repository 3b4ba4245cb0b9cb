"""States are trees: (nested) tuples and NamedTuples of tensors, one entry per sequence.

Every tensor of a state has the batch as its first dimension, so these few functions index,
reorder, repeat, join, detach and move the state of any memory, or a tuple of all layers' states,
without knowing what is inside. Strings and other shared facts never live in a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "batch_size",
    "state_detach",
    "state_repeat",
    "state_select",
    "state_stack",
    "state_start",
    "state_to",
    "tree_leaves",
    "tree_map",
]

Tree = TypeVar("Tree")


def tree_map(function: Callable[..., Any], tree: Tree, *others: Any) -> Tree:
    """Apply `function` to every tensor of the tree (and to its partners in trees of the same form).

    `None` stays `None`.
    """
    if tree is None:
        return tree
    if isinstance(tree, Tensor):
        return cast(Tree, function(tree, *others))
    if isinstance(tree, tuple):
        for other in others:
            if type(other) is not type(tree) or len(other) != len(tree):
                raise ValueError(
                    f"states of different form: {type(tree).__name__} of {len(tree)} parts beside"
                    f" {type(other).__name__}"
                )
        parts = [tree_map(function, *group) for group in zip(tree, *others, strict=True)]
        return cast(Tree, type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts))
    raise TypeError(f"a state holds tensors, tuples and None; got {type(tree).__name__}")


def tree_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors with their dotted names (field names, or numbers in plain tuples), in order."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, tuple):
        fields = getattr(tree, "_fields", range(len(tree)))
        for field, part in zip(fields, tree, strict=True):
            yield from tree_leaves(part, f"{name}.{field}" if name else str(field))
    elif tree is not None:
        raise TypeError(f"a state holds tensors, tuples and None; got {type(tree).__name__}")


def batch_size(tree: Any) -> int:
    """The number of sequences in a state."""
    for _, leaf in tree_leaves(tree):
        return leaf.shape[0]
    raise ValueError("a state without tensors has no batch size")


def state_select(tree: Tree, index: Tensor) -> Tree:
    """The sequences `index` (long or bool) of a state, in that order: take out, reorder, drop."""

    def take(leaf: Tensor) -> Tensor:
        return leaf[index.to(leaf.device)]

    return tree_map(take, tree)


def state_repeat(tree: Tree, repeats: int) -> Tree:
    """Every sequence `repeats` times, neighbours together (beam search, several samples)."""
    return tree_map(lambda leaf: leaf.repeat_interleave(repeats, dim=0), tree)


def state_stack(trees: Sequence[Tree]) -> Tree:
    """Join the sequences of several states into one batch.

    Where an inner size differs (attention caches of different length), the shorter are filled up
    with zeros at the end; the positions tell how much of a cache counts.
    """
    if not trees:
        raise ValueError("state_stack needs at least one state")

    def join(*leaves: Tensor) -> Tensor:
        if len({leaf.dim() for leaf in leaves}) > 1:
            raise ValueError(f"states of different models: {[tuple(x.shape) for x in leaves]}")
        size = [max(sizes) for sizes in zip(*(leaf.shape for leaf in leaves), strict=True)][1:]
        return torch.cat([_grow(leaf, size) for leaf in leaves])

    return tree_map(join, trees[0], *trees[1:])


def _grow(leaf: Tensor, size: Sequence[int]) -> Tensor:
    missing = [want - have for want, have in zip(size, leaf.shape[1:], strict=True)]
    if not any(missing):
        return leaf
    return functional.pad(leaf, [n for extra in reversed(missing) for n in (0, extra)])


def state_start(weight: Tensor, batch: int) -> Tensor:
    """A trained start for every sequence, [B, ...], as data of its own.

    A state that shared memory with a parameter would change with it, and would point to nothing
    once FSDP2 has freed the parameter.
    """
    return weight.expand(batch, *weight.shape).clone()


def state_detach(tree: Tree) -> Tree:
    """The same state without its history: gradients stop here (truncated backpropagation)."""
    return tree_map(lambda leaf: leaf.detach(), tree)


def state_to(
    tree: Tree, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Tree:
    """Move a state; `dtype` changes floating point tensors only (positions stay int64)."""

    def move(leaf: Tensor) -> Tensor:
        return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)

    return tree_map(move, tree)
