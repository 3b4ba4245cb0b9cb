"""A rule's state as a flat dictionary of named tensors, and back.

`torch.optim` keeps one flat dictionary per parameter, and so do distributed checkpoints. A rule's
state is a nested tuple; the path of field names (or positions) to a tensor is its key: `fast`,
`0.mean`, `1.second`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from nestling.rules import State

__all__ = ["named", "rebuild"]


def _children(state: tuple) -> Iterator[tuple[str, State]]:
    """The named parts of one tuple: field names where it has them, positions otherwise."""
    fields = getattr(state, "_fields", None) or (str(i) for i in range(len(state)))
    return zip(fields, state, strict=True)


def named(state: State, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a state by their path."""
    if isinstance(state, Tensor):
        return {prefix or "state": state}
    if state is None:  # a part the rule does without
        return {}
    if not isinstance(state, tuple):
        raise TypeError(
            f"a rule's state must be a (nested) tuple of tensors; {prefix or 'it'} is"
            f" {type(state).__name__}"
        )
    flat: dict[str, Tensor] = {}
    for name, child in _children(state):
        flat.update(named(child, f"{prefix}.{name}" if prefix else name))
    return flat


def rebuild(template: State, leaves: Mapping[str, Tensor], prefix: str = "") -> State:
    """The state with the structure of `template` and the tensors of `leaves`."""
    if isinstance(template, Tensor):
        return leaves[prefix or "state"]
    if template is None:
        return None
    parts = (
        rebuild(child, leaves, f"{prefix}.{name}" if prefix else name)
        for name, child in _children(template)
    )
    make = getattr(type(template), "_make", tuple)  # a NamedTuple is made from its fields
    return make(parts)
