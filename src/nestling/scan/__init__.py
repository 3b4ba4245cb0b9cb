"""Scans: write pairs into a memory and read it at every token.

Three folders, each with its derivation: `delta` (matrix memories), `deep` (two-layer memories) and
`self_modifying` (memories that make their own projections and gates). In each, `api` has the
function to call and the choice between its forms, `types` (or `rule`) its arguments, and `naive`
the equations token by token, which all other forms are tested against.
"""

from nestling.scan.backends import any_order
from nestling.scan.deep import MLPState, mlp_naive, scan_mlp
from nestling.scan.delta import BACKENDS, scan, scan_naive
from nestling.scan.delta.types import MatrixAndVelocity
from nestling.scan.self_modifying import scan_self_modifying

__all__ = [
    "BACKENDS",
    "MLPState",
    "MatrixAndVelocity",
    "any_order",
    "mlp_naive",
    "scan",
    "scan_mlp",
    "scan_naive",
    "scan_self_modifying",
]
