"""Memories that make their own keys, values, rates and retentions (Eq. 76-93)."""

from nestling.scan.self_modifying.dispatch import project, recall, run, scan_self_modifying

__all__ = ["project", "recall", "run", "scan_self_modifying"]
