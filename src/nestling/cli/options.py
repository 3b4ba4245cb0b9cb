"""Parts that several commands share: options, a model by name, silence of other libraries."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

MODEL = "folder, nestling:small, hub name, .gguf or llama2.c .bin file"
"""The help for the argument that names a model."""


def whole(least: int = 1, most: float = float("inf")) -> Callable[[str], int]:
    """The type of an argument that is a whole number from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"must be a whole number; got {text!r}") from None
        if not least <= value <= most:
            beyond = f" and at most {most}" if value > most else ""
            raise ArgumentTypeError(f"must be at least {least}{beyond}; got {value}")
        return value

    return read


def number(allowed: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """The type of an argument that is a number that is `allowed`; `words` say which are."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ArgumentTypeError(f"must be a number; got {text!r}") from None
        if not allowed(value):
            raise ArgumentTypeError(f"must be {words}; got {value}")
        return value

    return read


def several(read: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """The type of an argument with commas between its values."""
    return lambda text: [read(part) for part in text.split(",")]


def folder(text: str) -> Path:
    """The type of a folder; an empty text, which would be the present folder, is refused."""
    if not text.strip():
        raise ArgumentTypeError("expected a folder, got an empty text")
    return Path(text)


def new_file(*suffixes: str) -> Callable[[str], Path]:
    """The type of a file to be written: its folder is there, and it ends as it should."""

    def check(text: str) -> Path:
        path = Path(text)
        if suffixes and path.suffix not in suffixes:
            raise ArgumentTypeError(f"must end in {' or '.join(suffixes)}; got {text!r}")
        if not path.parent.is_dir():
            raise ArgumentTypeError(f"there is no folder {path.parent}")
        if path.is_dir():
            raise ArgumentTypeError(f"{text!r} is a folder")
        return path

    return check


def trust_option(made: argparse.ArgumentParser) -> None:
    """The option that lets a model's own Python code run."""
    made.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the model (only of people you trust)",
    )


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The causal language model that a command's arguments name, ours or another, and tokenizer.

    Every command loads models here: complete ones only, and no code of theirs unless it is trusted.
    What libraries say meanwhile is not shown.
    """
    with quiet():
        from transformers.utils import logging

        import nestling.models  # noqa: F401  (registers our classes)
        from nestling.adaptation import load_pretrained

        logging.set_verbosity_error()
        return load_pretrained(arguments.model, trust_remote_code=arguments.trust_remote_code)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide everything that is written to standard error within the block.

    Progress bars, log lines and the words of subprocesses ("not a git repository") are held back.
    Errors are exceptions and pass.
    """
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # no standard error at all
        yield
        return
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        held, python = sys.stderr, os.fdopen(os.dup(2), "w")
        sys.stderr = python
        try:
            yield
        finally:
            sys.stderr = held
            python.close()
            os.dup2(kept, 2)
            os.close(kept)
