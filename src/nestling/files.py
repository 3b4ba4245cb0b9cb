"""Tensors on disk that survive a power cut: atomic, checksummed, never pickled.

A saved tree is two files in a folder. `NAME-<digest>.safetensors` holds the tensors; `NAME.json`
names that file with its size and SHA-256 and carries the metadata. The tensors are written first,
then the JSON is replaced in one rename, then what it no longer names is removed. Whenever the
process dies, the JSON names a complete file: the old tree or the new one, never a mixture.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

__all__ = ["BrokenFileError", "load_tree", "save_tree", "sync_folder", "write_atomic"]

FORMAT = 1


class BrokenFileError(ValueError):
    """A file is missing, truncated, altered, or not what it should be; the message says which."""


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file by `data` so that a reader, or a crash, sees the old or the new bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    sync_folder(path.parent)


def save_tree(folder: Path, name: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
    """Save named tensors and JSON metadata in a folder; the old tree stays until it is done."""
    packed = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    data = safetensors.torch.save(packed)
    digest = hashlib.sha256(data).hexdigest()
    file = f"{name}-{digest[:16]}.safetensors"
    write_atomic(folder / file, data)
    manifest = {"format": FORMAT, "file": file, "bytes": len(data), "sha256": digest}
    checked = manifest | {"meta": meta, "check": _check(manifest, meta)}
    write_atomic(folder / f"{name}.json", _text(checked))
    for old in [*folder.glob(f"{name}-*.safetensors"), *folder.glob(f".{name}[-.]*.tmp")]:
        if old.name != file:
            with contextlib.suppress(FileNotFoundError):
                old.unlink()


def load_tree(folder: Path, name: str) -> tuple[dict[str, Tensor], Any]:
    """Read back what `save_tree` wrote; raises BrokenFileError if a bit has changed."""
    manifest = _read_manifest(folder / f"{name}.json")
    path = folder / manifest["file"]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BrokenFileError(
            f"{path}: named by {name}.json but cannot be read: {error}"
        ) from error
    if len(data) != manifest["bytes"]:
        raise BrokenFileError(
            f"{path}: {len(data)} bytes, but {manifest['bytes']} were saved: it was cut or extended"
        )
    if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
        raise BrokenFileError(f"{path}: its SHA-256 is not the saved one: the file was altered")
    try:
        return safetensors.torch.load(data), manifest["meta"]
    except safetensors.SafetensorError as error:
        raise BrokenFileError(f"{path}: not a safetensors file: {error}") from error


def _text(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1) + "\n").encode()


def _check(manifest: Mapping[str, Any], meta: Any) -> str:
    text = json.dumps([{k: manifest[k] for k in ("format", "file", "bytes", "sha256")}, meta])
    return hashlib.sha256(text.encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
    except OSError as error:
        raise BrokenFileError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise BrokenFileError(f"{path}: not a JSON file: {error}") from error
    keys = {"format", "file", "bytes", "sha256", "meta", "check"}
    if not isinstance(manifest, dict) or set(manifest) != keys:
        raise BrokenFileError(f"{path}: expected the keys {sorted(keys)}")
    if manifest["format"] != FORMAT:
        raise BrokenFileError(f"{path}: format {manifest['format']!r}; this version reads {FORMAT}")
    if _check(manifest, manifest["meta"]) != manifest["check"] or text != _text(manifest):
        raise BrokenFileError(f"{path}: its checksum does not match: the file was altered")
    if not isinstance(manifest["file"], str) or Path(manifest["file"]).name != manifest["file"]:
        raise BrokenFileError(f"{path}: names a file outside its folder: {manifest['file']!r}")
    return manifest
