"""Argument checks: an error names the argument, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Reject a value that is not among those allowed."""
    known = tuple(allowed)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}; got {value!r}")


def require(allowed: bool, name: str, value: object, words: str) -> None:
    """Reject a value that is not `allowed`; `words` say what is, as in "name must be positive"."""
    if not allowed:
        raise ValueError(f"{name} must be {words}; got {value!r}")


def whole_number(name: str, value: object, least: int = 1) -> None:
    """Reject what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}")
