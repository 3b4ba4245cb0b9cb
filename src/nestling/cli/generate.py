"""`nestling generate`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nestling.cli import Parser

_EXAMPLES = """examples:
  nestling generate nestling:small --prompt "It was a dark"  # a small model that comes along
  nestling generate runs/tiny/model --prompt "Day 1, spring."
  nestling generate runs/tiny/model --prompt "Day 1" --tokens 300 --temperature 0.8 --seed 1
  nestling generate MODEL --memory mine --prompt "Call me"   # after `nestling learn`"""


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        "generate",
        description="Continue a text with a trained model; tokens appear as they are made.",
        epilog=_EXAMPLES,
    )
    made.add_argument("model", help="folder, nestling:small, hub name, .gguf or llama2.c .bin file")
    made.add_argument("--memory", type=folder, help="folder of a memory made by `nestling learn`")
    made.add_argument("--prompt", default="", help="text to continue ('-' reads standard input)")
    made.add_argument("--tokens", type=int, default=200, help="how many to write (default 200)")
    made.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    made.add_argument("--top-p", type=float, default=0.95, help="nucleus of the sampling")
    made.add_argument("--seed", type=int, default=0, help="of all random choices (0)")
    trust_option(made)
    return made


def trust_option(made: argparse.ArgumentParser) -> None:
    """The option that lets a model's own Python code run."""
    made.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the model (only of people you trust)",
    )


def folder(text: str) -> Path:
    """A folder as an argument; an empty text would mean the present one, which nobody meant."""
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a folder, got an empty text")
    return Path(text)


def new_file(*suffixes: str) -> Callable[[str], Path]:
    """A file to be written, as an argument: its folder is there, and it ends as it should."""

    def check(text: str) -> Path:
        path = Path(text)
        if suffixes and path.suffix not in suffixes:
            raise argparse.ArgumentTypeError(f"must end in {' or '.join(suffixes)}; got {text!r}")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder")
        return path

    return check


def load(name: str, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """A causal language model, ours or another, and its tokenizer.

    Every command loads models here: complete ones only, and no code of theirs unless it is trusted.
    What libraries say meanwhile is not shown.
    """
    from nestling.cli.quiet import quiet

    with quiet():
        from transformers.utils import logging

        import nestling.models  # noqa: F401  (registers our classes)
        from nestling.adaptation import load_pretrained

        logging.set_verbosity_error()
        return load_pretrained(name, trust_remote_code=trust_remote_code)


def _standard_input() -> str:
    """All of standard input; bytes that are not UTF-8 are replaced."""
    return sys.stdin.buffer.read().decode("utf-8", "replace")


def run(arguments: argparse.Namespace) -> int:
    """Write to standard output as tokens are made."""
    if arguments.tokens < 1:
        raise ValueError(f"--tokens must be at least 1; got {arguments.tokens}")
    if not 0 <= arguments.temperature < math.inf:
        raise ValueError(
            f"--temperature must be a finite number from 0; got {arguments.temperature}"
        )
    if not 0 < arguments.top_p <= 1:
        raise ValueError(f"--top-p must lie in (0, 1]; got {arguments.top_p}")
    if not 0 <= arguments.seed < 1 << 63:
        raise ValueError(f"--seed must be from 0 to 2**63 - 1; got {arguments.seed}")
    if arguments.memory is not None and not (arguments.memory / "memory.json").exists():
        raise ValueError(f"--memory {str(arguments.memory)!r}: no memory is saved there")
    import torch
    from transformers import TextStreamer

    prompt = _standard_input() if arguments.prompt == "-" else arguments.prompt
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise ValueError("--prompt is not valid UTF-8")
    model, tokenizer = load(arguments.model, trust_remote_code=arguments.trust_remote_code)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    if ids.shape[1] == 0:
        start = tokenizer.bos_token_id
        ids = torch.tensor([[tokenizer.eos_token_id if start is None else start]])
    torch.manual_seed(arguments.seed)
    sampling: dict[str, Any] = {"do_sample": arguments.temperature > 0}
    if arguments.temperature > 0:
        sampling |= {"temperature": arguments.temperature, "top_p": arguments.top_p}
    writer = model
    if arguments.memory is not None:
        from nestling import load_learner

        writer = load_learner(model, arguments.memory, tokenizer=tokenizer)
    writer.generate(
        ids.long(),
        attention_mask=torch.ones_like(ids).long(),
        max_new_tokens=arguments.tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    return 0
