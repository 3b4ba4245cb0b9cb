"""Matrix memories: linear attention, the delta rule and their kin, as one scan.

`naive` is the equation token by token, `chunk` derives and runs the chunked form, `kernel` is the
chunked form by hand as one torch operator.
"""

from nestling.scan.delta.api import BACKENDS, scan
from nestling.scan.delta.naive import scan_naive

__all__ = ["BACKENDS", "scan", "scan_naive"]
