"""`nestling cost`."""

from __future__ import annotations

import argparse

from nestling.checks import one_of
from nestling.cli import Parser

_EXAMPLES = """examples:
  nestling cost hope_760m --tokens 30e9 --gpus 8
  nestling cost hope_1b3 --tokens 100e9 --gpus 64 --gpu h100
  nestling cost hope_1b3 --model transformer --length 32768

Operations are counted by running one block of the real width here; times follow from the makers'
peak figures and --utilisation. They are estimates to plan with, not measurements."""


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        "cost",
        description="Operations, bytes and communication of a training run on GPUs.",
        epilog=_EXAMPLES,
    )
    made.add_argument("preset", help="tiny, small, base, hope_760m or hope_1b3")
    made.add_argument("--model", default="hope", help="hope, transformer, titans, ...")
    made.add_argument("--tokens", type=float, default=30e9, help="tokens to train on (30e9)")
    made.add_argument("--gpus", type=int, default=8, help="how many (8)")
    made.add_argument("--gpu", default="h100", help="a100, h100 or b200")
    made.add_argument("--length", type=int, default=4096, help="tokens of a window")
    made.add_argument("--rows", type=int, default=8, help="windows per device and step")
    made.add_argument("--utilisation", type=float, default=0.4, help="of the peak, assumed")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    from nestling.models import presets
    from nestling.train.cost import cost

    one_of("preset", arguments.preset, presets.SIZES)
    one_of("--model", arguments.model, presets.MODELS)
    plan = cost(
        presets.configure(presets.SIZES[arguments.preset], arguments.model),
        tokens=arguments.tokens,
        gpus=arguments.gpus,
        gpu=arguments.gpu,
        length=arguments.length,
        rows_per_gpu=arguments.rows,
        utilisation=arguments.utilisation,
    )
    state = plan.state_bytes + arguments.rows * plan.activation_bytes
    rows = [
        ("parameters", f"{plan.parameters / 1e6:,.1f} M"),
        ("operations per token", f"{plan.flops_per_token / 1e9:,.2f} GFLOP (recomputing blocks)"),
        ("memory per device", f"{state / 1e9:,.1f} GB ({plan.state_bytes / 1e9:,.1f} GB of state)"),
        ("traffic per device and step", f"{plan.traffic_bytes / 1e9:,.2f} GB"),
        ("compute per step", f"{plan.compute_seconds * 1e3:,.0f} ms"),
        ("traffic per step", f"{plan.traffic_seconds * 1e3:,.0f} ms, hidden if below compute"),
        ("tokens per second", f"{plan.tokens_per_second:,.0f} on {arguments.gpus} {arguments.gpu}"),
        (f"{arguments.tokens:.3g} tokens", f"{plan.hours:,.1f} hours"),
    ]
    for name, value in rows:
        print(f"{name:<28} {value}")
    return 0
