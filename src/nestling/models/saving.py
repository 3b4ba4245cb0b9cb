"""The memory state of a stream on disk: safe to interrupt, refused by any other model.

`nestling.files` writes the tensors (safetensors) and a JSON with the model's fingerprint and every
sequence's position; an interrupted save leaves the state before it intact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nestling import files
from nestling.files import BrokenFileError, fingerprint
from nestling.models.cache import MemoryCache, position
from nestling.tree import named_tuples, state_to

__all__ = ["load_state", "save_state"]

_NAME, _KIND = "state", "nestling state"


def save_state(folder: str | Path, model: Any, state: MemoryCache) -> None:
    """Save the state of `model`'s memories into a folder; replaces the state saved there before."""
    if state.states is None:
        raise ValueError("the state is empty: the model has not read a token with it yet")
    facts = {
        "model": fingerprint(model),
        "position": position(state.states).tolist(),
        "seen": state.get_seq_length(),
    }
    files.save_state(Path(folder), _NAME, _KIND, state.states, facts)


def load_state(folder: str | Path, model: Any) -> MemoryCache:
    """The state saved in a folder, ready for `model`.

    The state of another model is refused, and so is one with a part that is missing, of another
    shape or type, or not finite.
    """
    folder = Path(folder)
    fresh = model.model.init_states(1)
    states, facts = files.load_state(folder, _NAME, _KIND, named_tuples(fresh))
    if facts.get("model") != (own := fingerprint(model)):
        raise ValueError(
            f"{folder}: this state belongs to another model (fingerprint"
            f" {str(facts.get('model'))[:12]}; this model's is {own[:12]}): a memory makes sense"
            " only with the weights it learned with"
        )
    seen, places = facts.get("seen"), facts.get("position")
    if not (isinstance(places, list) and places and isinstance(seen, int) and seen >= 0):
        raise BrokenFileError(f"{folder}: the state tells no positions")
    try:
        files.check_state(states, fresh, len(places), str(folder))
    except (TypeError, ValueError) as error:
        raise BrokenFileError(str(error)) from error
    if position(states).tolist() != places:
        raise BrokenFileError(
            f"{folder}: the positions {str(places)[:60]} in the JSON are not those of the tensors"
        )
    return MemoryCache(len(states), state_to(states, device=model.device), seen)
