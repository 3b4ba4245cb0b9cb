"""The memory state of a stream on disk: safe to interrupt, refused by any other model.

`nestling.files` writes the tensors (safetensors) and a JSON with the model's fingerprint and every
sequence's position; an interrupted save leaves the state before it intact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling import files
from nestling.continuum import ContinuumState, Factors, LevelState, Pairs
from nestling.continuum.stream import begin
from nestling.files import BrokenFileError, fingerprint
from nestling.models.cache import Learned, MemoryCache, position
from nestling.models.learning import engine_of
from nestling.tree import named_tuples, state_to

_NAME, _KIND = "state", "nestling state"
_LEARNED = {kind.__name__: kind for kind in (Learned, ContinuumState, LevelState, Factors, Pairs)}


def save_state(folder: str | Path, model: Any, state: MemoryCache) -> None:
    """Save the state of `model`'s memories into a folder; replaces the state saved there before."""
    if state.states is None:
        raise ValueError("the state is empty: the model has not read a token with it yet")
    facts: dict[str, Any] = {
        "model": fingerprint(model),
        "position": position(state.states).tolist(),
        "seen": state.get_seq_length(),
    }
    value = state.states if state.learned is None else state.learned
    files.save_record(Path(folder), _NAME, _KIND, value, facts)


def load_state(folder: str | Path, model: Any) -> MemoryCache:
    """The state saved in a folder, ready for `model`.

    The state of another model is refused, and so is one with a part that is missing, of another
    shape or type, or not finite.
    """
    folder = Path(folder)
    fresh = model.model.init_states(1)
    types = named_tuples(fresh) | _LEARNED
    states, facts = files.load_record(folder, _NAME, _KIND, types)
    if facts.get("model") != (own := fingerprint(model)):
        raise ValueError(
            f"{folder}: this state belongs to another model (fingerprint"
            f" {str(facts.get('model'))[:12]}; this model's is {own[:12]}): a memory makes sense"
            " only with the weights it learned with"
        )
    seen, places = facts.get("seen"), facts.get("position")
    if not (isinstance(places, list) and places and isinstance(seen, int) and seen >= 0):
        raise BrokenFileError(f"{folder}: the state tells no positions")
    learned = states if isinstance(states, Learned) else None
    try:
        if learned is not None:
            states = _check_learned(learned, model, len(places), str(folder))
        files.check_state(states, fresh, len(places), str(folder))
    except (TypeError, ValueError) as error:
        raise BrokenFileError(str(error)) from error
    if position(states).tolist() != places:
        raise BrokenFileError(
            f"{folder}: the positions {str(places)[:60]} in the JSON are not those of the tensors"
        )
    if learned is None:
        return MemoryCache(len(states), state_to(states, device=model.device), seen)
    cache = MemoryCache(len(states))
    cache.advance_learned(state_to(learned, device=model.device), seen)
    return cache


def _check_learned(learned: Learned, model: Any, batch: int, name: str) -> Any:
    """Raise ValueError unless this is what `model` could have learned; the memories' states."""
    if not model.learns:
        raise ValueError(f"{name}: this state was learned, and no level of this model learns")
    everyone = torch.cat(learned.rows).sort().values
    if len(learned.rows) != len(learned.states) or everyone.tolist() != list(range(batch)):
        raise ValueError(f"{name}: the groups of sequences do not make up {batch} sequences")
    engine = engine_of(model)
    for rows, state in zip(learned.rows, learned.states, strict=True):
        files.check_state(state, begin(engine, 1), len(rows), name)
        for parts, level in zip(engine.wiring.parts, state.levels, strict=True):
            for own, fast in zip(parts, level.fast, strict=True):
                whole = fast if fast is None or isinstance(fast, Tensor) else fast.left
                if whole is not None and tuple(whole.shape[1:]) != engine.sizes[own.slot]:
                    raise ValueError(f"{name}: a difference of {list(whole.shape)} does not fit")
    return learned.memories
