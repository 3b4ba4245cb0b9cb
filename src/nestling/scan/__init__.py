"""The one kernel (SPEC.md section 7): write pairs into a memory, read it at every token."""

from nestling.scan.api import BACKENDS, scan
from nestling.scan.checks import MomentumState
from nestling.scan.naive import scan_naive

__all__ = ["BACKENDS", "MomentumState", "scan", "scan_naive"]
