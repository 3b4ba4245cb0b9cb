"""Memories on disk: what was learned, for which model, and nothing that can run code.

A memory is a folder with `memory.json` and one safetensors file (`nestling.files`): written
atomically, checked by SHA-256. It names the model by a fingerprint of its configuration and
weights, and is refused by any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nestling.adaptation.own_text import own_texts
from nestling.continuum import Continuum, ContinuumState, Factors, Fast, LevelState, Pairs
from nestling.files import (
    BrokenFileError,
    check_finite,
    check_state,
    expect,
    fingerprint,
    load_record,
    read_facts,
    save_record,
)
from nestling.levels import LevelUpdate
from nestling.tree import named_tuples, state_to, tree_leaves, tree_map

if TYPE_CHECKING:
    from nestling.adaptation.learner import Learner


class Text(NamedTuple):
    """A text the memory has learned, and what every level's parts were before it."""

    name: str
    before: tuple[tuple[Fast, ...], ...]


NAME, KIND = "memory", "nestling memory"
LEVELS = 64  # at most, in a memory that is read


class MemoryTree(NamedTuple):
    """The tensors of a memory."""

    state: ContinuumState
    own: Tensor | None  # [rows, length]: text the base model wrote by itself
    probes: tuple[Tensor, ...]  # [n] each: a little of every text, to see that it stays known
    before: tuple[Any, ...]  # per text that can be undone: the levels before it, in float16


class Saved(NamedTuple):
    """The content of a folder, ready to be used."""

    state: ContinuumState
    own: Tensor | None
    probes: list[Tensor]
    watched: int  # of the probes: the user's own, the first ones
    texts: list[Text]
    begun: Text | None  # the text that was being learned
    history: list[LevelUpdate]
    notes: Any


def facts_to_match(learner: Learner) -> dict[str, Any]:
    """The facts that must be equal for a memory to fit: model, levels, and their places."""
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
    texts = [*learner.texts, *([learner.begun] if learner.begun else [])]
    facts = {
        **facts_to_match(learner),
        "position": state.position,
        "settings": learner.settings,
        "history": [list(update) for update in learner.history],
        "texts": [text.name for text in texts],
        "begun": learner.begun is not None,
        "watched": learner.watched,
        "notes": notes,
    }
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"notes must be something JSON can hold: {error}") from error
    before = tuple(tree_map(torch.Tensor.half, text.before) for text in texts)
    tree = MemoryTree(state, own_texts.drawn(learner.model), tuple(learner.probes), before)
    save_record(folder, NAME, KIND, tree, facts)


def read_meta(folder: Path) -> dict[str, Any]:
    """A saved memory's description, after checking every byte of it."""
    _must_be_there(folder)
    facts = read_facts(folder, NAME, KIND)
    _check_facts(folder, facts)
    return facts


def load(folder: Path, learner: Learner) -> Saved:
    """Read a memory for this learner; raises BrokenFileError or ValueError, and changes nothing."""
    _must_be_there(folder)
    tree, facts = load_record(folder, NAME, KIND, _types(learner.continuum))
    _check_facts(folder, facts)
    _compare(folder, facts, facts_to_match(learner))
    try:
        history = [LevelUpdate(*update) for update in facts["history"]]
    except TypeError as error:
        raise BrokenFileError(f"{folder}: not a memory's history: {error}") from error
    if not isinstance(tree, MemoryTree) or not isinstance(tree.state, ContinuumState):
        raise BrokenFileError(f"{folder}: its tensors and its description do not agree")
    state = tree.state
    try:
        check_state(state, learner.continuum.init(1), state.batch, str(folder))
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise BrokenFileError(f"{folder}: not a whole memory: {error}") from error
    _check_shapes(folder, state, learner.continuum)
    if state.position != facts["position"]:
        raise BrokenFileError(f"{folder}: its tensors and its description do not agree")
    if facts["watched"] > len(tree.probes):
        raise BrokenFileError(f"{folder}: its texts and its description do not agree")
    _check_texts(folder, tree, facts["texts"], learner)
    tree = state_to(tree, device=learner.device)
    exact = state.levels[0].seen.dtype
    before = tree_map(lambda half: half.to(exact), tree.before)
    texts = [Text(name, parts) for name, parts in zip(facts["texts"], before, strict=True)]
    probes = [ids.cpu() for ids in tree.probes]
    begun = texts.pop() if facts["begun"] and texts else None
    watched = facts["watched"]
    return Saved(tree.state, tree.own, probes, watched, texts, begun, history, facts["notes"])


