"""`nestling describe`."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["build", "parser", "run"]

_EXAMPLES = """examples:
  nestling describe hope --optimizer M3
  nestling describe transformer --optimizer AdamW --out transformer.html
  nestling describe hope --size 760m --json
  nestling describe path/to/a/model --optimizer Muon --out model.svg"""

SIZES = {"tiny": "tiny", "small": "small", "base": "base", "760m": "hope_760m", "1b3": "hope_1b3"}


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="nestling describe",
        description="Show a model and its optimizer as a nested system: which part learns what,"
        " from what, and how often. No weights are loaded.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("model", help="one of our models by name, or a model's folder or hub name")
    made.add_argument("--size", choices=SIZES, default="tiny", help="of our models (default tiny)")
    made.add_argument("--optimizer", help="a class of nestling.optim or torch.optim")
    made.add_argument("--out", help="also draw it, as .html or .svg")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return made


def build(name: str, size: str) -> Any:
    """The model's skeleton, without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import nestling.models.presets as presets

    if name in presets.MODELS:
        config = getattr(presets, SIZES[size])(name)
    else:
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            first = str(error).splitlines()[0]
            known = ", ".join(presets.MODELS)
            raise ValueError(f"{name}: no such model ({first}); ours are {known}") from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _optimizer(name: str, model: Any) -> Any:
    import torch

    import nestling.optim

    for module in (nestling.optim, torch.optim):
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
            try:
                return found(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
            except (TypeError, ValueError) as error:
                raise ValueError(f"--optimizer {name}: {error}") from error
    raise ValueError(f"--optimizer {name}: neither nestling.optim nor torch.optim has it")


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or JSON; draw if asked."""
    from nestling.nested import describe

    model = build(arguments.model, arguments.size)
    optimizer = _optimizer(arguments.optimizer, model) if arguments.optimizer else None
    description = describe(model, optimizer)
    if arguments.json:
        print(description.to_json())
    else:
        from rich.console import Console

        console = Console()
        console.print(description if console.is_terminal else str(description), soft_wrap=True)
    if arguments.out:
        print(f"drawn: {description.draw(arguments.out)}")
    return 0
