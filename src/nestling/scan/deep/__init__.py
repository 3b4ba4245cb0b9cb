"""Two-layer memories `M(x) = x + W1 sigma(W2 x)`: `naive` token by token, `chunk` with the
derivation and the backward pass by hand."""

from nestling.scan.deep.api import scan_mlp
from nestling.scan.deep.naive import mlp_naive
from nestling.scan.deep.types import MLPState

__all__ = ["MLPState", "mlp_naive", "scan_mlp"]
