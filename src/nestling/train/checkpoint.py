"""Checkpoints: complete or absent, checksummed, one file per process, for any number of processes.

A run's folder holds one folder per checkpoint, `step-00001200`. Every process writes the tensors it
holds, or its rows of them, into a safetensors file of its own; when all are on disk, the first
process writes the manifest that says which rows lie where, and renames the folder from its hidden
name. Nobody ever holds more than its own share, and nothing is pickled.

Loading takes the newest checkpoint whose checksums hold and says which broken ones it passed over.
Any number of processes may load what any other number saved: each reads the rows it needs. The last
`keep` stay, and the best by validation loss.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.checks import require
from nestling.files import (
    BrokenFileError,
    TensorFile,
    check_finite,
    expect,
    read_manifest,
    sync_folder,
    verify,
    write_manifest,
    write_tensors,
)
from nestling.shards import full, is_sharded, local, rows_of
from nestling.train.distributed import World, own_rows
from nestling.tree import pack, unpack

_NAME = re.compile(r"step-(\d{8,})$")
_PART, _KIND, _VERSION = "part", "nestling checkpoint", 2
_META = {
    "kind": {_KIND},
    "version": {_VERSION},
    "step": int,
    "facts": dict,
    "tensors": dict,
    "is": object,
}
_SMALL = 1 << 16  # bytes of a tensor that the first process writes, whoever holds it
Types = Mapping[str, type]


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


# Saving


def save_checkpoint(
    folder: Path,
    step: int,
    states: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    keep: int = 3,
    best: int | None = None,
    world: World | None = None,
    cut: tuple[str, ...] = (),
) -> Path:
    """Save states (anything `tree.pack` takes) as one checkpoint, then drop what is not kept.

    Every process calls this; each writes its rows of sharded tensors, and its part of the tensors
    that all hold. The states named in `cut` hold each process's own rows of a whole. If anything
    fails anywhere (disk full, crash), the earlier checkpoints are as they were. A whole one of the
    same step stays: resuming is exact, so it says the same.
    """
    world = world or World()
    require(keep >= 1, "keep", keep, "at least 1")
    final = folder / f"step-{step:08d}"
    building = folder / f".{final.name}.building"
    try:
        if not world.gather(world.main and _is_whole(final))[0]:
            _write(building, final, step, states, facts, world, cut)
    finally:
        if world.main:
            shutil.rmtree(building, ignore_errors=True)
    if world.main:
        _drop(folder, keep, best)
    return final


def _write(
    building: Path,
    final: Path,
    step: int,
    states: Mapping[str, Any],
    facts: Mapping[str, Any],
    world: World,
    cut: tuple[str, ...],
) -> None:
    tensors, skeleton = pack(dict(states))
    table: dict[str, list[Any]] = {
        name: [str(t.dtype).removeprefix("torch."), None, []] for name, t in tensors.items()
    }
    own, rows = _share(tensors, table, world, cut)

    def attempt(work: Callable[[], Any]) -> list[Any]:
        """The work of every process, or the error of any of them in all."""
        result, error = None, None
        try:
            result = work()
        except OSError as found:
            error = found
        told = world.gather((result, None if error is None else str(error)))
        if failed := [text for _, text in told if text is not None]:
            raise OSError(
                f"could not save the checkpoint of step {step} in {final.parent}: {failed[0]};"
                " earlier checkpoints are untouched"
            ) from error
        return [result for result, _ in told]

    def begin() -> None:
        if world.main:
            final.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()

    def finish() -> None:
        if world.main:
            meta = {"kind": _KIND, "version": _VERSION, "step": step, "facts": dict(facts)}
            parts = [part for part, _ in written]
            write_manifest(building, _PART, parts, {**meta, "tensors": table, "is": skeleton})
            shutil.rmtree(final, ignore_errors=True)
            os.rename(building, final)
            sync_folder(final.parent)

    attempt(begin)
    name = f"{_PART}-{world.rank:05d}"
    written = attempt(lambda: (write_tensors(building, name, own), rows))
    for number, (_, theirs) in enumerate(written):
        for key, (start, stop) in theirs.items():
            table[key][2].append([number, start, stop])
    attempt(finish)


def _share(
    tensors: Mapping[str, Tensor], table: dict[str, list[Any]], world: World, cut: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
    """The tensors this process writes, and where their rows begin and end in the whole ones.

    `table` gets the shapes of the whole tensors.
    """
    own: dict[str, Tensor] = {}
    rows: dict[str, tuple[int, int]] = {}
    load = [0] * world.size
    for name, given in tensors.items():
        tensor: Any = given
        if is_sharded(tensor):  # put together everywhere if it is not cut by rows
            whole, place = list(tensor.shape), rows_of(tensor)
            tensor = full(tensor) if place is None else local(tensor)
        elif name.split("/")[1] in cut:
            whole = [tensor.shape[0] * world.size, *tensor.shape[1:]]
            place = (world.rank * tensor.shape[0], (world.rank + 1) * tensor.shape[0])
        else:
            whole, place = list(tensor.shape), None
        table[name][1] = whole
        if place is None:  # all processes hold it: the least burdened one writes it
            size = tensor.numel() * tensor.element_size()
            owner = 0 if size < _SMALL else load.index(min(load))
            load[owner] += size
            if owner != world.rank:
                continue
            place = (0, whole[0] if whole else 0)
        elif place[0] == place[1]:
            continue
        own[name], rows[name] = tensor, place
    return own, rows


def _is_whole(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except BrokenFileError:
        return False
    return True


def _drop(folder: Path, keep: int, best: int | None) -> None:
    spare = checkpoints(folder)[:-keep]
    for path in spare:
        if best is None or path.name != f"step-{best:08d}":
            shutil.rmtree(path, ignore_errors=True)
    sweep(folder)


def sweep(folder: Path) -> None:
    """Remove what a killed save left (call it while no other process writes here)."""
    for leftover in folder.glob(".step-*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(leftover)


# Loading


class Checkpoint:
    """A checkpoint whose checksums were verified: the step, facts, and states, read when asked."""

    def __init__(
        self,
        path: Path,
        step: int,
        facts: dict[str, Any],
        skeleton: Any,
        table: dict[str, tuple[torch.dtype, tuple[int, ...], list[list[int]]]],
        files: list[TensorFile],
        types: Types | None,
    ) -> None:
        self.path, self.step, self.facts = path, step, facts
        self._skeleton, self._table, self._files, self._types = skeleton, table, files, types
        self._keys = _named_states(path, skeleton)

    @property
    def states(self) -> dict[str, Any]:
        """All states, every tensor whole."""
        return {key: self.load(key) for key in self._keys}

    def names(self, prefix: str) -> list[str]:
        """The tensors whose names start with `prefix`."""
        return [name for name in self._table if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        return self._table[name][1]

    def load(self, key: str, read: Callable[[str], Tensor] | None = None) -> Any:
        """One state; `read` gives its tensors by name (by default each as a whole)."""
        if key not in self._keys:
            raise BrokenFileError(f"{self.path}: no {key} in this checkpoint")
        try:
            return unpack(_Lazy(self._table, read or self.read), self._keys[key], self._types)
        except BrokenFileError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BrokenFileError(f"{self.path}: not a checkpoint: {error}") from error

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor, from whichever files hold them."""
        dtype, shape, pieces = self._table[name]
        if not shape:
            return self._files[pieces[0][0]].read(name)
        stop = shape[0] if stop is None else stop
        found = [
            (number, max(start, first), min(stop, last), first)
            for number, first, last in pieces
            if first < stop and start < last
        ]
        if len(found) == 1:
            number, begin, end, first = found[0]
            return self._files[number].read(name, begin - first, end - first)
        rows = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        for number, begin, end, first in found:
            part = self._files[number].read(name, begin - first, end - first)
            rows[begin - start : end - start] = part
        return rows


