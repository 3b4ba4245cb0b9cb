"""Triton's interpreter, without doing the same preparation again for every nested function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_prepare: Callable[[Any], Any] = interpreter._patch_lang
_done: set[tuple[str, ...]] = set()


def _once(function: Any) -> Any:
    """The language's functions are replaced by interpreted ones at the first call, and stay so."""
    found = function.__globals__.values()
    key = tuple(v.__name__ for v in found if inspect.ismodule(v) and v in (tl, tl.core))
    scope = interpreter._LangPatchScope()
    if key not in _done:
        _done.add(key)
        _prepare(function)
    return scope


def hurry() -> None:
    """Make this process's interpreter quick (about twice); results are the same."""
    interpreter._patch_lang = _once
