"""Broken and crafted files for every reader: refused with one sentence, or read; never a traceback.

    python benchmarks/fuzz.py --cases 10000            # all readers, about an hour
    python benchmarks/fuzz.py --reader memory --cases 500 --seed 7

A case damages the files of one good example: bits, cuts, additions, other bytes, or (signed) other
values in their JSON and other tensors, under checksums that are right again. Damage that a checksum
covers must be refused; signed damage must be refused or read as what it says. Counted as failures:
any error but ValueError and OSError, more than 5 seconds, and damage that was read as if nothing
had happened to it. `tests/test_fuzz.py` runs a few cases of each.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import shutil
import signal
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

SECONDS = 5
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), "", "x", "../x",
    "\x00", [], {}, [[]], {"a": 1}, [1] * 1000, "y" * 10000,
]  # fmt: skip


class Reader(NamedTuple):
    """A kind of file: how a good example is made, and how it is read."""

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    checked: bool = True  # checksums cover every byte
    resign: Callable[[Path, random.Random], None] | None = None


# Damage


def damage(path: Path, rng: random.Random) -> None:
    """Change the bytes of one file."""
    data = bytearray(path.read_bytes())
    before = bytes(data)
    while bytes(data) == before:
        kind = rng.randrange(6)
        place = rng.randrange(len(data) + 1)
        if kind == 0 and data:
            data[place % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.randrange(1, 40))
        elif kind == 3:
            del data[place : place + rng.randrange(1, 40)]
        elif kind == 4:
            data[place : place + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7])
        else:
            data[:] = rng.randbytes(rng.randrange(200))
    path.write_bytes(bytes(data))


def change_json(value: Any, rng: random.Random) -> Any:
    """The value with one part of it replaced, removed or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value, key=str))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: change_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value[:place] + value[place + 1 :]
        return [*value[:place], change_json(value[place], rng), *value[place + 1 :]]
    return copy.deepcopy(rng.choice(ODD))


