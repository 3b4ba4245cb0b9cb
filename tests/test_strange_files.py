"""Files are checked before they are read: types, sizes, headers; and folders have locks."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from nestling.files import (
    BrokenFileError,
    BusyError,
    TensorFile,
    check_state,
    expect,
    fingerprint,
    load_record,
    load_tree,
    locked,
    save_record,
    save_tree,
    write_tensors,
)

TENSORS = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}


def manifest(folder: Path, **changes) -> None:
    """A manifest with a right checksum and whatever it says."""
    found = json.loads((folder / "m.json").read_text()) | changes
    facts = [found["format"], found["files"], found["meta"]]
    found["check"] = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    (folder / "m.json").write_text(json.dumps(found, indent=1) + "\n")


def replace_tensors(folder: Path, data: bytes) -> None:
    """Other tensors under a right manifest."""
    path = folder / "m-0000000000000000.safetensors"
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    manifest(folder, files=[{"file": path.name, "bytes": len(data), "sha256": digest}])


def header(text: object, data: bytes = b"") -> bytes:
    packed = (text if isinstance(text, str) else json.dumps(text)).encode()
    return len(packed).to_bytes(8, "little") + packed + data


def test_only_regular_files_are_opened(tmp_path):
    save_tree(tmp_path, "m", TENSORS, None)
    (tensors,) = tmp_path.glob("m-*.safetensors")
    for path in (tmp_path / "m.json", tensors):
        kept = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(BrokenFileError, match="not a regular file"):
            load_tree(tmp_path, "m")
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(BrokenFileError, match="not a regular file"):
            load_tree(tmp_path, "m")
        path.unlink()
        path.mkdir()
        with pytest.raises(BrokenFileError, match="not a regular file"):
            load_tree(tmp_path, "m")
        path.rmdir()
        path.write_bytes(kept)
    load_tree(tmp_path, "m")


def test_a_file_larger_than_its_kind_is_not_read(tmp_path):
    save_tree(tmp_path, "m", TENSORS, None)
    os.truncate(tmp_path / "m.json", 1 << 40)  # a hole: no disk, but a terabyte to read
    with pytest.raises(BrokenFileError, match="at most 67108864 are read"):
        load_tree(tmp_path, "m")
    save_tree(tmp_path, "m", TENSORS, None)
    with pytest.raises(BrokenFileError, match="at most 10 are read"):
        load_tree(tmp_path, "m", limit=10)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "1" * 10_000, "\ud800"])
def test_json_nobody_wrote_is_refused(tmp_path, text):
    (tmp_path / "m.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(BrokenFileError, match=r"not a JSON file|not a manifest"):
        load_tree(tmp_path, "m")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EIGHT = bytes(8)
HEADERS = {
    "too short": b"abc",
    "longer than the file": (1 << 60).to_bytes(8, "little") + b"{}",
    "no json": header("{"),
    "nested": header("[" * 100_000),
    "a list": header([]),
    "no entry": header({"w": 3}),
    "unknown type": header({"w": {**ENTRY, "dtype": "F4"}}, EIGHT),
    "a type that is a list": header({"w": {**ENTRY, "dtype": []}}, EIGHT),
    "negative size": header({"w": {**ENTRY, "shape": [-2]}}, EIGHT),
    "huge size": header({"w": {**ENTRY, "shape": [1 << 61, 1 << 61]}}, EIGHT),
    "fraction": header({"w": {**ENTRY, "shape": [2.0]}}, EIGHT),
    "truth": header({"w": {**ENTRY, "shape": [True]}}, EIGHT),
    "too many dimensions": header({"w": {**ENTRY, "shape": [1] * 60 + [2]}}, EIGHT),
    "one offset": header({"w": {**ENTRY, "data_offsets": [0]}}, EIGHT),
    "backwards": header({"w": {**ENTRY, "data_offsets": [8, 0]}}, EIGHT),
    "beyond the end": header({"w": {**ENTRY, "data_offsets": [8, 16]}}, EIGHT),
    "overlap": header({"w": ENTRY, "v": ENTRY}, EIGHT),
    "a gap": header({"w": ENTRY, "v": {**ENTRY, "data_offsets": [9, 17]}}, bytes(17)),
    "more data": header({"w": ENTRY}, bytes(9)),
    "less data": header({"w": ENTRY}, bytes(7)),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_must_fit_its_bytes(tmp_path, name):
    save_tree(tmp_path, "m", TENSORS, None)
    replace_tensors(tmp_path, HEADERS[name])
    with pytest.raises(BrokenFileError, match="not a safetensors file"):
        load_tree(tmp_path, "m")


def test_the_format_is_safetensors_both_ways(tmp_path):
    odd = {
        "a/b.c": torch.randn(3, 2).bfloat16(),
        "half": torch.randn(5).half(),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "ü": torch.arange(3, dtype=torch.int16),
        "view": torch.randn(4, 6)[::2, 1:].T,
    }
    part = write_tensors(tmp_path, "m", odd)
    theirs = safetensors.torch.load_file(tmp_path / part.file)
    assert set(theirs) == set(odd)
    path = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file({k: v.contiguous() for k, v in odd.items()}, path)
    with TensorFile(path) as ours:
        for key, value in odd.items():
            assert theirs[key].dtype == ours.dtype(key) == value.dtype
            assert torch.equal(theirs[key], value)
            assert torch.equal(ours.read(key), value)
        assert torch.equal(ours.read("view", 1, 4), odd["view"][1:4])
        with pytest.raises(BrokenFileError, match="no rows 1 to 9"):
            ours.read("view", 1, 9)
        with pytest.raises(BrokenFileError, match="missing"):
            ours.read("gone")


@pytest.mark.parametrize("form", [1, 3, True, "2", None, [2]])
def test_another_format_is_named(tmp_path, form):
    save_tree(tmp_path, "m", TENSORS, None)
    manifest(tmp_path, format=form)
    with pytest.raises(BrokenFileError, match=r"m\.json: the format: .* is not one of 2"):
        load_tree(tmp_path, "m")


@pytest.mark.parametrize(
    ("found", "form"),
    [
        ({"a": 1}, {"a": int, "b": int}),
        ({"a": 1, "b": 2, "c": 3}, {"a": int, "b": int}),
        ([1], {"a": int}),
        (True, int),
        (-1, int),
        (1 << 63, int),
        (1.0, int),
        ("1", int),
        (None, str),
        ([1, "2"], [int]),
        ({}, [int]),
        ("c", {"a", "b"}),
        (True, {1, 2}),
        ([], {"a"}),
        ({"a": {"b": [1, -1]}}, {"a": {"b": [int]}}),
    ],
)
def test_a_value_of_another_form_is_refused(found, form):
    with pytest.raises(BrokenFileError, match=r"^here: "):
        expect(found, form, "here")


def test_a_value_of_its_form_is_given_back():
    found = {"a": [0, 1 << 62], "b": {"c": "x", "d": None}, "e": 2}
    assert expect(found, {"a": [int], "b": {"c": str, "d": object}, "e": {1, 2}}, "here") is found


def test_a_manifest_names_files_of_its_folder_only(tmp_path):
    save_tree(tmp_path / "a", "m", TENSORS, None)
    (part,) = json.loads((tmp_path / "a" / "m.json").read_text())["files"]
    for bad in ("../x", "/etc/passwd", "", 3, None):
        manifest(tmp_path / "a", files=[{**part, "file": bad}])
        with pytest.raises(BrokenFileError):
            load_tree(tmp_path / "a", "m")
    for bad in ([part, part], [{**part, "bytes": -1}], [[]], {}, None):
        manifest(tmp_path / "a", files=bad)
        with pytest.raises(BrokenFileError):
            load_tree(tmp_path / "a", "m")


def test_files_are_their_owners_only(tmp_path):
    save_tree(tmp_path, "m", TENSORS, None)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o600}


def test_only_what_the_manifest_named_is_removed(tmp_path):
    save_tree(tmp_path, "m", TENSORS, 1)
    (tmp_path / "m-of-someone-else.safetensors").write_bytes(b"keep")
    save_tree(tmp_path, "m", {"w": torch.zeros(1)}, 2)
    assert (tmp_path / "m-of-someone-else.safetensors").read_bytes() == b"keep"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_state_is_refused_for_what_it_holds(tmp_path):
    template = (torch.zeros(1, 3), (torch.zeros(1, 0, 2), None))
    good = (torch.ones(2, 3), (torch.ones(2, 5, 2), None))
    check_state(good, template, 2)
    check_state((good[0], (good[1][0], torch.ones(2, 9))), template, 2)
    for bad, said in (
        ((torch.ones(1, 3), good[1]), "for 2 sequences"),
        ((torch.ones(2, 4), good[1]), "has the shape"),
        ((torch.ones(2, 3).double(), good[1]), "not torch.float32"),
        ((torch.full((2, 3), torch.nan), good[1]), "not finite"),
        ((good[0], (torch.full((2, 5, 2), torch.inf), None)), "not finite"),
        ((good[0], (torch.full((2, 5, 2), -1e30), None)), "beyond all use"),
        ((None, good[1]), "is missing"),
        ((good[0], (None, None)), "is missing"),
        ((good[0], good[1][0]), "is missing"),
        ((*good, torch.ones(2)), "in place of"),
        ((good[0], (torch.tensor(1.0), None)), "for 2 sequences"),
    ):
        with pytest.raises(ValueError, match=said):
            check_state(bad, template, 2)
    save_record(tmp_path, "m", "thing", good, {"n": 1})
    assert load_record(tmp_path, "m", "thing")[1] == {"n": 1}
    with pytest.raises(BrokenFileError, match="not a stone"):
        load_record(tmp_path, "m", "stone")


def test_one_fingerprint_sees_configuration_and_every_weight():
    from transformers import LlamaConfig, LlamaForCausalLM

    def model(**changes):
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **changes))

    first = fingerprint(model())
    assert fingerprint(model()) == first
    assert fingerprint(model(eos_token_id=3)) == first
    assert fingerprint(model(rms_norm_eps=1e-3)) != first
    assert fingerprint(model(rope_parameters={"rope_type": "default", "rope_theta": 9.0})) != first
    other = model()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[5, 3] += 1e-6
    assert fingerprint(other) != first


# Locks

HOLD = """
import sys, time
from pathlib import Path
from nestling.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(BusyError, match=f"in use by process {process.pid}"), locked(tmp_path):
        pass
    with pytest.raises(BusyError), locked(tmp_path, wait=0.05):
        pass
    process.kill()
    process.communicate()
    with locked(tmp_path), locked(tmp_path):  # twice by the same thread
        assert (tmp_path / ".lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_threads_take_turns(tmp_path):
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(20):
            with locked(tmp_path, wait=30):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 80
    assert max(most) == 1


WRITE = """
import sys, torch
from pathlib import Path
from nestling.files import save_tree, load_tree
folder, who, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for n in range(rounds):
    save_tree(folder, "m", {"w": torch.full((50,), float(n)), "who": torch.tensor(who)}, [who, n])
    tensors, (said, number) = load_tree(folder, "m")
    assert int(tensors["who"]) == said and float(tensors["w"][0]) == number
"""


def two_writers(folder: Path, rounds: int) -> None:
    """Two processes that save and load one tree, `rounds` times each; nothing may be lost."""
    start = [sys.executable, "-c", WRITE, str(folder)]
    writers = [
        subprocess.Popen([*start, str(who), str(rounds)], stderr=subprocess.PIPE, text=True)
        for who in range(2)
    ]
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == 0, errors
    assert load_tree(folder, "m")[1][1] == rounds - 1
    assert len(list(folder.iterdir())) == 2


def test_two_writers_lose_nothing(tmp_path):
    two_writers(tmp_path, 60)
