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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.tree import pack, tree_walk, unpack

try:
    import fcntl
except ImportError:  # Windows: no locks between processes
    fcntl = None  # type: ignore[assignment]


FORMAT = 2  # of the manifest
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


def check_folder(folder: Path) -> dict[Path, int]:
    """The bytes of each file in a model's folder; all are regular, and no settings are huge."""
    sizes = {}
    for path in folder.iterdir():
        if path.is_dir():
            continue
        plain = path.suffix in (".json", ".jinja", ".model") or path.name in _WORDS
        with open_regular(path, JSON_LIMIT if plain else None) as file:
            sizes[path] = os.fstat(file.fileno()).st_size
    return sizes


_WORDS = ("vocab.txt", "merges.txt")  # other text files hold no settings


def read_json(path: Path, limit: int = JSON_LIMIT) -> tuple[Any, bytes]:
    """The value in a JSON file of at most `limit` bytes, and the bytes it was read from."""
    with open_regular(path, limit) as file:
        text = file.read(limit + 1)
    return _parsed(text, path), text


def _parsed(text: bytes, where: object) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenFileError(f"{where}: not a JSON file: {error}") from error


def expect(found: Any, form: Any, where: object) -> Any:
    """The value, if it has this form; a BrokenFileError that says `where` it has not.

    A form is a type (`int` means a whole number from 0 to 2**62, `object` anything), a set of
    values, `[form]` for a list of such, or a dict of forms for a dict of just these keys.
    """
    if isinstance(form, dict):
        if not isinstance(found, dict) or found.keys() != form.keys():
            raise BrokenFileError(f"{where}: expected the keys {', '.join(sorted(form))}")
        for key, part in form.items():
            expect(found[key], part, f"{where}: {key}")
    elif isinstance(form, list):
        for part in expect(found, list, where):
            expect(part, form[0], where)
    elif isinstance(form, set):
        if not isinstance(found, int | str) or isinstance(found, bool) or found not in form:
            known = ", ".join(map(str, sorted(form)))
            raise BrokenFileError(f"{where}: {str(found)[:40]!r} is not one of {known}")
    elif not isinstance(found, form) or (
        form is int and (isinstance(found, bool) or not 0 <= found <= 1 << 62)
    ):
        raise BrokenFileError(f"{where}: expected {form.__name__}, got {str(found)[:40]!r}")
    return found


def check_finite(tensor: Tensor, what: object) -> None:
    """Refuse numbers that are not finite, or whose squares are not."""
    if tensor.is_floating_point():
        exact = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        held = tensor.float() if tensor.dtype.itemsize == 1 else tensor
        if not bool(torch.linalg.vector_norm(held.detach(), dtype=exact).isfinite()):
            raise BrokenFileError(f"{what} holds a number that is not finite, or beyond all use")


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
    with _atomic(path.parent, path.name) as (file, finish):
        file.write(data)
        finish(path)