def change_tensors(path: Path, rng: random.Random) -> None:
    """Another header, or other numbers, in a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    if rng.random() < 0.6:
        header = change_json(header, rng)
    elif body:
        place = rng.randrange(len(body))
        value = rng.choice([float("nan"), float("inf"), -1.0, 1e38])
        body[place : place + 4] = struct.pack("<f", value)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(body))


def resign_tree(name: str) -> Callable[[Path, random.Random], None]:
    """Crafted content under a right manifest."""

    def change(folder: Path, rng: random.Random) -> None:
        path = folder / f"{name}.json"
        manifest = json.loads(path.read_text())
        for part in manifest["files"]:
            tensors = folder / part["file"]
            if rng.random() < 0.5:
                change_tensors(tensors, rng)
            data = tensors.read_bytes()
            part |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if rng.random() < 0.7:
            manifest["meta"] = change_json(manifest["meta"], rng)
        facts = [manifest["format"], manifest["files"], manifest["meta"]]
        manifest["check"] = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        path.write_text(json.dumps(manifest, indent=1) + "\n")

    return change


# Readers


def _models() -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from nestling.models import NestlingForCausalLM, presets

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 17}
    ours = NestlingForCausalLM(presets.tiny("hope", intermediate_size=8, **sizes))
    theirs = LlamaForCausalLM(LlamaConfig(intermediate_size=8, **sizes))
    return ours.eval(), theirs.eval()


def readers() -> dict[str, Reader]:
    """Every reader of the package, on small examples."""
    from nestling.adaptation import adapt, load_learner
    from nestling.adaptation.pretrained import check_gguf, load_llama2c, load_llama2c_tokenizer
    from nestling.files import load_tree, save_tree
    from nestling.models import load_state, save_state
    from nestling.train.checkpoint import load_checkpoint, save_checkpoint
    from nestling.train.packed import PackedCorpus

    ours, theirs = _models()
    tensors = {"w": torch.randn(3, 2), "n": torch.tensor(3), "e": torch.zeros(0, 2)}

    def state(folder: Path) -> None:
        (output,) = ours.stream([torch.arange(9)[None] % 17])
        save_state(folder, ours, output.state)

    def memory(folder: Path) -> None:
        learner = adapt(theirs, [4, 8], rate=0.1)
        learner.learn(torch.arange(40) % 17)
        learner.save(folder)

    def checkpoint(folder: Path) -> None:
        made = save_checkpoint(folder / "x", 3, {"model": tensors, "f": [1.5, (2, "a")]}, {"l": 1})
        for path in made.iterdir():
            path.rename(folder / path.name)
        shutil.rmtree(folder / "x")

    def packed(folder: Path) -> None:
        from nestling.models.tokenizer import byte_tokenizer
        from nestling.train.corpus import Corpus
        from nestling.train.packed import prepare
        from nestling.train.tokenizer import TextEncoder

        corpus = [Corpus(source="builtin:1")]
        made = prepare(corpus, TextEncoder(byte_tokenizer()), folder / "x")
        for path in made.folder.iterdir():
            path.rename(folder / path.name)
        shutil.rmtree(folder / "x")

    def llama(folder: Path) -> None:
        count = (2 * 8 + 2 * 64 + 2 * 64 + 3 * 64) + 8 + 8 * 4 + 8 * 8
        head = struct.pack("<7i", 8, 8, 1, 2, 2, 8, 8)
        numbers = np.random.default_rng(0).normal(size=count).astype("<f4")
        (folder / "m.bin").write_bytes(head + numbers.tobytes())

    def words(folder: Path) -> None:
        pieces = [b"%d" % n for n in range(300)]
        rows = [struct.pack("<fi", -float(n), len(p)) + p for n, p in enumerate(pieces)]
        (folder / "tok.bin").write_bytes(struct.pack("<i", 3) + b"".join(rows))

    def gguf(folder: Path) -> None:
        def text(value: bytes) -> bytes:
            return struct.pack("<Q", len(value)) + value

        kept = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
        listed = text(b"tokens") + struct.pack("<IIQ", 9, 8, 3) + text(b"a") + text(b"b") * 2
        tensor = text(b"w") + struct.pack("<IQIQ", 1, 4, 0, 0)
        head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2)
        (folder / "m.gguf").write_bytes(head + kept + listed + tensor + bytes(32))

    def model(folder: Path) -> None:
        theirs.save_pretrained(folder)

    def read_model(folder: Path) -> Any:
        from nestling.adaptation.pretrained import _check_folder

        return _check_folder(folder, False)

    return {
        "tree": Reader(
            lambda f: save_tree(f, "m", tensors, {"n": [1, {"a": None}]}),
            lambda f: load_tree(f, "m"),
            resign=resign_tree("m"),
        ),
        "state": Reader(state, lambda f: load_state(f, ours), resign=resign_tree("state")),
        "memory": Reader(memory, lambda f: load_learner(theirs, f), resign=resign_tree("memory")),
        "checkpoint": Reader(
            checkpoint, lambda f: load_checkpoint(f).states, resign=resign_tree("part")
        ),
        "packed": Reader(packed, PackedCorpus.open),
        "llama2c": Reader(llama, lambda f: load_llama2c(f / "m.bin"), checked=False),
        "tokenizer": Reader(words, lambda f: load_llama2c_tokenizer(f / "tok.bin"), checked=False),
        "gguf": Reader(gguf, lambda f: check_gguf(f / "m.gguf"), checked=False),
        "model": Reader(model, read_model, checked=False),
    }


def recipe_case(rng: random.Random) -> None:
    """A change of a recipe that nobody meant: refused by ValueError, or a recipe."""
    import dataclasses

    from nestling.train.recipe import changed, get_recipe
    from nestling.train.trainer import check

    recipe = get_recipe("tiny")
    parts = [f"{p.name}.{k.name}" for p in dataclasses.fields(recipe)
             for k in dataclasses.fields(getattr(recipe, p.name))]  # fmt: skip
    key = rng.choice([*parts, "model.fields.hidden_size", "model.fields.levels", "a.b", ""])
    value = rng.choice(ODD)
    text = value if isinstance(value, str) else json.dumps(value)
    check(changed(recipe, [f"{key}={text}"]))


# Cases


class Timeout(BaseException):
    """A case took too long."""


def _alarm(number: int, frame: object) -> None:
    raise Timeout


def attempt(work: Callable[[], Any]) -> str:
    """How reading ended: refused, read, hang, or the name of an error nobody meant."""
    old = signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(SECONDS)
    try:
        work()
    except Timeout:
        return "hang"
    except (ValueError, OSError):
        return "refused"
    except Exception as error:
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"[
            :200
        ]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    return "read"


def run(reader: Reader, cases: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """So many cases; how they ended, and the failures."""
    warnings.simplefilter("ignore")
    good, bad = folder / "good", folder / "bad"
    good.mkdir(parents=True)
    reader.make(good)
    assert attempt(lambda: reader.read(good)) == "read", "the good example must be read"
    ends: Counter[str] = Counter()
    failures = []
    for case in range(cases):
        rng = random.Random(f"{seed} {case}")
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        signed = reader.resign is not None and rng.random() < 0.5
        if signed and reader.resign is not None:
            reader.resign(bad, rng)
        else:
            damage(rng.choice(sorted(p for p in bad.rglob("*") if p.is_file())), rng)
        end = attempt(lambda: reader.read(bad))
        failed = end not in ("refused", "read") or (end == "read" and reader.checked and not signed)
        ends[f"{end} (signed)" if signed else end] += 1
        if failed:
            failures.append(f"case {case} of seed {seed}: {end}")
    return ends, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="of each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", help="only this one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    for name, reader in readers().items():
        if given.reader in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                ends, failures = run(reader, given.cases, given.seed, Path(folder))
            print(f"{name}: {dict(ends)}; {len(failures)} failures", flush=True)
            for line in failures[:10]:
                print(f"  {line}")
            bad += len(failures)
    if given.reader in (None, "recipe"):
        cases = (random.Random(f"{given.seed} {case}") for case in range(given.cases))
        ends = Counter(attempt(lambda rng=rng: recipe_case(rng)) for rng in cases)
        print(f"recipe: {dict(ends)}")
        bad += sum(count for end, count in ends.items() if end not in ("refused", "read"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
