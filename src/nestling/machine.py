"""The machine a process runs on: its memory, and whether its bf16 products are worth it."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from functools import cache

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from glibc's malloc.h


def keep_memory() -> bool:
    """Ask the C library to keep freed memory for the next tensor; True if it agreed.

    By default glibc hands large freed blocks back to the system and asks for fresh pages for every
    new tensor. Where page faults are dear (virtual machines, sandboxes) this makes element-wise
    CPU operations several times slower. Call it once, before training; the resident size then
    stays near its peak. Does nothing on other C libraries, and nothing for GPUs.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))


_MEASURE = """
import time, torch
def seconds(dtype):
    a, b = (torch.randn(384, 384).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(12):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return best
print(seconds(torch.float32) / seconds(torch.bfloat16))
"""


@cache
def bf16_speed() -> float | None:
    """How many times as fast as float32 this CPU multiplies bf16 matrices; None if it cannot.

    Measured once, in a process of its own: where the kernel or a sandbox does not allow the units
    that the library chooses (AMX), the first product ends the process.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE], capture_output=True, text=True, timeout=120
        )
        return float(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def bf16_is_quicker() -> bool:
    """True where this CPU has instructions for bf16 and they were measured to pay.

    A CPU without them is not asked: emulated products are never quicker.
    """
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if not any(getattr(torch.cpu, name, lambda: False)() for name in names):
        return False
    return (bf16_speed() or 0.0) >= 1.3
