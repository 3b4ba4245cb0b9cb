"""`nestling describe`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nestling.cli import Parser
from nestling.cli.options import new_file

_EXAMPLES = """examples:
  nestling describe hope --optimizer M3
  nestling describe transformer --optimizer AdamW --out transformer.html
  nestling describe hope --size 760m --json
  nestling describe path/to/a/model --optimizer Muon --out model.svg
  nestling describe Qwen/Qwen3-0.6B --download --optimizer AdamW"""


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        "describe",
        description="Show a model and its optimizer as a nested system: which part learns what,\n"
        "from what, and how often. No weights are loaded.",
        epilog=_EXAMPLES,
    )
    made.add_argument(
        "model", help="one of our models by name, a model's folder, nestling:small, or a hub name"
    )
    made.add_argument(
        "--download", action="store_true", help="ask the hub for a configuration that is not here"
    )
    sizes = ("tiny", "small", "base", "760m", "1b3")
    made.add_argument("--size", choices=sizes, default="tiny", help="of our models (default tiny)")
    made.add_argument("--optimizer", help="a class of nestling.optim or torch.optim")
    made.add_argument(
        "--out", type=new_file(".svg", ".html"), help="also draw it, as .html or .svg"
    )
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return made


def build(name: str, size: str, *, download: bool = False) -> Any:
    """The model's skeleton, without memory for its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from nestling.models import presets

    if name in presets.MODELS:
        paper = f"hope_{size}"
        config = presets.configure(presets.SIZES[paper if paper in presets.SIZES else size], name)
    else:
        config = _configuration(name, download)
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except ValueError as error:  # not a causal language model
            from transformers import AutoModel

            try:
                return AutoModel.from_config(config, trust_remote_code=False)
            except ValueError:
                raise ValueError(f"{name}: {str(error).splitlines()[0]}") from error


def _configuration(name: str, download: bool) -> Any:
    """A model's configuration from its folder or the local cache; from the hub only if asked."""
    import difflib

    from transformers import AutoConfig

    from nestling.adaptation.pretrained import check_config
    from nestling.models import presets
    from nestling.pretrained import PREFIX, find

    if name.startswith(PREFIX):
        name = str(find(name))
    if (Path(name) / "config.json").exists():
        check_config(Path(name))
    try:
        return AutoConfig.from_pretrained(
            name, local_files_only=not download, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        ours = ", ".join(presets.MODELS)
        near = difflib.get_close_matches(name, presets.MODELS, n=1)
        if near:
            hint = f"did you mean {near[0]}?"
        elif Path(name).is_dir():
            hint = f"the folder holds no model: {str(error).splitlines()[0]}"
        elif download:
            hint = str(error).splitlines()[0]
        else:
            hint = "it is no folder here; --download asks the hub for it"
        raise ValueError(f"{name}: no such model; {hint} (ours are {ours})") from error


def _optimizer(name: str, model: Any) -> Any:
    import torch

    import nestling.optim

    for module in (nestling.optim, torch.optim):
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
            labelled = name in ("AdaMuon", "M3", "Muon") and module is nestling.optim
            try:
                given = nestling.optim.param_groups(model) if labelled else model.parameters()
                return found(given, lr=1e-3)  # type: ignore[call-arg]
            except (TypeError, ValueError) as error:
                raise ValueError(f"--optimizer {name}: {error}") from error
    raise ValueError(f"--optimizer {name}: neither nestling.optim nor torch.optim has it")


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or JSON; draw if asked."""
    from nestling.description import describe

    model = build(arguments.model, arguments.size, download=arguments.download)
    optimizer = None if arguments.optimizer is None else _optimizer(arguments.optimizer, model)
    description = describe(model, optimizer)
    if arguments.json:
        print(description.to_json())
    else:
        from rich.console import Console

        console = Console()
        shown = description if console.is_terminal else str(description)
        console.print(shown, soft_wrap=True, markup=False)
    if arguments.out:
        print(f"drawn: {description.draw(arguments.out)}")
    return 0
