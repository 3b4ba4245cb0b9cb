"""Files that survive power cuts, other processes and strangers: atomic, locked, checked, bounded.

A saved tree is a folder with tensors and a manifest. `NAME-<digest>.safetensors` holds tensors;
`NAME.json` names that file (or several, one per process) with sizes and SHA-256 and carries the
metadata. The tensors are written first, then the manifest is replaced in one rename, then what the
manifest before it named is removed, all under a lock on the folder. Whenever the process dies, the
manifest names complete files: the old tree or the new one, never a mixture.

Nothing is trusted before it is checked: only regular files are opened, sizes are compared before
anything is read, every declared shape and type must fit the bytes that are there, and nothing is
ever unpickled. What does not hold raises `BrokenFileError` with the file and the reason.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.tree import pack, tree_walk, unpack

try:
    import fcntl
except ImportError:  # Windows: no locks between processes
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "BrokenFileError",
    "BusyError",
    "Manifest",
    "Part",
    "TensorFile",
    "check_state",
    "fingerprint",
    "load_state",
    "load_tree",
    "locked",
    "open_regular",
    "read_facts",
    "read_json",
    "read_manifest",
    "save_state",
    "save_tree",
    "sync_folder",
    "verify",
    "write_atomic",
    "write_manifest",
    "write_tensors",
]

FORMAT = 2  # of the manifest; 1 named a single file
VERSION = 2  # of saved states; 1 had a form of its own for each kind
JSON_LIMIT = 64 << 20  # bytes of a manifest
TENSOR_LIMIT = 1 << 40  # bytes of one file of tensors, unless the caller knows better
DIMENSIONS = 16  # of a tensor
BLOCK = 1 << 20


class BrokenFileError(ValueError):
    """A file is missing, truncated, altered, or not what it should be; the message says which."""


class BusyError(OSError):
    """Another process is using a folder; the message names it."""


# Reading with bounds


def open_regular(path: Path, limit: int | None = None) -> IO[bytes]:
    """Open a regular file of at most `limit` bytes for reading.

    Pipes, devices and folders are refused without being read; opening never blocks.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        raise BrokenFileError(f"{path}: cannot be read: {error}") from error
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise BrokenFileError(f"{path}: not a regular file")
        if limit is not None and facts.st_size > limit:
            raise BrokenFileError(
                f"{path}: {facts.st_size} bytes; at most {limit} are read for a file of this kind"
            )
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_json(path: Path, limit: int = JSON_LIMIT) -> tuple[Any, bytes]:
    """The value in a JSON file of at most `limit` bytes, and the bytes it was read from."""
    with open_regular(path, limit) as file:
        text = file.read(limit + 1)
    try:
        return json.loads(text), text
    except (ValueError, RecursionError) as error:
        raise BrokenFileError(f"{path}: not a JSON file: {error}") from error


# Writing


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file by `data` so that a reader, or a crash, sees the old or the new bytes.

    The file can be read by its owner only (mode 0600).
    """
    with _atomic(path.parent, f".{path.name}.") as (file, finish):
        file.write(data)
        finish(path)


@contextlib.contextmanager
def _atomic(folder: Path, prefix: str) -> Iterator[tuple[IO[bytes], Any]]:
    """A temporary file in a folder, and the function that makes it durable under its name."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=prefix, suffix=".tmp")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:

            def finish(path: Path) -> None:
                file.flush()
                os.fsync(file.fileno())
                os.replace(name, path)

            yield file, finish
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    sync_folder(folder)


# Locks


class _Held(NamedTuple):
    thread: Any  # an RLock: one thread at a time, and again inside
    depth: list[int]


_HELD: dict[str, _Held] = {}
_GUARD = threading.Lock()


