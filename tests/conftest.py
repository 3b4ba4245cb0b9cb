"""Settings every test runs under, and where real data lies."""

from __future__ import annotations

import os
from pathlib import Path

# Some virtual CPUs advertise AMX but fault on it; this must be set before the first matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

settings.register_profile("nestling", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("nestling")
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def shared_data() -> Path:
    """The folder of real data sets beside the checkout; without it the test is skipped."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the real data sets in ../shared/data, which are not part of the package")
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many of the paper's equations the suite executes, and which are pending."""
    from nestling.equations import index, summary

    terminalreporter.write_line(summary(index()))
