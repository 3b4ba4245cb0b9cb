"""Nested learning in PyTorch: optimizers, memories and language models that learn at many scales.

The parts stand alone: `nestling.optim` in an existing training loop, `nestling.memories` as layers,
`nestling.scan` as a kernel, `nestling.models` as Hugging Face language models. Names that need the
`transformers` package are imported when they are first used, so `import nestling` stays quick.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Level": "nestling.levels",
    "NestlingConfig": "nestling.models",
    "NestlingForCausalLM": "nestling.models",
    "adapt": "nestling.adaptation",
    "describe": "nestling.description",
}

__all__ = [
    "Level",
    "NestlingConfig",
    "NestlingForCausalLM",
    "__version__",
    "adapt",
    "describe",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'nestling' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
