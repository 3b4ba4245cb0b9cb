"""`nestling doctor`."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform

from nestling.cli import Parser

_EXAMPLES = """examples:
  nestling doctor
  nestling doctor --bill > bill.json       # what is installed with nestling, as CycloneDX JSON

Products in bf16 are timed in a process of their own: on some machines they end it."""

_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "tokenizers", "accelerate")
_OPTIONAL = {
    "triton": "kernels for CUDA (nestling[triton])",
    "fla": "flash-linear-attention (nestling[fla])",
    "gguf": "reading .gguf files (nestling[gguf])",
    "lm_eval": "nestling eval --tasks (nestling[eval])",
    "datasets": "data.train=hf:NAME (nestling[eval])",
    "matplotlib": "pictures in reports (nestling[report])",
    "tensorboard": "training curves (nestling[tensorboard])",
}


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        "doctor",
        description="What this machine offers nestling, and what to change.",
        epilog=_EXAMPLES,
    )
    made.add_argument("--bill", action="store_true", help="print a software bill of materials")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; returns 0."""
    if arguments.bill:
        from nestling.cli.bill import bill

        print(bill())
        return 0
    import torch

    from nestling import __version__
    from nestling.machine import bf16_speed

    advice: list[str] = []
    rows = [("nestling", __version__), ("python", platform.python_version())]
    rows += [(name, _version(name)) for name in _PACKAGES]
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"{platform.processor() or 'CPU'}, no GPU"
    rows.append(("device", device))
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    rows.append(("threads", f"{threads} of {cores} cores this process may use"))
    if threads > cores:
        advice.append(f"set OMP_NUM_THREADS={cores}: more threads than cores slow each other down")
    if cuda:
        native = torch.cuda.is_bf16_supported()
        rows.append(("bf16", "native" if native else "emulated"))
        if native:
            advice.append("train with run.precision=bf16")
    else:
        speed = bf16_speed()
        said = "ends the process" if speed is None else f"{speed:.2f}x the speed of float32"
        rows.append(("bf16 products", said))
        isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "not set")
        rows.append(("ONEDNN_MAX_CPU_ISA", isa))
        if speed is None:
            advice.append("set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or stay with float32")
        elif speed >= 1.2:
            advice.append("run.precision=bf16 is worth a try")
        else:
            advice.append("stay with run.precision=float32")
    for name, use in _OPTIONAL.items():
        found = importlib.util.find_spec(name) is not None
        rows.append((name, "found" if found else f"not installed: {use}"))
    for name, value in rows:
        print(f"{name:<20} {value}")
    print("\nadvice")
    for line in advice or ["nothing to change"]:
        print(f"  {line}")
    return 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