@contextlib.contextmanager
def _atomic(folder: Path, name: str) -> Iterator[tuple[IO[bytes], Callable[[Path], None]]]:
    """A file to write to, and the function that makes it durable under its name.

    It is `FOLDER/.NAME.tmp`: whoever writes that name next takes over what a killed process left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    building = str(folder / f".{name}.tmp")
    with os.fdopen(_claim(building, 120.0), "wb") as file:
        try:

            def finish(path: Path) -> None:
                file.flush()
                os.fsync(file.fileno())
                os.replace(building, path)

            os.ftruncate(file.fileno(), 0)
            yield file, finish
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(building)
            raise
    sync_folder(folder)


# Locks


_HELD: dict[str, threading.RLock] = {}  # one thread at a time, and that one again inside
_DEPTH: dict[str, int] = {}
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
        held = _HELD.setdefault(path, threading.RLock())
    if not held.acquire(timeout=max(wait, 0.0)):
        raise BusyError(errno.EBUSY, f"{folder} is in use by another thread of this process")
    depth, handle = _DEPTH.get(path, 0), None
    try:
        if depth == 0 and fcntl is not None:
            handle = _flock(folder, path, wait)
        _DEPTH[path] = depth + 1
        yield
    finally:
        _DEPTH[path] = depth
        if handle is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)  # while it is held: whoever opened it finds it gone, and retries
            os.close(handle)
        held.release()


def _flock(folder: Path, path: str, wait: float) -> int:
    try:
        handle = _claim(path, wait)
    except BlockingIOError:
        holder = ""
        with contextlib.suppress(OSError):
            holder = Path(path).read_bytes()[:400].decode(errors="replace")
        raise BusyError(
            errno.EBUSY,
            f"{folder} is in use by {holder or 'another process'}; wait for it or end it",
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, _own_name().encode(), 0)
    return handle


def _claim(path: str, wait: float) -> int:
    """Open a file, made if it is not there, that this process alone holds; mode 0600."""
    deadline = time.monotonic() + wait
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
        try:
            _lock(handle)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(handle).st_ino:  # and nobody renamed it
                    return handle
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(handle)
                raise
            time.sleep(0.005)
        os.close(handle)


_OPEN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


def _lock(handle: int) -> None:
    """Lock an open file, or raise BlockingIOError; where there are no locks, do nothing."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise


def _own_name() -> str:
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:120]
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} ({command}), since {since}"


# Tensors in one file


class FilePart(NamedTuple):
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


