"""The machine a process runs on: keeping memory that was paid for once."""

from __future__ import annotations

import ctypes
import platform

__all__ = ["keep_memory"]

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
