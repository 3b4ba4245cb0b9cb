"""The machine a process runs on: memory that was paid for once, and what it multiplies fast."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from functools import cache

import torch

__all__ = ["bfloat16_is_quicker", "keep_memory"]

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


@cache
def bfloat16_is_quicker() -> bool:
    """True where this CPU multiplies bfloat16 matrices at least 1.3 times as fast as float32.

    CPUs without instructions for it are not asked. The others are measured, in a process of its
    own: an instruction that is advertised but faults ends that process and not ours.
    """
    if not any(
        _advertised(name) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ):
        return False
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, str(torch.get_num_threads())],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == "True"


def _advertised(name: str) -> bool:
    known = getattr(torch.cpu, name, None)
    return bool(known and known())


_MEASURE = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
def seconds(dtype):
    a = torch.randn(512, 512).to(dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return min(times)
wide, narrow = seconds(torch.float32), seconds(torch.bfloat16)
exact = torch.randn(64, 64)
near = (exact.bfloat16() @ exact.bfloat16()).float()
right = (near - exact @ exact).norm() < 0.02 * (exact @ exact).norm()
print(bool(right) and wide > 1.3 * narrow)
"""
