"""Trees of tensors: nested tuples, NamedTuples, lists and dicts, walked in one place.

A *state* is a tree of (nested) tuples and NamedTuples whose tensors have the batch as their first
dimension, so the `state_` functions index, reorder, repeat, join, detach and move the state of any
memory, or a tuple of all layers' states, without knowing what is inside. Strings and other shared
facts never live in a state.

`pack` turns a tree that also holds numbers and strings (the `state_dict()` of a model, an optimizer
or a random generator) into named tensors and JSON, and `unpack` turns these back: every saved form
of nestling is made of the two (`nestling.files`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Tree = TypeVar("Tree")


class _Node(NamedTuple):
    """One container of a tree: its keys, its parts, and how to make one like it of other parts."""

    keys: Iterable[str | int]
    parts: Sequence[Any]
    make: Callable[[list[Any]], Any]


def _node(tree: Any) -> _Node | None:
    """The container as keys and parts; None for everything that is not one."""
    if isinstance(tree, tuple):
        fields = getattr(tree, "_fields", None)
        if fields is None:
            return _Node(range(len(tree)), tree, tuple)
        return _Node(fields, tree, type(tree)._make)  # type: ignore[attr-defined]
    if isinstance(tree, list):
        return _Node(range(len(tree)), tree, list)
    if isinstance(tree, Mapping):
        keys = list(tree)
        return _Node(keys, list(tree.values()), lambda parts: dict(zip(keys, parts, strict=True)))
    return None


def _not_a_state(part: Any, name: str) -> TypeError:
    place = f" at {name}" if name else ""
    return TypeError(
        f"a state must be a (nested) tuple of tensors and None; got {type(part).__name__}{place}"
    )


def tree_map(function: Callable[..., Any], tree: Tree, *others: Any, plain: bool = False) -> Tree:
    """Apply `function` to every tensor of the tree (and to its partners in trees of the same form).

    `None` stays `None`. Numbers, strings and other values are refused, or with `plain=True` stay
    what they are.
    """
    if tree is None:
        return tree
    if isinstance(tree, Tensor):
        return cast(Tree, function(tree, *others))
    node = _node(tree)
    if node is None:
        if plain:
            return tree
        raise _not_a_state(tree, "")
    for other in others:
        if type(other) is not type(tree) or len(cast(Any, other)) != len(node.parts):
            raise ValueError(
                f"states of different form: {type(tree).__name__} of {len(node.parts)} parts beside"
                f" {type(other).__name__}"
            )
    partners = ([_node(other).parts for other in others]) if others else []  # type: ignore[union-attr]
    groups = zip(node.parts, *partners, strict=True)
    return cast(Tree, node.make([tree_map(function, *group, plain=plain) for group in groups]))


def tree_walk(
    tree: Any, path: tuple[tuple[Any, str | int], ...] = ()
) -> Iterator[tuple[tuple[tuple[Any, str | int], ...], Tensor]]:
    """Every tensor in order, each with its path: the (container, key) pairs that lead to it."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif (node := _node(tree)) is not None:
        for key, part in zip(node.keys, node.parts, strict=True):
            yield from tree_walk(part, (*path, (tree, key)))
    elif tree is not None:
        raise _not_a_state(tree, ".".join(str(key) for _, key in path))


