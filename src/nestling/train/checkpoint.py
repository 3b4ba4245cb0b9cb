"""Checkpoints: complete or absent, checksummed, the newest good one is found by itself.

A run's folder holds one folder per checkpoint, `step-00001200`, made under a hidden name and
renamed when every byte is on disk. Loading takes the newest whose checksums hold and says which
broken ones it passed over. The last `keep` stay, and the best by validation loss.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nestling.files import BrokenFileError, load_tree, save_tree, sync_folder
from nestling.tree import pack, unpack

__all__ = ["Checkpoint", "checkpoints", "load_checkpoint", "load_latest", "save_checkpoint"]

_NAME = re.compile(r"step-(\d{8,})$")
_PART = "part"


class Checkpoint(NamedTuple):
    """What was saved: the step, the states by name, and free facts (loss, configuration)."""

    step: int
    states: dict[str, Any]
    facts: dict[str, Any]


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def save_checkpoint(
    folder: Path,
    step: int,
    states: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    keep: int = 3,
    best: int | None = None,
) -> Path:
    """Save states (anything `tree.pack` takes) as one checkpoint, then drop what is not kept.

    If anything fails (disk full, crash), the earlier checkpoints are as they were. A whole one
    of the same step stays: resuming is exact, so it says the same.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1; got {keep}")
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    building = Path(tempfile.mkdtemp(dir=folder, prefix=f".{final.name}."))
    try:
        tensors, skeleton = pack(dict(states))
        save_tree(building, _PART, tensors, {"step": step, "facts": dict(facts), "is": skeleton})
        if not _whole(final):
            shutil.rmtree(final, ignore_errors=True)
            os.rename(building, final)
        sync_folder(folder)
    except OSError as error:
        raise OSError(
            f"could not save the checkpoint of step {step} in {folder}: {error}; earlier"
            f" checkpoints are untouched"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    _drop(folder, keep, best)
    return final


def _whole(path: Path) -> bool:
    try:
        load_tree(path, _PART)
    except BrokenFileError:
        return False
    return True


def _drop(folder: Path, keep: int, best: int | None) -> None:
    spare = checkpoints(folder)[:-keep]
    for path in spare:
        if best is None or path.name != f"step-{best:08d}":
            shutil.rmtree(path, ignore_errors=True)
    for leftover in folder.glob(".step-*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(leftover)


def load_checkpoint(path: Path, types: Mapping[str, type] | None = None) -> Checkpoint:
    """Read one checkpoint; raises BrokenFileError when any bit is not as it was saved.

    `types` are the NamedTuples its states may hold; without it they come back as plain tuples.
    """
    tensors, meta = load_tree(path, _PART)
    try:
        return Checkpoint(meta["step"], unpack(tensors, meta["is"], types), meta["facts"])
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenFileError(f"{path}: not a checkpoint: {error}") from error


def load_latest(folder: Path, types: Mapping[str, type] | None = None) -> Checkpoint | None:
    """The newest whole checkpoint of a run, or None if there is none; warns about broken ones."""
    for path in reversed(checkpoints(folder)):
        try:
            return load_checkpoint(path, types)
        except BrokenFileError as error:
            warnings.warn(f"passing over a broken checkpoint: {error}", stacklevel=2)
    return None
