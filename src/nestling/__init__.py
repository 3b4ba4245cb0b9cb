"""Nested learning in PyTorch: optimizers, memories and language models that learn at many scales.

The parts stand alone: `nestling.optim` in an existing training loop, `nestling.memories` as layers,
`nestling.scan` as a kernel, `nestling.models` as Hugging Face language models. Names that need the
`transformers` package are imported when they are first used, so `import nestling` stays quick; it
is enough for `AutoModelForCausalLM.from_pretrained` to open a saved model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nestling import registration as _registration

if TYPE_CHECKING:
    from nestling.adaptation import adapt, load_learner
    from nestling.description import describe
    from nestling.levels import Level
    from nestling.models import NestlingConfig, NestlingForCausalLM

__version__ = "0.1.0"

_LAZY = {
    "Level": "nestling.levels",
    "NestlingConfig": "nestling.models",
    "NestlingForCausalLM": "nestling.models",
    "adapt": "nestling.adaptation",
    "describe": "nestling.description",
    "load_learner": "nestling.adaptation",
}

__all__ = [
    "Level",
    "NestlingConfig",
    "NestlingForCausalLM",
    "__version__",
    "adapt",
    "describe",
    "load_learner",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            if error.name not in ("transformers", "tokenizers", "huggingface_hub"):
                raise
            raise ModuleNotFoundError(
                f"nestling.{name} needs {error.name}: pip install 'nestling[lm]'", name=error.name
            ) from error
    raise AttributeError(f"module 'nestling' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


_registration.register()
