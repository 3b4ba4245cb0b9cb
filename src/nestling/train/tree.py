"""Any state of Python values and tensors as named tensors and JSON: checkpoints without pickle.

`pack` takes dicts, lists, tuples, tensors, NumPy arrays, numbers, strings, booleans and None,
nested in any way, as `state_dict()` of models, optimizers and random generators give them.
`unpack(pack(x))` is x: tuples stay tuples, integer keys stay integers, floats keep every bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["pack", "unpack"]


def pack(value: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a nested value into tensors by name and a JSON skeleton that refers to them."""
    tensors: dict[str, Tensor] = {}
    return tensors, _pack(value, "", tensors)


def _pack(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Tensor):
        tensors[where] = value
        return {"tensor": where}
    if isinstance(value, np.ndarray):
        tensors[where] = torch.from_numpy(np.ascontiguousarray(value))
        return {"array": where}
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return {"float": float(value).hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        items = [_pack(item, f"{where}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        return {"dict": [_pack_item(k, v, where, tensors) for k, v in value.items()]}
    raise TypeError(
        f"cannot save a {type(value).__name__} (at {where or 'the top'}) without pickle"
    )


def _pack_item(key: Any, value: Any, where: str, tensors: dict[str, Tensor]) -> list[Any]:
    if not isinstance(key, (str, int)):
        raise TypeError(f"keys must be strings or integers; got {key!r} at {where or 'the top'}")
    return [key, _pack(value, f"{where}/{key}", tensors)]


def unpack(tensors: Mapping[str, Tensor], skeleton: Any) -> Any:
    """Put a value back together from what `pack` made of it."""
    if isinstance(skeleton, list):
        return [unpack(tensors, item) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "float":
        return float.fromhex(content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "tuple":
        return tuple(unpack(tensors, item) for item in content)
    if kind == "dict":
        return {key: unpack(tensors, item) for key, item in content}
    raise ValueError(f"unknown mark {kind!r} in a checkpoint's skeleton")