def tree_leaves(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors with their dotted names (field names, or numbers in plain tuples), in order."""
    for path, leaf in tree_walk(tree):
        yield ".".join(str(key) for _, key in path), leaf


def tree_dict(tree: Any) -> dict[str, Tensor]:
    """A state as a flat dictionary, as optimizers keep it; a bare tensor is called `state`."""
    return {name or "state": leaf for name, leaf in tree_leaves(tree)}


def tree_from_dict(template: Any, leaves: Mapping[str, Tensor], name: str = "") -> Any:
    """The state with the structure of `template` and the tensors of `leaves`, by name."""
    if isinstance(template, Tensor):
        return leaves[name or "state"]
    if template is None:
        return None
    node = _node(template)
    if node is None:
        raise _not_a_state(template, name)
    parts = [
        tree_from_dict(part, leaves, f"{name}.{key}" if name else str(key))
        for key, part in zip(node.keys, node.parts, strict=True)
    ]
    return node.make(parts)


def named_tuples(*trees: Any) -> dict[str, type]:
    """The NamedTuple types found in some trees, by name (`unpack` makes no other)."""
    found: dict[str, type] = {}
    for tree in trees:
        node = _node(tree)
        if node is not None:
            if hasattr(tree, "_fields"):
                found[type(tree).__name__] = type(tree)
            found |= named_tuples(*node.parts)
    return found


# States: trees of tensors with the batch first


def batch_size(tree: Any) -> int:
    """The number of sequences in a state."""
    for _, leaf in tree_walk(tree):
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


# Trees as named tensors and JSON

DEPTH = 64  # levels of nesting that `unpack` follows


def pack(value: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a nested value into tensors by name and a JSON skeleton that refers to them.

    The value may hold dicts, lists, tuples, NamedTuples, tensors, NumPy arrays, numbers, strings,
    booleans, dtypes and None. `unpack` of the result is the same value: tuples stay tuples, integer
    keys stay integers, floats keep every bit.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _pack(value, "", tensors)


def _pack(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        while where in tensors:  # the keys 0 and "0" look alike
            where += "'"
        if isinstance(value, Tensor):
            tensors[where] = value
            return {"tensor": where}
        tensors[where] = torch.from_numpy(np.ascontiguousarray(value))
        return {"array": where}
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return {"float": float(value).hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    node = _node(value)
    if node is None:
        raise TypeError(
            f"cannot save a {type(value).__name__} (at {where or 'the top'}) without pickle"
        )
    keys = list(node.keys)
    for key in keys:
        if not isinstance(key, (str, int)):
            raise TypeError(
                f"keys must be strings or integers; got {key!r} at {where or 'the top'}"
            )
    parts = [_pack(part, f"{where}/{key}", tensors) for key, part in zip(keys, node.parts)]
    if isinstance(value, list):
        return parts
    if isinstance(value, Mapping):
        return {"dict": [list(item) for item in zip(keys, parts, strict=True)]}
    if hasattr(value, "_fields"):
        return {"named": [type(value).__name__, *parts]}
    return {"tuple": parts}


def unpack(
    tensors: Mapping[str, Tensor], skeleton: Any, types: Mapping[str, type] | None = None
) -> Any:
    """Put a value back together from what `pack` made of it.

    `types` gives the NamedTuples that may be made (`named_tuples`); without it they come back as
    plain tuples. Anything that `pack` does not write, and nesting beyond 64 levels, raises
    ValueError.
    """
    return _unpack(tensors, skeleton, types, DEPTH)


def _unpack(
    tensors: Mapping[str, Tensor], skeleton: Any, types: Mapping[str, type] | None, depth: int
) -> Any:
    if skeleton is None or isinstance(skeleton, (bool, int, str)):
        return skeleton
    if depth == 0:
        raise ValueError(f"nested more than {DEPTH} levels deep")

    def inside(parts: Any) -> list[Any]:
        if not isinstance(parts, list):
            raise ValueError(f"expected a list of parts; got {type(parts).__name__}")
        return [_unpack(tensors, part, types, depth - 1) for part in parts]

    if isinstance(skeleton, list):
        return inside(skeleton)
    if not isinstance(skeleton, dict) or len(skeleton) != 1:
        raise ValueError(f"expected one mark; got {str(skeleton)[:60]}")
    ((kind, content),) = skeleton.items()
    if kind in ("tensor", "array"):
        if not isinstance(content, str) or content not in tensors:
            raise ValueError(f"the tensor {content!r} is missing")
        return tensors[content] if kind == "tensor" else tensors[content].numpy()
    if kind == "float":
        return float.fromhex(content)
    if kind == "dtype":
        dtype = getattr(torch, content, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {content!r}")
        return dtype
    if kind == "tuple":
        return tuple(inside(content))
    if kind == "named":
        name, *parts = content if isinstance(content, list) and content else [None]
        if types is None:
            return tuple(inside(parts))
        made = types.get(name) if isinstance(name, str) else None
        if made is None:
            raise ValueError(f"unknown type {name!r}; known are {sorted(types)}")
        fields = made._fields  # type: ignore[attr-defined]
        if len(fields) != len(parts):
            raise ValueError(f"{name} has {len(fields)} fields, not {len(parts)}")
        return made(*inside(parts))
    if kind == "dict":
        return dict(_pairs(content, inside))
    raise ValueError(f"unknown mark {kind!r}")


def _pairs(content: Any, inside: Callable[[Any], list[Any]]) -> Iterator[tuple[Any, Any]]:
    if not isinstance(content, list):
        raise ValueError(f"expected a list of items; got {type(content).__name__}")
    for item in content:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], (str, int))):
            raise ValueError(f"expected [key, value]; got {str(item)[:60]}")
        yield item[0], inside(item[1:])[0]
