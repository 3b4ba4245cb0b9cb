"""`nestling generate`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

__all__ = ["check_memory", "load", "parser", "run"]

_EXAMPLES = """examples:
  nestling generate runs/tiny/model --prompt "Day 1, spring."
  nestling generate runs/tiny/model --prompt "Day 1" --tokens 300 --temperature 0.8 --seed 1
  nestling generate MODEL --memory mine --prompt "Call me"   # after `nestling learn`"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="nestling generate",
        description="Continue a text with a trained model; tokens appear as they are made.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("model", help="folder, hub name, .gguf or llama2.c .bin file")
    made.add_argument("--memory", type=Path, help="folder of a memory made by `nestling learn`")
    made.add_argument("--prompt", default="", help="text to continue ('-' reads standard input)")
    made.add_argument("--tokens", type=int, default=200, help="how many to write (default 200)")
    made.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    made.add_argument("--top-p", type=float, default=0.95, help="nucleus of the sampling")
    made.add_argument("--seed", type=int, default=0)
    return made


def load(name: str) -> tuple[Any, Any]:
    """A causal language model, ours or another, and its tokenizer; libraries stay silent."""
    from nestling.cli.quiet import quiet

    with quiet():
        from transformers.utils import logging

        import nestling.models  # noqa: F401  (registers our classes)
        from nestling.adaptation import load_pretrained

        logging.set_verbosity_error()
        return load_pretrained(name)


def check_memory(memory: Path | None) -> None:
    """Refuse an empty name, which would be the folder one stands in."""
    if memory is not None and str(memory) in ("", "."):
        raise ValueError("--memory: the folder of a memory, by its own name; got an empty one")


def run(arguments: argparse.Namespace) -> int:
    """Write to standard output as tokens are made."""
    if arguments.tokens < 1:
        raise ValueError(f"--tokens must be at least 1; got {arguments.tokens}")
    if arguments.temperature < 0:
        raise ValueError(f"--temperature must be at least 0; got {arguments.temperature}")
    check_memory(arguments.memory)
    import torch
    from transformers import TextStreamer

    model, tokenizer = load(arguments.model)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
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
