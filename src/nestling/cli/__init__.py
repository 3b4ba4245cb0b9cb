"""The command `nestling`: one module per sub-command, imported when it is called.

A module offers `parser()`, whose help teaches, and `run(arguments) -> int`. What a user did wrong
(a ValueError or OSError with a clear message) ends in one line and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["COMMANDS", "Parser", "main"]

COMMANDS = {
    "demo": "train Hope and a Transformer, compare them on unseen text, write a report",
    "train": "train a model from a recipe; run the same command again to go on",
    "tune": "search the settings of a recipe under a budget",
    "generate": "let a model write",
    "learn": "let a pretrained model learn texts into a memory; goes on where it was",
    "eval": "perplexity on a file, loss against position",
    "cost": "operations, bytes and communication of a training run on GPUs",
    "describe": "show a model and its optimizer as nested levels",
    "doctor": "what this machine offers, and what to change",
}

EXTRAS = {
    **dict.fromkeys(("transformers", "tokenizers", "huggingface_hub", "accelerate", "rich"), "lm"),
    "matplotlib": "report",
    "lm_eval": "eval",
    "gguf": "gguf",
}
"""Packages that commands need, and the extra of nestling that brings each."""

_HELP = """usage: nestling COMMAND ...

Nested learning: models and optimizers that learn at many time scales.

commands:
{commands}

`nestling COMMAND --help` explains each, with examples."""


class Parser(argparse.ArgumentParser):
    """The arguments of a command; help is shown as it is written, a mistake is a ValueError."""

    def __init__(self, command: str, description: str, epilog: str | None = None) -> None:
        as_written: Any = argparse.RawDescriptionHelpFormatter
        super().__init__(f"nestling {command}", None, description, epilog, [], as_written)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments."""
        message = message.removeprefix("argument ")
        raise ValueError(f"{message} (`{self.prog} --help` explains)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; returns the exit code."""
    try:
        code = _main(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has gone, as with `| head -1`
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _main(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
        print(_HELP.format(commands=lines))
        return 0 if given else 2
    if given[0] == "--version":
        from nestling import __version__

        print(__version__)
        return 0
    name, *rest = given
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"nestling: unknown command {name!a}; known: {known}", file=sys.stderr)
        return 2
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        command = importlib.import_module(f"nestling.cli.{name}")
        return int(command.run(command.parser().parse_intermixed_args(rest)))
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        extra = f"pip install 'nestling[{EXTRAS[missing]}]'"
        print(f"nestling {name}: needs {missing}: {extra}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        said = _one_line(error).encode("utf-8", "backslashreplace").decode()
        print(f"nestling {name}: {said}", file=sys.stderr)
        return 2


def _one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.errno == errno.EBUSY:  # of nestling.files
        text = error.strerror or text
    return " ".join((text or type(error).__name__).split())
