"""Words of other libraries on standard error are held back; errors are not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nestling.cli.options import quiet


def test_nobody_is_heard_within_and_everybody_after(capfd):
    with quiet():
        print("a bar of progress", file=sys.stderr)
        os.write(2, b"a library in C\n")
        subprocess.run([sys.executable, "-c", "import os; os.write(2, b'git')"], check=True)
    print("after", file=sys.stderr)
    os.write(2, b"it\n")
    assert capfd.readouterr().err == "after\nit\n"


def test_errors_pass_and_the_voice_comes_back(capfd):
    with pytest.raises(ValueError, match="broken"), quiet():
        raise ValueError("broken")
    os.write(2, b"heard\n")
    assert capfd.readouterr().err == "heard\n"
