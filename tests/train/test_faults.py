"""Whatever breaks a checkpoint, while it is saved or afterwards: an earlier one loads."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from nestling.train.checkpoint import checkpoints, load_latest, save_checkpoint

CALLS = ("write", "fsync", "replace", "rename")


def save(folder: Path, step: int) -> None:
    """A checkpoint whose content tells its step."""
    save_checkpoint(folder, step, {"w": torch.full((30,), float(step)), "step": step}, {"loss": 1})


def loaded(folder: Path) -> int:
    """The step of what loads, after checking that it is that step's content."""
    got = load_latest(folder)
    assert got is not None
    assert torch.equal(got.states["w"], torch.full((30,), float(got.step)))
    return got.step


class Fault:
    """Lets the first `nth - 1` calls that reach the disk through, then fails one of them.

    A failing write has written half of its bytes, as a full disk does.
    """

    def __init__(self, nth: int, fail) -> None:
        self.left, self.fail, self.hit = nth, fail, None

    def __call__(self, name, real):
        def run(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                self.hit = name
                self.fail()
            return real(*args, **kwargs)

        return run

    def fdopen(self, *args, **kwargs):
        file = FDOPEN(*args, **kwargs)
        rest = self("write", file.write)

        class Halting:
            flush, fileno = file.flush, file.fileno

            def __enter__(self):
                return self

            def __exit__(self, *exc):
                file.close()

            def write(self, data):
                file.write(data[: len(data) // 2])
                file.flush()
                rest(data[len(data) // 2 :])

        return Halting()

    @contextlib.contextmanager
    def injected(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fdopen", self.fdopen)
            for name in CALLS[1:]:
                patch.setattr(os, name, self(name, getattr(os, name)))
            yield


FDOPEN = os.fdopen


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def count_calls(folder: Path) -> int:
    """How many calls of a save reach the disk."""
    counter = Fault(10_000, full)
    with counter.injected():
        save(folder, 1)
    return 10_000 - counter.left


def test_an_error_at_every_call_leaves_the_earlier_checkpoint(tmp_path):
    """Two files are written, flushed and renamed, the folder is renamed: each step fails once."""
    hit = []
    calls = count_calls(tmp_path / "count")
    assert calls >= 10
    for nth in range(1, calls + 1):
        folder = tmp_path / str(nth)
        save(folder, 1)
        fault = Fault(nth, full)
        with fault.injected(), pytest.raises(OSError, match=r"step 2 .* No space left") as said:
            save(folder, 2)
        assert "earlier checkpoints are untouched" in str(said.value)
        hit.append(fault.hit)
        assert loaded(folder) in ((1, 2) if nth == calls else (1,))
        assert not list(folder.glob(".step-*")), "nothing half-written stays"
        save(folder, 3)
        assert loaded(folder) == 3
    assert set(hit) == set(CALLS)


def test_a_power_cut_at_every_call_leaves_a_whole_checkpoint(tmp_path):
    """The process ends at once (no cleanup of any kind), at each call in turn."""
    calls = count_calls(tmp_path / "count")
    left_over = 0
    for nth in range(1, calls + 1):
        folder = tmp_path / str(nth)
        save(folder, 1)
        child = os.fork()
        if child == 0:
            with Fault(nth, lambda: os._exit(7)).injected():
                save(folder, 2)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        left_over += bool(list(folder.glob(".step-*")))
        assert loaded(folder) in ((1, 2) if nth == calls else (1,))
        save(folder, 3)
        assert loaded(folder) == 3
        assert not list(folder.glob(".step-*")), "the next save clears what the cut left"
    assert left_over >= calls - 3


FILLED = """
import resource, sys
from pathlib import Path
import torch
from nestling.train.checkpoint import save_checkpoint

save_checkpoint(Path(sys.argv[1]), 1, {"w": torch.zeros(30)}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(Path(sys.argv[1]), 2, {"w": torch.zeros(300_000)}, {})
except OSError as error:
    print(error)
"""


def test_a_disk_that_takes_no_more_is_told_and_survived(tmp_path):
    """The system itself refuses the bytes, in a real process."""
    done = subprocess.run(
        [sys.executable, "-c", FILLED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "could not save the checkpoint of step 2" in done.stdout
    assert os.strerror(errno.EFBIG) in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    got = load_latest(tmp_path)
    assert got is not None
    assert got.step == 1


def test_a_thousand_broken_checkpoints_are_found_and_passed_over(tmp_path):
    """Random cuts and flipped bits in any file of the newest: the one before loads, by name."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    newest = checkpoints(tmp_path)[-1]
    paths = sorted(newest.iterdir())
    whole = {path: path.read_bytes() for path in paths}
    rng = random.Random(0)
    for trial in range(1000):
        path = paths[trial % 2]
        data = bytearray(whole[path])
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert loaded(tmp_path) == 1
        assert "passing over a broken checkpoint" in str(said[0].message)
        assert newest.name in str(said[0].message)
        path.write_bytes(whole[path])
    assert loaded(tmp_path) == 2


def test_missing_files_and_no_checkpoint_at_all(tmp_path):
    assert load_latest(tmp_path) is None
    save(tmp_path, 1)
    save(tmp_path, 2)
    for path in checkpoints(tmp_path)[-1].glob("*.safetensors"):
        path.unlink()
    with pytest.warns(UserWarning, match="step-00000002.*cannot be read"):
        assert loaded(tmp_path) == 1