@contextlib.contextmanager
def locked(folder: Path, *, wait: float = 0.0, name: str = ".lock") -> Iterator[None]:
    """Keep a folder for this process (and thread) while the block lasts.

    Waits at most `wait` seconds for another holder, then raises BusyError, which names it. The same
    thread may lock a folder again inside. The lock is `flock` on `FOLDER/.lock` (or another `name`,
    for a part of the folder): it ends with the process that holds it, however that ends, and leaves
    no file behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = str(folder.resolve() / name)
    with _GUARD:
        held = _HELD.setdefault(path, _Held(threading.RLock(), [0]))
    if not held.thread.acquire(timeout=max(wait, 0.0)):
        raise BusyError(errno.EBUSY, f"{folder} is in use by another thread of this process")
    try:
        if held.depth[0] or fcntl is None:
            held.depth[0] += 1
            try:
                yield
            finally:
                held.depth[0] -= 1
            return
        handle = _flock(folder, path, wait)
        held.depth[0] = 1
        try:
            yield
        finally:
            held.depth[0] = 0
            with contextlib.suppress(OSError):
                os.unlink(path)  # while it is held: whoever opened it finds it gone, and retries
            os.close(handle)
    finally:
        held.thread.release()


def _flock(folder: Path, path: str, wait: float) -> int:
    deadline = time.monotonic() + wait
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(handle).st_ino:
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, _own_name().encode(), 0)
                    return handle
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = os.pread(handle, 400, 0).decode(errors="replace") or "another process"
                os.close(handle)
                raise BusyError(
                    errno.EBUSY, f"{folder} is in use by {holder}; wait for it or end it"
                ) from None
            time.sleep(0.005)
        os.close(handle)


def _own_name() -> str:
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:120]
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} ({command}), since {since}"


# Tensors in one file


class Part(NamedTuple):
    """A file of tensors as a manifest names it."""

    file: str
    bytes: int
    sha256: str


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def write_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> Part:
    """Write a safetensors file `STEM-<digest>.safetensors`, one tensor at a time.

    Memory grows by one tensor at most (none for contiguous ones on the CPU).
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _CODES:
            raise TypeError(f"cannot save {name}: tensors of {tensor.dtype} have no saved form")
        start, end = end, end + tensor.numel() * tensor.element_size()
        entry = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = entry | {"data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with _atomic(folder, f".{stem}-") as (file, finish):
        for block in _blocks(text, (tensors[name] for name in order)):
            digest.update(block)
            file.write(block)
        name = f"{stem}-{digest.hexdigest()[:16]}.safetensors"
        finish(folder / name)
    return Part(name, 8 + len(text) + end, digest.hexdigest())


def _blocks(header: bytes, tensors: Iterator[Tensor]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors:
        if tensor.numel():
            yield _bytes_of(tensor.detach().cpu().contiguous())


class TensorFile:
    """A safetensors file to read from: shapes first, then any rows of any tensor.

    Closed, it can still be read: the file is opened again for each tensor.
    """

    def __init__(self, path: Path, limit: int = TENSOR_LIMIT, size: int | None = None) -> None:
        self.path = path
        self._file = open_regular(path, limit)
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            if size is not None and self.size != size:
                raise BrokenFileError(
                    f"{path}: {self.size} bytes, but {size} were saved: it was cut or extended"
                )
            self._entries = self._header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        if not self._file.closed:
            yield self._file
            return
        with open_regular(self.path) as file:
            if os.fstat(file.fileno()).st_size != self.size:
                raise BrokenFileError(f"{self.path}: it was changed while it was read")
            yield file

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self._entry(name)[1]

    def dtype(self, name: str) -> torch.dtype:
        """The type of one tensor."""
        return self._entry(name)[0]

    def digest(self) -> str:
        """The SHA-256 of the whole file, read block by block."""
        found = hashlib.sha256()
        self._file.seek(0)
        while block := self._file.read(BLOCK):
            found.update(block)
        return found.hexdigest()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """One tensor, or its rows from `start` to `stop`; memory grows by that much."""
        dtype, shape, offset = self._entry(name)
        if shape:
            stop = shape[0] if stop is None else stop
            if not 0 <= start <= stop <= shape[0]:
                raise BrokenFileError(f"{self.path}: {name} has no rows {start} to {stop}")
            offset += start * math.prod(shape[1:]) * dtype.itemsize
            shape = (stop - start, *shape[1:])
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            with self._opened() as file:
                file.seek(offset)
                wanted, done = _bytes_of(tensor), 0
                while done < len(wanted):
                    got = file.readinto(wanted[done : done + BLOCK])
                    if not got:
                        raise BrokenFileError(f"{self.path}: ends inside {name}")
                    done += got
        return tensor

    def _entry(self, name: str) -> tuple[torch.dtype, tuple[int, ...], int]:
        if name not in self._entries:
            raise BrokenFileError(f"{self.path}: the tensor {name} is missing")
        return self._entries[name]

    def _header(self) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
        """Every tensor's type, shape and place, after checking that the file holds just these."""
        length = int.from_bytes(self._file.read(8), "little")
        if self.size < 8 or length > min(JSON_LIMIT, self.size - 8):
            raise self._broken(f"a header of {length} bytes in a file of {self.size}")
        try:
            header = json.loads(self._file.read(length))
        except (ValueError, RecursionError) as error:
            raise self._broken(f"its header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._broken("its header is not a table of tensors")
        header.pop("__metadata__", None)
        found: list[tuple[int, int, str, torch.dtype, tuple[int, ...]]] = []
        for name, entry in header.items():
            dtype, shape, (start, end) = self._checked(name, entry)
            if end - start != math.prod(shape) * dtype.itemsize:
                raise self._broken(f"{name} of shape {list(shape)} in {end - start} bytes")
            found.append((start, end, name, dtype, shape))
        place = 0
        for start, end, name, _, _ in sorted(found, key=lambda each: each[:2]):
            if start != place:
                raise self._broken(f"{name} starts at {start}, not at {place}")
            place = end
        if 8 + length + place != self.size:
            raise self._broken(f"its tensors end at {8 + length + place} of {self.size} bytes")
        data = 8 + length
        return {name: (dtype, shape, data + start) for start, _, name, dtype, shape in found}

    def _checked(self, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], list[int]]:
        if not isinstance(entry, dict):
            raise self._broken(f"{name} is not described")
        code: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        offsets: Any = entry.get("data_offsets")
        if not isinstance(code, str) or code not in _DTYPES:
            raise self._broken(f"{name} has the unknown type {str(code)[:20]!r}")
        if not _whole(shape) or len(shape) > DIMENSIONS or not _whole(offsets) or len(offsets) != 2:
            raise self._broken(f"{name} has no proper shape or place")
        return _DTYPES[code], tuple(shape), offsets

    def _broken(self, reason: str) -> BrokenFileError:
        return BrokenFileError(f"{self.path}: not a safetensors file: {reason}")


def _whole(values: Any) -> bool:
    """True for a list of whole numbers from 0 to 2**62."""
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= 1 << 62 for v in values
    )


# Manifests


class Manifest(NamedTuple):
    """What `NAME.json` says, checked."""

    parts: tuple[Part, ...]
    meta: Any


def write_manifest(folder: Path, name: str, parts: Sequence[Part], meta: Any) -> None:
    """Name complete files and their metadata; from here on they are the saved tree."""
    listed = [part._asdict() for part in parts]
    text = _text({"format": FORMAT, "files": listed, "meta": meta, "check": _check(listed, meta)})
    if len(text) > JSON_LIMIT:
        raise ValueError(f"{folder}/{name}.json: {len(text)} bytes of metadata; at most 64 MiB fit")
    write_atomic(folder / f"{name}.json", text)


def read_manifest(folder: Path, name: str) -> Manifest:
    """Read and check `NAME.json`; the files it names are not read."""
    path = folder / f"{name}.json"
    found, text = read_json(path)
    form = found.get("format") if isinstance(found, dict) else None
    if form not in (1, FORMAT) or isinstance(form, bool):
        if isinstance(found, dict) and "format" in found:
            raise BrokenFileError(f"{path}: format {str(form)[:20]!r}; this version reads 1 and 2")
        raise BrokenFileError(f"{path}: not a manifest")
    keys = {"format", "meta", "check"} | ({"files"} if form == FORMAT else set(Part._fields))
    if set(found) != keys:
        raise BrokenFileError(f"{path}: expected the keys {sorted(keys)}")
    listed = found["files"] if form == FORMAT else [{k: found[k] for k in Part._fields}]
    check = _check(listed, found["meta"]) if form == FORMAT else _check_1(found)
    if check != found["check"] or text != _text(found):
        raise BrokenFileError(f"{path}: its checksum does not match: the file was altered")
    if not isinstance(listed, list):
        raise BrokenFileError(f"{path}: names no files")
    return Manifest(tuple(_part(path, each) for each in listed), found["meta"])


def _part(path: Path, listed: Any) -> Part:
    if not isinstance(listed, dict) or set(listed) != set(Part._fields):
        raise BrokenFileError(f"{path}: a file is described by {sorted(Part._fields)}")
    part = Part(**listed)
    if not isinstance(part.file, str) or Path(part.file).name != part.file:
        raise BrokenFileError(f"{path}: names a file outside its folder: {str(part.file)[:80]!r}")
    if not _whole([part.bytes]) or not isinstance(part.sha256, str):
        raise BrokenFileError(f"{path}: {part.file} without a size and a SHA-256")
    return part


def _text(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1) + "\n").encode()


