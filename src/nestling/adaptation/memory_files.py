"""Memories on disk: what was learned, for which model, and nothing that can run code.

A memory is a folder with `memory.json` and one safetensors file (`nestling.files`): written
atomically, checked by SHA-256. It names the model by a fingerprint of its weights, and is refused
by any other.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.adaptation.drift import Change
from nestling.continuum import Continuum, ContinuumState, Factors, LevelState, Pairs
from nestling.files import BrokenFileError, load_tree, save_tree
from nestling.tree import tree_leaves

if TYPE_CHECKING:
    from nestling.adaptation.learner import Learner

__all__ = ["Saved", "describe", "fingerprint", "load", "read_meta", "save"]

NAME, KIND, VERSION = "memory", "nestling memory", 1
SAMPLES = 4096  # of every tensor, evenly spaced, enter the fingerprint


class Saved(NamedTuple):
    """What a folder held, ready to be used."""

    state: ContinuumState
    history: list[Change]
    notes: Any


def fingerprint(model: nn.Module) -> str:
    """A checksum of a model: names, shapes and types of its parameters, and samples of each."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        step = max(len(flat) // SAMPLES, 1)
        values = flat[::step].to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def describe(learner: Learner) -> dict[str, Any]:
    """What must be equal for a memory to fit: the model, the levels, and their places."""
    continuum, settings = learner.continuum, learner.settings
    return {
        "model": {"class": type(learner.model).__name__, "fingerprint": fingerprint(learner.model)},
        "levels": [
            {"name": level.name, "chunk": str(level.chunk), "rank": level.rank, "rule": rule}
            for level, rule in zip(continuum.levels, settings["rule"], strict=True)
        ],
        "slots": [[slot.name, [list(part) for part in slot.parts]] for slot in continuum.slots],
        "transfer": settings["transfer"],
    }


def save(folder: Path, learner: Learner, state: ContinuumState, notes: Any) -> None:
    """Write a memory; the old one stays until the new one is complete."""
    meta = {
        "kind": KIND,
        "version": VERSION,
        **describe(learner),
        "position": state.position,
        "settings": learner.settings,
        "form": _form(state),
        "history": [list(change) for change in learner.history],
        "notes": notes,
    }
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise ValueError(f"notes must be something JSON can hold: {error}") from error
    save_tree(folder, NAME, dict(tree_leaves(state)), meta)


def read_meta(folder: Path) -> dict[str, Any]:
    """A saved memory's description, after checking every byte of it."""
    return _read(folder)[1]


def load(folder: Path, learner: Learner) -> Saved:
    """Read a memory for this learner; raises BrokenFileError or ValueError, and changes nothing."""
    tensors, meta = _read(folder)
    _compare(folder, meta, describe(learner))
    used: set[str] = set()
    try:
        state = _build(meta["form"], tensors, "", used, _types(learner.continuum))
        history = [Change(*change) for change in meta["history"]]
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenFileError(f"{folder}: not a memory of this form: {error}") from error
    if not isinstance(state, ContinuumState) or used != set(tensors):
        raise BrokenFileError(f"{folder}: its tensors and its description do not agree")
    _check_shapes(folder, state, learner.continuum)
    device = learner.device
    return Saved(_move(state, device), history, meta["notes"])


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not (folder / f"{NAME}.json").is_file():
        there = "it holds no memory.json" if folder.is_dir() else "there is no such folder"
        raise BrokenFileError(f"{folder}: not a saved memory: {there}")
    tensors, meta = load_tree(folder, NAME)
    if not isinstance(meta, dict) or meta.get("kind") != KIND:
        raise BrokenFileError(f"{folder}: a saved tree, but not a memory")
    if meta.get("version") != VERSION:
        raise BrokenFileError(
            f"{folder}: version {meta.get('version')!r}; this nestling reads {VERSION}"
        )
    return tensors, meta


def _compare(folder: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    if saved["model"] != here["model"]:
        raise ValueError(
            f"{folder}: a memory of another model ({saved['model']['class']},"
            f" {saved['model']['fingerprint'][:12]}); this one is {here['model']['class']},"
            f" {here['model']['fingerprint'][:12]}"
        )
    for key in ("levels", "slots", "transfer"):
        if saved[key] != here[key]:
            shown = f": {saved[key]}, here {here[key]}" if key != "slots" else " (layers, assign)"
            raise ValueError(f"{folder}: the memory was made with other {key}{shown}")


def _form(tree: Any) -> Any:
    """The shape of a tree without its tensors, as JSON: null, "tensor", or [type, parts...]."""
    if tree is None or isinstance(tree, Tensor):
        return None if tree is None else "tensor"
    kind = type(tree).__name__ if hasattr(tree, "_fields") else "tuple"
    return [kind, *(_form(part) for part in tree)]


def _build(
    form: Any, tensors: dict[str, Tensor], name: str, used: set[str], types: dict[str, type]
) -> Any:
    """The tree of a form; only types this memory can hold are ever made."""
    if form is None:
        return None
    if form == "tensor":
        used.add(name)
        return tensors[name]
    kind, *parts = form
    if kind != "tuple" and kind not in types:
        raise ValueError(f"unknown type {kind!r}")
    fields = range(len(parts)) if kind == "tuple" else types[kind]._fields  # type: ignore[attr-defined]
    if len(fields) != len(parts):
        raise ValueError(f"{kind} has {len(fields)} fields, not {len(parts)}")
    names = [f"{name}.{field}" if name else str(field) for field in fields]
    built = [_build(part, tensors, full, used, types) for part, full in zip(parts, names)]
    return tuple(built) if kind == "tuple" else types[kind](*built)


def _types(continuum: Continuum) -> dict[str, type]:
    """The NamedTuples a state may hold: ours, the rules' states, a memory model's states."""
    found: dict[str, type] = {
        each.__name__: each for each in (ContinuumState, LevelState, Factors, Pairs)
    }

    def visit(tree: Any) -> None:
        if isinstance(tree, tuple):
            if hasattr(tree, "_fields"):
                found[type(tree).__name__] = type(tree)
            for part in tree:
                visit(part)

    for level in continuum.levels:
        visit(level.rule.init(torch.zeros(1, 4, 4)))
    inner: Any = getattr(continuum.model, "model", None)
    if hasattr(inner, "init_states"):
        visit(inner.init_states(1))
    return found


def _check_shapes(folder: Path, state: ContinuumState, continuum: Continuum) -> None:
    for number, level in enumerate(state.levels):
        parts = continuum.parts[number]
        if len(level.fast) != len(parts):
            raise BrokenFileError(f"{folder}: level {number} has {len(level.fast)} parts")
        for own, fast in zip(parts, level.fast, strict=True):
            size = list(continuum.engine.sizes[own.slot])
            if own.part.axis is not None:
                size[own.part.axis] = own.part.stop - own.part.start
            if isinstance(fast, Factors):
                found = [fast.left.shape[-2], fast.right.shape[-2]]
            else:
                found = size if fast is None else list(fast.shape[-2:])
            if found != size:
                raise BrokenFileError(f"{folder}: a difference of {found} for weights of {size}")


def _move(tree: Any, device: torch.device) -> Any:
    from nestling.tree import state_to

    return state_to(tree, device=device)
