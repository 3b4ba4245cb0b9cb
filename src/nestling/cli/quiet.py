"""Silence for what other libraries and their subprocesses say on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide everything that is written to standard error within the block.

    Progress bars, log lines and the words of subprocesses ("not a git repository") are held back.
    Errors are exceptions and pass.
    """
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # no standard error at all
        yield
        return
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        held, python = sys.stderr, os.fdopen(os.dup(2), "w")
        sys.stderr = python
        try:
            yield
        finally:
            sys.stderr = held
            python.close()
            os.dup2(kept, 2)
            os.close(kept)
