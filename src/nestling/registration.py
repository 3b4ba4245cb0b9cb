"""`import nestling` is enough for the Auto classes of transformers to open our models.

transformers is not imported for it. Once anything imports its registry of configurations, the
registry learns the model type "nestling" with a stand-in; the first use of the stand-in imports
`nestling.models`, which registers the classes themselves.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_REGISTRY = "transformers.models.auto.configuration_auto"


class _Configuration:
    """Stands for `NestlingConfig` in the registry until it is needed."""

    model_type = "nestling"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _real()(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return _real().from_dict(config_dict, **kwargs)

    @classmethod
    def from_pretrained(cls, name: Any, **kwargs: Any) -> Any:
        return _real().from_pretrained(name, **kwargs)


def _real() -> Any:
    return importlib.import_module("nestling.models").NestlingConfig


class _AfterImport(MetaPathFinder):
    """Calls `_announce` once the registry's module has run; finds nothing itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _REGISTRY:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _announce(module)

        loader.exec_module = exec_module
        return spec


def _announce(registry: Any) -> None:
    if "nestling" not in registry.CONFIG_MAPPING:
        registry.AutoConfig.register("nestling", _Configuration)


def register() -> None:
    """Make the Auto classes know our models, now or when transformers is imported."""
    registry = sys.modules.get(_REGISTRY)
    if registry is not None and hasattr(registry, "AutoConfig"):
        _announce(registry)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
