"""Memory states on disk, each tied to the model that made it.

`files.save_tree` writes the tensors (safetensors) and a JSON that names the model's fingerprint and
every sequence's position; an interrupted save leaves the state before it intact.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.files import load_tree, save_tree
from nestling.models.cache import MemoryCache, position
from nestling.tree import tree_leaves

__all__ = ["fingerprint", "load_state", "save_state"]

_NAME = "state"
_FIELDS = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "mixer",
    "mixer_options",
    "channel",
    "levels",
    "topology",
    "activation",
    "rms_norm_eps",
)


def fingerprint(model: Any) -> str:
    """A checksum of everything that shapes a memory state: architecture and weights."""
    shape = {name: getattr(model.config, name) for name in _FIELDS}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    for name, weight in sorted(model.model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_state(folder: str | Path, model: Any, state: MemoryCache) -> None:
    """Save the state of `model`'s memories into a folder; replaces the state saved there before."""
    if state.states is None:
        raise ValueError("the state is empty: the model has not read a token with it yet")
    facts = {
        "model": fingerprint(model),
        "position": position(state.states).tolist(),
        "seen": state.get_seq_length(),
    }
    save_tree(Path(folder), _NAME, dict(tree_leaves(state.states)), facts)


def load_state(folder: str | Path, model: Any) -> MemoryCache:
    """The state saved in a folder, ready for `model`; refuses the state of another model."""
    tensors, facts = load_tree(Path(folder), _NAME)
    if facts["model"] != (own := fingerprint(model)):
        raise ValueError(
            f"{folder}: this state belongs to another model (fingerprint {facts['model'][:12]};"
            f" this model's is {own[:12]}): a memory makes sense only with the weights it learned"
            " with"
        )
    states = _rebuild(model.model.init_states(len(facts["position"])), "", tensors, model.device)
    if tensors:
        raise ValueError(f"{folder}: unknown parts in the state: {', '.join(sorted(tensors))}")
    if position(states).tolist() != facts["position"]:
        raise ValueError(
            f"{folder}: the positions {facts['position']} in the JSON are not those of the tensors,"
            f" {position(states).tolist()}"
        )
    return MemoryCache(len(states), states, facts["seen"])


def _rebuild(template: Any, name: str, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """The template's tree with its tensors replaced by those of the same name (used ones leave)."""
    if isinstance(template, tuple):
        keys = getattr(template, "_fields", range(len(template)))
        parts = [
            _rebuild(part, f"{name}.{key}" if name else str(key), tensors, device)
            for key, part in zip(keys, template, strict=True)
        ]
        return type(template)(*parts) if hasattr(template, "_fields") else tuple(parts)
    found = tensors.pop(name, None)  # None: a part that was absent when the state was saved
    return None if found is None else found.to(device)