def _must_be_there(folder: Path) -> None:
    if not (folder / f"{NAME}.json").exists():
        there = "it holds no memory.json" if folder.is_dir() else "there is no such folder"
        raise BrokenFileError(f"{folder}: not a saved memory: {there}")


_FACTS = {
    "model": {"class": str, "fingerprint": str},
    "levels": list,
    "slots": list,
    "transfer": object,
    "position": int,
    "settings": dict,
    "history": [list],
    "texts": [str],
    "begun": bool,
    "watched": int,
    "notes": object,
}


def _check_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Refuse a description of another form, or larger than any memory's."""
    facts.setdefault("begun", False)  # memories of early versions do not say
    facts.setdefault("watched", 0)
    expect(facts, _FACTS, f"{folder}: not a memory")
    chunks = expect(facts["settings"].get("chunks"), list, f"{folder}: its chunks")
    if not 1 <= len(chunks) <= LEVELS:
        raise BrokenFileError(f"{folder}: a memory has 1 to {LEVELS} levels")
    if not all(each == "inf" or type(each) is int for each in chunks):
        raise BrokenFileError(f"{folder}: chunks are whole numbers or inf; got {str(chunks)[:60]}")


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


def _types(continuum: Continuum) -> dict[str, type]:
    """The NamedTuples a state may hold: ours, the rules' states, a memory model's states."""
    ours: dict[str, type] = {
        each.__name__: each for each in (MemoryTree, ContinuumState, LevelState, Factors, Pairs)
    }
    inner: Any = getattr(continuum.model, "model", None)
    states = inner.init_states(1) if hasattr(inner, "init_states") else None
    rules = [level.rule.init(torch.zeros(1, 4, 4)) for level in continuum.levels]
    return ours | named_tuples(*rules, states)


def _check_shapes(folder: Path, state: ContinuumState, continuum: Continuum) -> None:
    for number, level in enumerate(state.levels):
        for fasts in (level.fast, level.sums, level.start, level.outer):
            _check_parts(folder, fasts, number, continuum)
        for name, leaf in tree_leaves((level.fast, level.start)):
            if leaf.dtype not in (level.seen.dtype, torch.float32):
                raise BrokenFileError(
                    f"{folder}: level {number}: {name} is {leaf.dtype}, not {level.seen.dtype}"
                )


def _check_parts(folder: Path, fasts: Any, number: int, continuum: Continuum) -> None:
    """Refuse differences of one level that do not fit the weights it sits on."""
    parts = continuum.parts[number]
    if not isinstance(fasts, tuple) or len(fasts) != len(parts):
        raise BrokenFileError(f"{folder}: level {number} has not {len(parts)} parts")
    for fast, own in zip(fasts, parts, strict=True):
        size = list(continuum.engine.sizes[own.slot])
        if own.part.axis is not None:
            size[own.part.axis] = own.part.stop - own.part.start
        if isinstance(fast, Factors):
            found = [fast.left.shape[-2], fast.right.shape[-2]]
        else:
            found = size if fast is None else list(fast.shape[-2:])
        if found != size:
            raise BrokenFileError(f"{folder}: a difference of {found}, not {size}")


def _check_texts(folder: Path, tree: MemoryTree, names: list[Any], learner: Learner) -> None:
    """Refuse texts, and what they changed, that this memory cannot have."""
    known = int(learner.config.vocab_size)
    if not isinstance(tree.probes, tuple):
        raise BrokenFileError(f"{folder}: its probes are no list of texts")
    for ids, rows in [(tree.own, 2), *((ids, 1) for ids in tree.probes)]:
        if ids is None and rows == 2:
            continue
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != rows:
            raise BrokenFileError(f"{folder}: holds texts that are not token ids")
        if not bool(((ids >= 0) & (ids < known)).all()):
            raise BrokenFileError(f"{folder}: holds tokens this model does not know")
    if len(names) != len(tree.before):
        raise BrokenFileError(f"{folder}: its texts and its description do not agree")
    for before in tree.before:
        if not isinstance(before, tuple) or len(before) != len(learner.levels):
            raise BrokenFileError(f"{folder}: a text changed other levels than there are")
        for number, fasts in enumerate(before):
            _check_parts(folder, fasts, number, learner.continuum)
    for name, leaf in tree_leaves(tree.before):
        check_finite(leaf, f"{folder}: {name}")
