"""Settings every test runs under, where real data lies, and that marked tests keep their word."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

# Some virtual CPUs advertise AMX but fault on it; this must be set before the first matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton's kernels run in its interpreter; it looks when kernels are first loaded.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import settings

from nestling.paper.registry import PACKAGE, Symbol, index, summary, symbols

settings.register_profile("nestling", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("nestling")
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_flush_denormal(False)  # a study sets it for its process


@pytest.fixture
def shared_data() -> Path:
    """The folder of real data sets beside the checkout; without it the test is skipped."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the real data sets in ../shared/data, which are not part of the package")
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many of the paper's equations the suite executes, and which are pending."""
    terminalreporter.write_line(summary(index()))


@cache
def cited() -> list[Symbol]:
    return symbols()


def missing(numbers: set[int], executed: set[tuple[str, int]]) -> dict[int, list[str]]:
    """The equations no citing symbol of which was executed, with those symbols' names.

    `executed` holds the file and first line of each function called; one defined inside a symbol
    (a method, the step of a rule factory, the lambda of a constant) counts as that symbol.
    """
    ran = {
        n
        for symbol in cited()
        for path, line in executed
        if path == str(symbol.path) and symbol.first <= line <= symbol.last
        for n in symbol.equations
    }
    return {n: [s.name for s in cited() if n in s.equations] for n in sorted(numbers - ran)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test marked with equations fails unless it calls a symbol that cites each of them."""
    numbers = {n for mark in item.iter_markers("equation") for n in mark.args}
    if not numbers:
        return (yield)
    executed: set[tuple[str, int]] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            executed.add((code.co_filename, code.co_firstlineno))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        result = yield
    finally:
        sys.setprofile(before)
    for number, names in missing(numbers, executed).items():
        pytest.fail(
            f"the mark claims Eq. {number}, but the test called no symbol that cites it"
            f" ({', '.join(names) or 'none exists in the package'})",
            pytrace=False,
        )
    return result