class _Lazy(dict[str, Any]):
    """The tensors of a checkpoint by name, read when they are asked for."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
        super().__init__(dict.fromkeys(names))
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)


def load_checkpoint(
    path: Path, types: Types | None = None, world: World | None = None
) -> Checkpoint:
    """Open one checkpoint; raises BrokenFileError when any bit is not as it was saved.

    `types` are the NamedTuples its states may hold; without it they come back as plain tuples. The
    processes of a world share the work of verifying its files, and agree on the outcome.
    """
    world = world or World()
    found, reason = None, None
    try:
        found = _open(path, types, world)
    except BrokenFileError as error:
        reason = str(error)
    reasons = [each for each in world.gather(reason) if each is not None]
    if found is None or reasons:
        raise BrokenFileError(reasons[0])
    return found


def _open(path: Path, types: Types | None, world: World) -> Checkpoint:
    manifest = read_manifest(path, _PART)
    meta = manifest.meta
    expect(meta, _META, f"{path}: not a checkpoint")
    with contextlib.ExitStack() as stack:
        files = []
        for number, part in enumerate(manifest.parts):
            own = number % world.size == world.rank
            opened = verify(path, part) if own else TensorFile(path / part.file, size=part.bytes)
            files.append(stack.enter_context(opened))
        table = _table(path, meta["tensors"], files)
    return Checkpoint(path, meta["step"], meta["facts"], meta["is"], table, files, types)


def _table(
    path: Path, listed: Any, files: list[TensorFile]
) -> dict[str, tuple[torch.dtype, tuple[int, ...], list[list[int]]]]:
    """Where the rows of every tensor are, checked against the files' own headers."""
    table: dict[str, tuple[torch.dtype, tuple[int, ...], list[list[int]]]] = {}
    try:
        for name, (dtype, shape, pieces) in listed.items():
            expect(pieces, [[int]], name)
            place = 0
            for number, start, stop in sorted(pieces, key=lambda piece: piece[1]):
                rows = [stop - start, *shape[1:]] if shape else []
                file = files[number]
                if start != place or list(file.shape(name)) != rows:
                    raise ValueError(f"the rows of {name} do not fit together")
                if str(file.dtype(name)) != f"torch.{dtype}":
                    raise ValueError(f"{name} is {file.dtype(name)}, not {dtype}")
                place = stop
            if place != shape[0] if shape else len(pieces) != 1:
                raise ValueError(f"rows of {name} are missing")
            table[name] = (getattr(torch, dtype), tuple(shape), [list(p) for p in pieces])
    except BrokenFileError:
        raise
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise BrokenFileError(f"{path}: not a checkpoint: {error}") from error
    return table


