"""The self-modifying scan as compiled models call it.

Imported by them alone: `torch.compiler.disable` loads the compiler, which takes over a second.
"""

import torch

from nestling.scan.self_modifying import run

__all__ = ["run_uncompiled"]

run_uncompiled = torch.compiler.disable(run)
