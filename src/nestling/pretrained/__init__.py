"""Trained models that come with the package, one folder each: `nestling generate nestling:small`.

`python -m studies pretrained` trains one and puts it here.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["PREFIX", "find", "names"]

PREFIX = "nestling:"
"""Begins the name of a shipped model wherever a model is named."""

HOME = Path(__file__).parent


def names() -> list[str]:
    """The shipped models, each as commands take it."""
    return sorted(f"{PREFIX}{path.parent.name}" for path in HOME.glob("*/config.json"))


def find(name: str) -> Path:
    """The folder of a shipped model; "small" and "nestling:small" are the same."""
    short = name.removeprefix(PREFIX)
    if f"{PREFIX}{short}" not in names():
        known = ", ".join(names()) or "none (python -m studies pretrained makes one)"
        raise ValueError(f"{name!r} is no model of this package; there are: {known}")
    return HOME / short