def _named_states(path: Path, skeleton: Any) -> dict[str, Any]:
    """The skeletons of the states by name."""
    items = skeleton.get("dict") if isinstance(skeleton, dict) else None
    try:
        return {str(key): part for key, part in items or ()}
    except (TypeError, ValueError) as error:
        raise BrokenFileError(f"{path}: not a checkpoint: {error}") from error


def load_latest(
    folder: Path, types: Types | None = None, world: World | None = None
) -> Checkpoint | None:
    """The newest whole checkpoint of a run, or None if there is none; warns about broken ones."""
    world = world or World()
    for path in reversed(world.gather(checkpoints(folder))[0]):
        try:
            return load_checkpoint(path, types, world)
        except BrokenFileError as error:
            warnings.warn(f"passing over a broken checkpoint: {error}", stacklevel=2)
    return None


# Into a model and its optimizer


def restore_(model: Any, optimizer: torch.optim.Optimizer, saved: Checkpoint) -> None:
    """Load a checkpoint into a model and its optimizer, however either is sharded.

    Each process reads the rows that its parameters hold; the weights are read into place, one
    tensor at a time. Nothing is changed if the checkpoint is of another model.
    """
    current: dict[str, Any] = model.state_dict()
    names = {name.removeprefix("/model/"): name for name in saved.names("/model/")}
    if differing := sorted(set(current) ^ set(names)):
        raise ValueError(f"the checkpoint is of another model: {differing[0]} and others differ")
    for key, name in names.items():
        if saved.shape(name) != tuple(current[key].shape):
            raise ValueError(
                f"the checkpoint is of another model: {key} is {list(saved.shape(name))}, not"
                f" {list(current[key].shape)}"
            )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def owner(name: str) -> Tensor | None:
        """The parameter whose state this is: /optimizer/state/NUMBER/..."""
        _, _, part, *rest = name.split("/")
        if part != "state" or not rest or not rest[0].isdigit():
            return None
        return order.get(int(rest[0]))

    groups = saved.load("optimizer", lambda name: torch.empty(0))["param_groups"]
    saved_order = [number for group in groups for number in group["params"]]
    order = dict(zip(saved_order, parameters, strict=True))

    def finite(name: str, start: int = 0, stop: int | None = None) -> Tensor:
        rows = saved.read(name, start, stop)
        if rows.is_floating_point() and rows.numel():
            ends = torch.stack(torch.aminmax(rows))  # without a copy of the rows
            if not bool(ends.isfinite().all()):
                raise BrokenFileError(f"{saved.path}: {name[1:]} holds a number that is not finite")
        return rows

    def read(name: str) -> Tensor:
        like = owner(name)
        if like is None or saved.shape(name) != tuple(like.shape):
            return finite(name)
        return own_rows(like, lambda start, stop: finite(name, start, stop))

    with torch.no_grad():
        for key, name in names.items():
            into = current[key]
            start, stop = rows_of(into) or (0, into.shape[0] if into.dim() else 0)
            rows = saved.read(name, start, stop)
            check_finite(rows, f"{saved.path}: {key}")
            local(into).copy_(rows)
    optimizer.load_state_dict(saved.load("optimizer", read))
