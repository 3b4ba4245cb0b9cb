"""Compile the launches of a scan ahead of time, without a GPU, and read what they would occupy.

`launches` runs a scan on CPU tensors with Triton's launcher replaced by one that notes down kernel,
argument types and options, as they would reach the compiler on a GPU; `build` compiles one of them
for an architecture. Needs a process in which TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
NAMES |= {torch.bool: "*i1", torch.int64: "*i64", torch.int32: "*i32"}
OPTIONS = ("num_warps", "num_stages")


class Launch(NamedTuple):
    """One kernel with all that decides what is compiled."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[int, ...]  # arguments that are multiples of 16: pointers and some integers
    options: dict[str, int]

    @property
    def name(self) -> str:
        flags = ", ".join(f"{k}={v}" for k, v in self.constants.items() if v is not None)
        types = {t for t in self.signature.values() if t.startswith("*")}
        return f"{self.kernel.__name__}({flags}; {' '.join(sorted(types))}; {self.options})"


class Usage(NamedTuple):
    """The cost of a compiled kernel: bytes of stack a thread, bytes of shared memory a block."""

    name: str
    arch: int
    registers: int
    stack: int
    shared: int
    seconds: float


def launches(run: Callable[[], object]) -> list[Launch]:
    """All different launches of `run`; kernels do nothing, so results are whatever was there."""
    with _noting() as noted:
        run()
    return list({launch.name: launch for launch in noted}.values())


@contextmanager
def _noting() -> Iterator[list[Launch]]:
    noted: list[Launch] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        given = dict(zip(kernel.arg_names, args)) | kwargs
        signature, constants, aligned = {}, {}, []
        for i, param in enumerate(kernel.params):
            value = given[param.name]
            if param.is_constexpr or value is None:
                signature[param.name], constants[param.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[param.name] = NAMES[value.dtype]
                aligned.append(i)
            elif isinstance(value, int):
                signature[param.name] = "i32"
                if value % 16 == 0:
                    aligned.append(i)
            else:
                signature[param.name] = "fp32"
        noted.append(Launch(kernel, signature, constants, tuple(aligned), options))

    before = JITFunction.run
    JITFunction.run = run  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        JITFunction.run = before  # type: ignore[method-assign]


def build(launch: Launch, arch: int) -> Usage:
    """Compile for sm_`arch`."""
    attrs = {(i,): [["tt.divisibility", 16]] for i in launch.aligned}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attrs)
    began = time.perf_counter()
    options = {"num_warps": 4, "num_stages": 1} | launch.options
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    seconds = time.perf_counter() - began
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of registers: {said.stdout}{said.stderr}")
    registers, stack = map(int, found.groups())
    return Usage(launch.name, arch, registers, stack, made.metadata.shared, seconds)


def all_launches(d: int) -> list[Launch]:
    """The kernels both scans launch, forward and backward, for memories d wide at default chunks.

    Tied retention is more to compute than untied; NESTLING_KERNELS=all adds untied and steered.
    """
    from nestling.scan.delta import triton as delta
    from nestling.scan.self_modifying import triton as self_modifying
    from nestling.scan.self_modifying.rule import SelfRule
    from tests.kernels.cases import ALL, outcome, self_case
    from tests.scan.scan_cases import case

    for module in (delta, self_modifying):
        module.where_it_runs = lambda _: None  # (tensors stand for those of a GPU)
    torch.set_float32_matmul_precision("high")
    matrix = case((2,), 192, d, d).to(torch.float32)
    found = launches(lambda: matrix.gradients(backend="triton", check=False))
    rules = [SelfRule(tied=True)]
    rules += [SelfRule(), SelfRule(adaptive=(), tied=True)] if ALL else []
    for rule in rules:
        hope = self_case(rule, 192, d, batch=2)
        found += launches(lambda r=rule, h=hope: outcome(self_modifying.scan_triton, r, h, 0))
    return list({launch.name: launch for launch in found}.values())


if __name__ == "__main__":
    import json
    import sys

    for one in all_launches(int(sys.argv[2])):
        print(json.dumps(build(one, int(sys.argv[1]))._asdict()), flush=True)