def write_tensors(
    folder: Path,
    stem: str,
    tensors: Mapping[str, Tensor],
    about_to: Callable[[str], None] = lambda name: None,
) -> FilePart:
    """Write a safetensors file `STEM-<digest>.safetensors`, one tensor at a time.

    Memory grows by one tensor at most (none for contiguous ones on the CPU). `about_to(name)` is
    called before the file gets its name.
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
    with _atomic(folder, stem) as (file, finish):
        for block in _blocks(text, (tensors[name] for name in order)):
            digest.update(block)
            file.write(block)
        name = f"{stem}-{digest.hexdigest()[:16]}.safetensors"
        about_to(name)
        finish(folder / name)
    return FilePart(name, 8 + len(text) + end, digest.hexdigest())


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
        where = f"{self.path}: not a safetensors file"
        length = int.from_bytes(self._file.read(8), "little")
        if self.size < 8 or length > min(JSON_LIMIT, self.size - 8):
            raise BrokenFileError(f"{where}: a header of {length} bytes in a file of {self.size}")
        header = expect(_parsed(self._file.read(length), where), dict, where)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            expect(entry, _ENTRY, f"{where}: {name}")
            shape, offsets = entry["shape"], entry["data_offsets"]
            if len(shape) > DIMENSIONS or len(offsets) != 2:
                raise BrokenFileError(f"{where}: {name} has no proper shape or place")
            held = math.prod(shape) * _DTYPES[entry["dtype"]].itemsize
            if offsets[1] - offsets[0] != held:
                raise BrokenFileError(f"{where}: {name} of shape {shape} at {offsets}")
        data = place = 8 + length
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = entry["data_offsets"]
            if data + start != place:
                raise BrokenFileError(f"{where}: {name} starts at {data + start}, not at {place}")
            place = data + end
        if place != self.size:
            raise BrokenFileError(f"{where}: its tensors end at {place} of {self.size} bytes")
        return {
            name: (_DTYPES[entry["dtype"]], tuple(entry["shape"]), data + entry["data_offsets"][0])
            for name, entry in header.items()
        }


_ENTRY = {"dtype": set(_DTYPES), "shape": [int], "data_offsets": [int]}


# Manifests


class Manifest(NamedTuple):
    """The content of `NAME.json`, checked."""

    parts: tuple[FilePart, ...]
    meta: Any


def write_manifest(folder: Path, name: str, parts: Sequence[FilePart], meta: Any) -> None:
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
    if not isinstance(found, dict) or "format" not in found:
        raise BrokenFileError(f"{path}: not a manifest")
    expect(found["format"], {FORMAT}, f"{path}: the format")
    expect(found, _MANIFEST, path)
    listed = found["files"]
    if found["check"] != _check(listed, found["meta"]) or text != _text(found):
        raise BrokenFileError(f"{path}: its checksum does not match: the file was altered")
    for each in listed:
        if Path(each["file"]).name != each["file"]:
            raise BrokenFileError(f"{path}: names a file outside its folder: {each['file'][:80]!r}")
    return Manifest(tuple(FilePart(**each) for each in listed), found["meta"])


_FILE = {"file": str, "bytes": int, "sha256": str}
_MANIFEST = {"format": {FORMAT}, "files": [_FILE], "meta": object, "check": str}


def _text(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1) + "\n").encode()


def _check(listed: Any, meta: Any) -> str:
    return hashlib.sha256(json.dumps([FORMAT, listed, meta]).encode()).hexdigest()


def verify(folder: Path, part: FilePart, limit: int = TENSOR_LIMIT) -> TensorFile:
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
        old = _left_by(folder, name, note)
        part = write_tensors(folder, name, tensors, lambda new: _note(note, sorted({*old, new})))
        write_manifest(folder, name, [part], meta)
        for file in old - {part.file}:
            with contextlib.suppress(FileNotFoundError):
                (folder / file).unlink()
        note.unlink()


def _note(note: Path, names: list[str]) -> None:
    note.write_text(json.dumps(names))


def _left_by(folder: Path, name: str, note: Path) -> set[str]:
    """The files of the present tree, and of a save that was interrupted."""
    old: set[str] = set()
    with contextlib.suppress(BrokenFileError):
        old |= {part.file for part in read_manifest(folder, name).parts}
    with contextlib.suppress(BrokenFileError):
        noted = expect(read_json(note, 1 << 20)[0], [str], note)
        old |= {file for file in noted if Path(file).name == file and file.startswith(name)}
    return old


def load_tree(
    folder: Path, name: str, *, kind: str | None = None, limit: int = TENSOR_LIMIT
) -> tuple[dict[str, Tensor], Any]:
    """Read back what `save_tree` wrote; raises BrokenFileError if a bit has changed.

    A tree that a writer replaces meanwhile is read again. `limit` bounds each file's size; `kind`
    is what `save_record` called it.
    """
    for attempt in range(100):
        manifest = read_manifest(folder, name)
        if kind is not None:
            _check_kind(folder, kind, manifest.meta)
        try:
            tensors: dict[str, Tensor] = {}
            for part in manifest.parts:
                with verify(folder, part, limit) as file:
                    for key in file:
                        if key in tensors:
                            raise BrokenFileError(f"{folder}: {key} is there twice")
                        tensors[key] = file.read(key)
            return tensors, manifest.meta
        except BrokenFileError:
            if read_manifest(folder, name) == manifest:
                raise
            time.sleep(0.001 * attempt)
    raise BrokenFileError(f"{folder}: {name}.json is replaced faster than it can be read")


# States


def save_record(folder: Path, name: str, kind: str, value: Any, facts: Mapping[str, Any]) -> None:
    """Save a tree of tensors and plain values (`tree.pack`) with facts about it, as a `kind`."""
    tensors, skeleton = pack(value)
    save_tree(folder, name, tensors, {"kind": kind, "version": VERSION, **facts, "is": skeleton})


def load_record(
    folder: Path,
    name: str,
    kind: str,
    types: Mapping[str, type] | None = None,
    *,
    limit: int = TENSOR_LIMIT,
) -> tuple[Any, dict[str, Any]]:
    """The value and the facts that `save_record` wrote; every tensor is used, none is missing.

    `types` are the NamedTuples the value may hold (`tree.named_tuples`).
    """
    tensors, meta = load_tree(folder, name, kind=kind, limit=limit)
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
        if not leaf.is_floating_point() and leaf.dtype.is_signed and bool((leaf < 0).any()):
            raise ValueError(f"{part} holds a negative number")
        check_finite(leaf, part)
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
