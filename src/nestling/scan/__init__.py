"""The one kernel: write pairs into a memory, read it at every token."""

from nestling.scan.api import BACKENDS, scan
from nestling.scan.checks import MomentumState
from nestling.scan.mlp import scan_mlp
from nestling.scan.mlp_naive import mlp_naive
from nestling.scan.mlp_types import MLPState
from nestling.scan.naive import scan_naive
from nestling.scan.orders import any_order
from nestling.scan.self_modifying import scan_self_modifying

__all__ = [
    "BACKENDS",
    "MLPState",
    "MomentumState",
    "any_order",
    "mlp_naive",
    "scan",
    "scan_mlp",
    "scan_naive",
    "scan_self_modifying",
]
