"""Memories that make their own keys, values, rates and retentions (Eq. 76-93).

`rule` says how they learn, with the one formula of their gates; `naive` is the equation token by
token; `kernel` derives and runs the chunked form of matrix memories by hand, forwards and
backwards; `segment` is the chunked form of everything else in differentiable torch; `api` chooses
between them and makes torch operators of both; `triton` has kernels for GPUs.
"""

from nestling.scan.self_modifying.api import SELF_BACKENDS, scan_self_modifying
from nestling.scan.self_modifying.rule import Inputs, SelfRule, Weights

__all__ = ["SELF_BACKENDS", "Inputs", "SelfRule", "Weights", "scan_self_modifying"]