def _check(listed: Any, meta: Any) -> str:
    return hashlib.sha256(json.dumps([FORMAT, listed, meta]).encode()).hexdigest()


def _check_1(found: Mapping[str, Any]) -> str:
    named = {key: found[key] for key in ("format", *Part._fields)}
    return hashlib.sha256(json.dumps([named, found["meta"]]).encode()).hexdigest()


def verify(folder: Path, part: Part, limit: int = TENSOR_LIMIT) -> TensorFile:
    """Open a file that a manifest names, after checking its size, its header and its SHA-256."""
    path = folder / part.file
    opened = TensorFile(path, limit, part.bytes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(opened)
        if opened.digest() != part.sha256:
            raise BrokenFileError(f"{path}: its SHA-256 is not the saved one: the file was altered")
        stack.pop_all()
    return opened


# Trees of tensors


def save_tree(folder: Path, name: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
    """Save named tensors and JSON metadata in a folder; the old tree stays until it is done.

    Writers of one folder take turns. Removed is what the manifest before named, and what an
    interrupted save left; never a file of anyone else.
    """
    with locked(folder, wait=120.0):
        note = folder / f".{name}.next"  # names what an interrupted save leaves behind
        old = {*_named_by(folder, name), *_noted(note, name)}
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}.") as building:
            part = write_tensors(Path(building), name, tensors)
            note.write_text(json.dumps(sorted({*old, part.file})))
            os.replace(Path(building) / part.file, folder / part.file)
        sync_folder(folder)
        write_manifest(folder, name, [part], meta)
        for file in old - {part.file}:
            with contextlib.suppress(FileNotFoundError):
                (folder / file).unlink()
        note.unlink()
        _sweep(folder, name)


def _named_by(folder: Path, name: str) -> list[str]:
    try:
        return [part.file for part in read_manifest(folder, name).parts]
    except BrokenFileError:
        return []


def _noted(note: Path, name: str) -> list[str]:
    try:
        found = read_json(note, 1 << 20)[0]
    except BrokenFileError:
        return []
    files = found if isinstance(found, list) else []
    return [f for f in files if isinstance(f, str) and Path(f).name == f and f.startswith(name)]


def _sweep(folder: Path, name: str) -> None:
    """Remove temporary files of writers that were killed (no other writer is here: the lock)."""
    import shutil

    for path in folder.glob(f".{name}.*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix == ".tmp":
            with contextlib.suppress(OSError):
                os.unlink(path)
    for path in folder.glob(f".{name}-*.tmp"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def load_tree(
    folder: Path, name: str, *, limit: int = TENSOR_LIMIT
) -> tuple[dict[str, Tensor], Any]:
    """Read back what `save_tree` wrote; raises BrokenFileError if a bit has changed.

    A tree that a writer replaces meanwhile is read again. `limit` bounds each file's size.
    """
    for attempt in range(100):
        manifest = read_manifest(folder, name)
        try:
            tensors: dict[str, Tensor] = {}
            for part in manifest.parts:
                with verify(folder, part, limit) as file:
                    for key in file:
                        if key in tensors:
                            raise BrokenFileError(f"{folder}: {key} is there twice")
                        tensors[key] = file.read(key)
            return tensors, manifest.meta
        except BrokenFileError as error:
            missing = not all((folder / part.file).exists() for part in manifest.parts)
            if missing and _replaced(folder, name, manifest):
                time.sleep(0.001 * attempt)
                continue
            if missing:
                raise BrokenFileError(f"{error} (named by {name}.json)") from error
            raise
    raise BrokenFileError(f"{folder}: {name}.json is replaced faster than it can be read")


def _replaced(folder: Path, name: str, manifest: Manifest) -> bool:
    try:
        return read_manifest(folder, name) != manifest
    except BrokenFileError:
        return False


# States


def save_state(folder: Path, name: str, kind: str, value: Any, facts: Mapping[str, Any]) -> None:
    """Save a tree of tensors and plain values (`tree.pack`) with facts about it, as a `kind`."""
    tensors, skeleton = pack(value)
    save_tree(folder, name, tensors, {"kind": kind, "version": VERSION, **facts, "is": skeleton})


def load_state(
    folder: Path,
    name: str,
    kind: str,
    types: Mapping[str, type] | None = None,
    *,
    limit: int = TENSOR_LIMIT,
) -> tuple[Any, dict[str, Any]]:
    """The value and the facts that `save_state` wrote; every tensor is used, none is missing.

    `types` are the NamedTuples the value may hold (`tree.named_tuples`).
    """
    meta = read_manifest(folder, name).meta
    _check_kind(folder, kind, meta)
    tensors, meta = load_tree(folder, name, limit=limit)
    _check_kind(folder, kind, meta)
    try:
        value = unpack(tensors, meta["is"], types)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenFileError(f"{folder}: not a {kind}: {error}") from error
    if spare := set(tensors) - set(pack(value)[0]):
        raise BrokenFileError(
            f"{folder}: not a {kind}: unknown parts {', '.join(sorted(spare)[:5])}"
        )
    return value, _facts(meta)


def _check_kind(folder: Path, kind: str, meta: Any) -> None:
    if not isinstance(meta, dict) or meta.get("kind") != kind:
        raise BrokenFileError(
            f"{folder}: a saved tree, but not a {kind} (or one that an early nestling saved, which"
            " this one does not read)"
        )
    if meta.get("version") != VERSION or isinstance(meta["version"], bool):
        raise BrokenFileError(
            f"{folder}: a {kind} of version {str(meta.get('version'))[:20]}, by another nestling;"
            f" this one reads version {VERSION}"
        )


def read_facts(folder: Path, name: str, kind: str) -> dict[str, Any]:
    """The facts of a saved state alone, after checking every byte of its files."""
    manifest = read_manifest(folder, name)
    _check_kind(folder, kind, manifest.meta)
    for part in manifest.parts:
        with verify(folder, part):
            pass
    return _facts(manifest.meta)


def _facts(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {key: meta[key] for key in meta if key not in ("kind", "version", "is")}


def check_state(state: Any, template: Any, batch: int, name: str = "the state") -> None:
    """Raise ValueError unless a state has the form, types and sizes of `template`, and is finite.

    The template is a fresh state of any batch size; a size of 0 in it may have grown (attention
    caches), and a part that is None in it may be there.
    """
    found, wanted = (
        {tuple(key for _, key in path): leaf for path, leaf in tree_walk(each)}
        for each in (state, template)
    )
    for path, leaf in found.items():
        part = f"{name}: {'.'.join(map(str, path))}"
        if leaf.dim() < 1 or leaf.shape[0] != batch:
            raise ValueError(f"{part} has the shape {list(leaf.shape)} for {batch} sequences")
        if not leaf.is_floating_point():
            if leaf.dtype.is_signed and bool((leaf < 0).any()):
                raise ValueError(f"{part} holds a negative number")
        elif not bool(leaf.isfinite().all()):
            raise ValueError(f"{part} holds a number that is not finite")
        like = wanted.get(path)
        if like is None:
            continue
        if leaf.dtype != like.dtype:
            raise ValueError(f"{part} is {leaf.dtype}, not {like.dtype}")
        fits = leaf.dim() == like.dim() and all(
            have == want or want == 0
            for have, want in zip(leaf.shape[1:], like.shape[1:], strict=True)
        )
        if not fits:
            raise ValueError(f"{part} has the shape {list(leaf.shape)}, not {list(like.shape)}")
    if missing := [path for path in wanted if path not in found]:
        raise ValueError(f"{name}: {'.'.join(map(str, missing[0]))} is missing")
    _same_form(state, template, name)


def _same_form(state: Any, template: Any, name: str) -> None:
    if isinstance(state, tuple) and isinstance(template, tuple):
        if type(state) is not type(template) or len(state) != len(template):
            raise ValueError(f"{name}: {type(state).__name__} in place of a {type(template)}")
        for part, like in zip(state, template, strict=True):
            _same_form(part, like, name)
    elif isinstance(template, tuple) or (isinstance(state, tuple) and template is not None):
        raise ValueError(f"{name}: {type(state).__name__} in place of {type(template).__name__}")


_NOT_SHAPING = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


def fingerprint(model: nn.Module) -> str:
    """A checksum of a whole model: its class, its configuration, and every bit of its weights.

    Of a Hugging Face configuration everything counts that can change what the model computes
    (`rope_theta`, `rms_norm_eps`, ...); versions, names and special tokens do not.
    """
    config: Any = getattr(model, "config", None)
    fields = config.to_dict() if hasattr(config, "to_dict") else {}
    shaping = {
        key: value
        for key, value in fields.items()
        if not key.startswith("_") and not key.endswith("_token_id") and key not in _NOT_SHAPING
    }
    facts = [type(model).__name__, shaping]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        if isinstance(weight, Tensor):
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)};".encode())
            if weight.numel():
                digest.update(_bytes_of(weight.detach().cpu().contiguous()))
    return digest.hexdigest()
