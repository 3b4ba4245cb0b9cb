"""Saved trees survive crashes at every system call, and every altered bit is found."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from nestling import files
from nestling.files import BrokenFileError, load_tree, save_tree, write_atomic

OLD = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}
NEW = {"w": torch.ones(2, 3), "n": torch.tensor(4)}


def tree(folder):
    tensors, meta = load_tree(folder, "memory")
    return {k: v.tolist() for k, v in tensors.items()}, meta


def plain(tensors):
    return {k: v.tolist() for k, v in tensors.items()}


def test_round_trip_keeps_types_and_removes_the_old_file(tmp_path):
    odd = {"b": torch.randn(3).bfloat16(), "empty": torch.zeros(0, 2), "t": torch.randn(2, 3).T}
    save_tree(tmp_path, "memory", OLD, {"position": 7})
    save_tree(tmp_path, "memory", odd, {"position": 8, "who": "ü"})
    tensors, meta = load_tree(tmp_path, "memory")
    assert meta == {"position": 8, "who": "ü"}
    for key, value in odd.items():
        assert tensors[key].dtype == value.dtype
        assert torch.equal(tensors[key], value)
    assert len(list(tmp_path.iterdir())) == 2


class Crash(Exception):
    pass


@pytest.mark.parametrize("call", ["fsync", "replace", "write", "unlink"])
def test_a_crash_at_any_system_call_leaves_the_old_or_the_new_tree(tmp_path, monkeypatch, call):
    outcomes = set()
    for nth in range(1, 8):
        folder = tmp_path / f"{call}{nth}"
        save_tree(folder, "memory", OLD, "old")
        count = 0

        def failing(real, nth=nth):
            def run(*args, **kwargs):
                nonlocal count
                count += 1
                if count == nth:
                    raise Crash
                return real(*args, **kwargs)

            return run

        with monkeypatch.context() as patch:
            if call == "write":
                real_open = os.fdopen

                def open_failing(*args, real_open=real_open, failing=failing, **kwargs):
                    file = real_open(*args, **kwargs)
                    whole = file.write
                    half = failing(lambda data, whole=whole: whole(data))

                    class Half:
                        def __enter__(self):
                            return self

                        def __exit__(self, *exc):
                            file.close()

                        def write(self, data):
                            whole(data[: len(data) // 2])
                            file.flush()
                            half(data[len(data) // 2 :])

                        flush, fileno = file.flush, file.fileno

                    return Half()

                patch.setattr(files.os, "fdopen", open_failing)
            elif call == "unlink":
                patch.setattr(files.Path, "unlink", failing(files.Path.unlink))
            else:
                patch.setattr(files.os, call, failing(getattr(os, call)))
            try:
                save_tree(folder, "memory", NEW, "new")
                crashed = False
            except Crash:
                crashed = True
        got, meta = tree(folder)
        assert (got, meta) in [(plain(OLD), "old"), (plain(NEW), "new")]
        assert crashed or meta == "new"
        outcomes.add((crashed, meta))
        save_tree(folder, "memory", NEW, "again")
        assert len(list(folder.iterdir())) == 2, "nothing is left behind after the next save"
    assert (False, "new") in outcomes
    assert any(crashed for crashed, _ in outcomes)


def test_every_truncation_and_bit_flip_is_found(tmp_path):
    save_tree(tmp_path, "memory", OLD, {"position": 7})
    rng = random.Random(0)
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for _ in range(150):
            if rng.random() < 0.3:
                bad = whole[: rng.randrange(len(whole))]
            else:
                i = rng.randrange(len(whole))
                bad = whole[:i] + bytes([whole[i] ^ (1 << rng.randrange(8))]) + whole[i + 1 :]
            path.write_bytes(bad)
            with pytest.raises(BrokenFileError):
                tree(tmp_path)
        path.write_bytes(whole)
    assert tree(tmp_path)[1] == {"position": 7}


def test_what_a_killed_write_left_is_taken_over(tmp_path):
    (tmp_path / ".a.json.tmp").write_bytes(bytes(1000))
    write_atomic(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_link_in_the_way_is_not_followed(tmp_path):
    (tmp_path / "other").write_bytes(b"keep")
    (tmp_path / ".a.json.tmp").symlink_to("other")
    with pytest.raises(OSError):
        write_atomic(tmp_path / "a.json", b"new")
    assert (tmp_path / "other").read_bytes() == b"keep"


def test_writers_of_one_file_take_turns(tmp_path):
    def write(who: int) -> None:
        for _ in range(30):
            write_atomic(tmp_path / "a", bytes([who]) * 5000)

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set((tmp_path / "a").read_bytes())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch):
    def no_locks(handle: int, kind: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    save_tree(tmp_path, "memory", OLD, "old")
    assert tree(tmp_path) == (plain(OLD), "old")


def test_foreign_files_are_refused_and_named(tmp_path):
    with pytest.raises(BrokenFileError, match=r"memory\.json: cannot be read"):
        load_tree(tmp_path, "memory")
    (tmp_path / "memory.json").write_bytes(b"\x80\x04pickle")
    with pytest.raises(BrokenFileError, match="not a JSON file"):
        load_tree(tmp_path, "memory")
    save_tree(tmp_path, "memory", OLD, None)
    manifest = json.loads((tmp_path / "memory.json").read_text())
    manifest["files"][0]["file"] = "../elsewhere.safetensors"
    (tmp_path / "memory.json").write_text(json.dumps(manifest))
    with pytest.raises(BrokenFileError, match="checksum does not match"):
        load_tree(tmp_path, "memory")


def test_a_killed_process_leaves_a_whole_tree(tmp_path):
    code = (
        "import sys, torch, itertools\n"
        "from pathlib import Path\n"
        "from nestling.files import save_tree\n"
        "for n in itertools.count():\n"
        "    save_tree(Path(sys.argv[1]), 'm', {'w': torch.full((200_000,), float(n))}, n)\n"
        "    n == 0 and print('go', flush=True)\n"
    )
    rng = random.Random(1)
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        tensors, n = load_tree(tmp_path, "m")
        assert torch.equal(tensors["w"], torch.full((200_000,), float(n)))
