"""`nestling generate`."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from nestling.cli import Parser
from nestling.cli.options import MODEL, folder, load, number, trust_option, whole

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
    made.add_argument("model", help=MODEL)
    made.add_argument("--memory", type=folder, help="folder of a memory made by `nestling learn`")
    made.add_argument("--prompt", default="", help="text to continue ('-' reads standard input)")
    made.add_argument("--tokens", type=whole(), default=200, help="how many to write (default 200)")
    finite = number(lambda value: 0 <= value < math.inf, "a finite number from 0")
    share = number(lambda value: 0 < value <= 1, "in (0, 1]")
    made.add_argument("--temperature", type=finite, default=0.8, help="0 takes the likeliest")
    made.add_argument("--top-p", type=share, default=0.95, help="nucleus of the sampling")
    made.add_argument(
        "--seed", type=whole(0, (1 << 63) - 1), default=0, help="of all random choices (0)"
    )
    trust_option(made)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Write to standard output as tokens are made."""
    if arguments.memory is not None and not (arguments.memory / "memory.json").exists():
        raise ValueError(f"--memory {str(arguments.memory)!r}: no memory is saved there")
    import torch
    from transformers import TextStreamer

    prompt = arguments.prompt
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8", "replace")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise ValueError("--prompt is not valid UTF-8")
    model, tokenizer = load(arguments)
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
