"""Broken and crafted files for every reader: refused with one sentence, or read; never a traceback.

    python benchmarks/fuzz.py                              # 10,000 random and 5,000 crafted files
    python benchmarks/fuzz.py --reader memory --random 500 --crafted 0 --seed 7

A case changes the files of one good example. *Random*: bits, cuts, additions, other bytes. Damage
that a checksum covers must be refused; elsewhere what is read must be sound: its numbers are finite
and it can be used. *Crafted*: other values in the JSON and other tensors under checksums that are
right again, headers that declare too much, or a pipe, a device, a folder, a hole or nested JSON in
place of a file; refused, or sound. Counted as failures: any error but ValueError and OSError, more
than 5 seconds, damage that was read as if nothing had happened to it, and more than 256 MB.
`tests/test_fuzz.py` runs a few cases of each.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import math
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from common import peak_mb

SECONDS = 5
MEGABYTES = 256
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), "", "x", "../x",
    "\x00", [], {}, [[]], {"a": 1}, [1] * 1000, "y" * 10000,
]  # fmt: skip


class Reader(NamedTuple):
    """A kind of file: how a good example is made, read, crafted otherwise, and seen to be sound."""

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    craft: Callable[[Path, random.Random], None]
    sound: Callable[[Any], bool]
    checked: bool = True  # checksums cover every byte


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


def misplace(path: Path, rng: random.Random) -> None:
    """Something that is no such file, in its place."""
    path.unlink()
    kind = rng.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/tty", "/proc/self/mem", "nowhere"]))
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.write_bytes(b"")
        os.truncate(path, rng.choice([1, 1 << 20, 1 << 34, 1 << 42]))  # a hole: no disk
    elif kind == 4:
        path.write_bytes(rng.choice([b"[", b'{"a":', b'[{"a":[']) * rng.randrange(1, 100_000))
    elif kind == 5:
        path.write_bytes(b"\x80\x04\x95" + rng.randbytes(50))  # a pickle's first bytes
    # otherwise it is missing


def crafted(
    change: Callable[[Path, random.Random], None],
) -> Callable[[Path, random.Random], None]:
    """The reader's own crafted changes, and now and then something that is no file."""

    def craft(folder: Path, rng: random.Random) -> None:
        if rng.random() < 0.15:
            misplace(_some_file(folder, rng), rng)
        else:
            change(folder, rng)

    return craft


def _some_file(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))


def _sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def resign(name: str, folder: Path, rng: random.Random) -> None:
    """Other facts, and what is in the files now, under a right manifest."""
    path = folder / f"{name}.json"
    manifest = json.loads(path.read_text())
    for part in manifest["files"]:
        data = (folder / part["file"]).read_bytes()
        part |= {"bytes": len(data), "sha256": _sha256(data)}
    if rng.random() < 0.7:
        manifest["meta"] = change_json(manifest["meta"], rng)
    if rng.random() < 0.1:
        manifest["files"] = change_json(manifest["files"], rng)
    facts = [manifest["format"], manifest["files"], manifest["meta"]]
    manifest["check"] = _sha256(json.dumps(facts))
    path.write_text(json.dumps(manifest, indent=1) + "\n")


def craft_tree(name: str) -> Callable[[Path, random.Random], None]:
    """Other tensors and facts under a right manifest."""

    def change(folder: Path, rng: random.Random) -> None:
        for path in sorted(folder.glob("*.safetensors")):
            if rng.random() < 0.5:
                change_tensors(path, rng)
        resign(name, folder, rng)

    return crafted(change)


def craft_packed(folder: Path, rng: random.Random) -> None:
    """Other tokens or starts; the facts are changed, and all is signed, as a tree's."""
    for name, kind in (("tokens", "<u2"), ("starts", "<i8")):
        numbers = np.fromfile(folder / f"{name}.bin", kind)
        if rng.random() < 0.4:
            value = rng.choice([0, 1, 259, 60_000, (1 << 15) - 1] + [-1] * (name == "starts"))
            numbers[rng.randrange(len(numbers))] = value
            numbers.tofile(folder / f"{name}.bin")
    resign("packed", folder, rng)


def craft_study(folder: Path, rng: random.Random) -> None:
    """Another run, or another place for it, under a right checksum."""
    path = _some_file(folder, rng)
    held = json.loads(path.read_text())
    part = "runs" if "runs" in held else "run"
    if rng.random() < 0.6:
        held[part] = change_json(held[part], rng)
    text = json.dumps(held[part])
    if part == "runs" and isinstance(held[part], dict):
        text = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in held[part].items())
    held["check"] = _sha256(text)
    if rng.random() < 0.5:
        held = change_json(held, rng)
    path.write_text(json.dumps(held))
    if rng.random() < 0.2:
        shutil.move(path, path.parent / f"{rng.choice(['x', 'seed-9', '..x'])}.json")


def craft_llama(folder: Path, rng: random.Random) -> None:
    """Another header, at times with the numbers it asks for, or other numbers."""
    path = folder / "m.bin"
    data = bytearray(path.read_bytes())
    sizes = list(struct.unpack_from("<7i", data))
    if rng.random() < 0.7:
        odd = [0, -1, 1, 2, 3, 7, 16, 300_000, 2_000_000, 2**31 - 1, -(2**31)]
        sizes[rng.randrange(7)] = rng.choice(odd)
        struct.pack_into("<7i", data, 0, *sizes)
    if rng.random() < 0.5:
        value = rng.choice([math.nan, math.inf, -math.inf, 1e38, 1e-45])
        struct.pack_into("<f", data, 28 + 4 * rng.randrange((len(data) - 28) // 4), value)
    dim, hidden, layers, heads, kv_heads, words, context = sizes
    if rng.random() < 0.7 and heads > 0 and min(sizes) >= -8:
        kv = dim // heads * kv_heads
        block = 2 * dim + 2 * dim * dim + 2 * kv * dim + 3 * hidden * dim
        count = layers * block + dim + context * (dim // heads) + abs(words) * dim
        if 0 <= count < 1 << 20:
            data = data[: 28 + 4 * count] + bytes(max(0, 28 + 4 * count - len(data)))
    path.write_bytes(bytes(data))


def craft_words(folder: Path, rng: random.Random) -> None:
    """Tokens of odd lengths, scores and bytes."""
    rows = []
    for number in range(rng.choice([0, 5, 258, 259, 300, 400])):
        piece = rng.choice([b"%d" % number, b"", b"\xff\xfe", "ü ".encode(), b"a" * 5000, b"a"])
        piece = piece if rng.random() < 0.02 else b"%d" % number
        length = len(piece) if rng.random() < 0.995 else rng.choice([-1, 2**31 - 1, 4097, 0])
        score = -float(number) if rng.random() < 0.998 else rng.choice([math.nan, math.inf, 1e38])
        rows.append(struct.pack("<fi", score, length) + piece)
    head = struct.pack("<i", rng.choice([3, 0, -1, 2**31 - 1]))
    (folder / "tok.bin").write_bytes(head + b"".join(rows))


def craft_gguf(folder: Path, rng: random.Random) -> None:
    """Counts, lengths, types and offsets of the header that declare something else."""
    path = folder / "m.gguf"
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 4)):
        kind, odd = rng.choice(
            [
                ("<I", [0, 1, 8, 9, 12, 13, 99, 2**31, 2**32 - 1]),
                ("<Q", [0, 1, 2**20, 2**32, 2**63, 2**64 - 1]),
                ("<f", [math.nan, math.inf, -1.0, 0.0]),
            ]
        )
        place = rng.randrange(4, 24) if rng.random() < 0.2 else rng.randrange(24, len(data) - 8)
        struct.pack_into(kind, data, place, rng.choice(odd))
    path.write_bytes(bytes(data))


def craft_model(folder: Path, rng: random.Random) -> None:
    """Another configuration, tokenizer or header; weights missing, renamed or not finite."""
    from safetensors.torch import load_file, save_file

    path = folder / rng.choice(["config.json", "config.json", "tokenizer_config.json", "model"])
    if path.suffix == ".json":
        path.write_text(json.dumps(change_json(json.loads(path.read_text()), rng)))
        return
    path = folder / "model.safetensors"
    if rng.random() < 0.5:
        change_tensors(path, rng)
        return
    weights = load_file(path)
    name = rng.choice(sorted(weights))
    weight = weights.pop(name)
    kind = rng.randrange(4)
    if kind == 1:
        weights[f"{name}.x"] = weight
    elif kind == 2:
        weights[name] = weight[..., :-1].contiguous()
    elif kind == 3:
        weight.view(-1)[0] = rng.choice([math.nan, math.inf])
        weights[name] = weight
    save_file(weights, path, {"format": "pt"})


# Readers


def _models() -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from nestling.models import NestlingForCausalLM, presets

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 17}
    ours = NestlingForCausalLM(presets.tiny("hope", intermediate_size=8, **sizes))
    theirs = LlamaForCausalLM(LlamaConfig(intermediate_size=8, **sizes))
    return ours.eval(), theirs.eval()


IDS = torch.arange(5)[None]


def answers(model: Any) -> bool:
    """A model, or a learner, says something finite."""
    with torch.no_grad():
        return bool(model(IDS % model.config.vocab_size).logits.isfinite().all())


def _finite(value: Any) -> bool:
    """No number that is none, unless it was stored by that name."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _finite(part) for key, part in value.items())
    return not isinstance(value, list) or all(map(_finite, value))


def _moved(made: Path, folder: Path) -> None:
    """Put what was made in a folder of its own directly into `folder`."""
    for path in made.iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(next(each for each in folder.iterdir() if each.is_dir()))


def make_gguf(folder: Path) -> None:
    """A Llama of one layer with a tokenizer of bytes."""
    import gguf

    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(259)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))])
    writer.add_token_scores([0.0] * 259)
    writer.add_token_types([2, 3, 3] + [6] * 256)
    chance = np.random.default_rng(0)
    squares = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd": (259, 8), "output_norm": (8,), "output": (259, 8)}
    shapes |= {f"blk.0.{name}": (8,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.{name}": (8, 8) for name in squares}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", chance.normal(size=shape).astype("f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


RECIPE = """
    model.fields.hidden_size=8 model.fields.num_hidden_layers=1 model.fields.num_attention_heads=2
    model.fields.intermediate_size=8 data.train=builtin:1 data.valid=builtin:1 data.length=8
    run.rows=1 run.steps=2 run.eval_windows=1
""".split()


def _weighs(weights: dict[str, Any]) -> bool:
    return all(bool(weight.isfinite().all()) for weight in weights.values())


def run_reader() -> Reader:
    """A checkpoint as training goes on from it, with weights, optimizer, memories and chance."""
    from nestling.train.checkpoint import checkpoints, load_checkpoint
    from nestling.train.distributed import World
    from nestling.train.progress import Progress
    from nestling.train.recipe import changed, get_recipe
    from nestling.train.trainer import Trainer, TrainingFailedError, train

    def recipe(folder: Path) -> Any:
        return changed(get_recipe("stream"), [*RECIPE, f"data.cache={folder.parent / 'cache'}"])

    def make(folder: Path) -> None:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
            train(recipe(folder), folder / "x")
        (folder / "x" / "checkpoints" / "step-00000002").rename(folder / "y")
        shutil.rmtree(folder / "x")
        _moved(folder / "y", folder)

    def read(folder: Path) -> Any:
        run = folder.parent / "run"
        shutil.rmtree(run, ignore_errors=True)
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints" / "step-00000002").symlink_to(folder)
        trainer = Trainer(recipe(folder), run, World(), Progress(3, run, speak=False))
        trainer.resume()
        if trainer.state.step == 0:
            raise ValueError("it was passed over")
        trainer.step()
        return trainer

    def goes_on(trainer: Any) -> bool:
        """Weights that are none are not saved; the run ends with what is wrong."""
        with contextlib.suppress(TrainingFailedError):
            trainer.save()
        found = checkpoints(trainer.checkpoints)[1:]
        return all(_weighs(load_checkpoint(path).states["model"]) for path in found)

    return Reader(make, read, craft_tree("part"), goes_on)


def readers() -> dict[str, Reader]:
    """Every reader of the package, on small examples."""
    from nestling.adaptation import adapt, load_learner, load_pretrained
    from nestling.adaptation.pretrained import load_llama2c, load_llama2c_tokenizer
    from nestling.files import load_tree, save_tree
    from nestling.models import load_state, save_state
    from nestling.models.tokenizer import byte_tokenizer
    from nestling.train.checkpoint import load_checkpoint, save_checkpoint
    from nestling.train.corpus import Corpus
    from nestling.train.packed import PackedCorpus, prepare
    from nestling.train.tokenizer import TextEncoder
    from studies.harness.store import Store

    ours, theirs = _models()
    tensors = {"w": torch.randn(3, 2), "n": torch.tensor(3), "e": torch.zeros(0, 2)}

    def state(folder: Path) -> None:
        (output,) = ours.stream([torch.arange(9)[None] % 17])
        save_state(folder, ours, output.state)

    def continues(state: Any) -> bool:
        with torch.no_grad():
            (output,) = ours.stream([IDS.expand(len(state.position), -1)], state)
        return bool(output.logits.isfinite().all())

    def memory(folder: Path) -> None:
        learner = adapt(theirs, [4, 8], rate=0.1)
        learner.learn(torch.arange(40) % 17)
        learner.save(folder)

    def checkpoint(folder: Path) -> None:
        states = {"model": tensors, "f": [1.5, (2, "a")]}
        _moved(save_checkpoint(folder / "x", 3, states, {"l": 1}), folder)

    def packed(folder: Path) -> None:
        encoder = TextEncoder(byte_tokenizer())
        _moved(prepare([Corpus(source="builtin:1")], encoder, folder / "x").folder, folder)

    def whole(corpus: PackedCorpus) -> bool:
        ends = corpus.starts
        return bool(corpus.tokens.max() < corpus.vocab_size and ends[-1] == len(corpus.tokens))

    def study(folder: Path) -> Store:
        return Store(folder / "runs", study="s", copy=folder / "s.json", needs=("loss",))

    def runs(folder: Path) -> None:
        for seed in range(2):
            study(folder).put(f"hope/seed-{seed}", {"loss": 1.25 + seed, "curve": [0.5, 0.25]})
        study(folder).gather()

    def llama(folder: Path) -> None:
        count = (2 * 8 + 2 * 64 + 2 * 64 + 3 * 64) + 8 + 8 * 4 + 8 * 8
        head = struct.pack("<7i", 8, 8, 1, 2, 2, 8, 8)
        numbers = np.random.default_rng(0).normal(size=count).astype("<f4")
        (folder / "m.bin").write_bytes(head + numbers.tobytes())

    def words(folder: Path) -> None:
        pieces = [b"%d" % n for n in range(300)]
        rows = [struct.pack("<fi", -float(n), len(p)) + p for n, p in enumerate(pieces)]
        (folder / "tok.bin").write_bytes(struct.pack("<i", 3) + b"".join(rows))

    def model(folder: Path) -> None:
        theirs.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)

    def readable(tree: Any) -> bool:
        return all(isinstance(value, torch.Tensor) for value in tree[0].values())

    def encodes(tokenizer: Any) -> bool:
        return bool(tokenizer("12 ü").input_ids)

    return {
        "tree": Reader(
            lambda f: save_tree(f, "m", tensors, {"n": [1, {"a": None}]}),
            lambda f: load_tree(f, "m"),
            craft_tree("m"),
            readable,
        ),
        "state": Reader(state, lambda f: load_state(f, ours), craft_tree("state"), continues),
        "memory": Reader(memory, lambda f: load_learner(theirs, f), craft_tree("memory"), answers),
        "checkpoint": Reader(
            checkpoint,
            lambda f: load_checkpoint(f).states,
            craft_tree("part"),
            lambda states: isinstance(states, dict),
        ),
        "run": run_reader(),
        "packed": Reader(packed, PackedCorpus.open, crafted(craft_packed), whole),
        "study": Reader(runs, lambda f: study(f).runs(), crafted(craft_study), _finite),
        "llama2c": Reader(
            llama, lambda f: load_llama2c(f / "m.bin"), crafted(craft_llama), answers, False
        ),
        "tokenizer": Reader(
            words,
            lambda f: load_llama2c_tokenizer(f / "tok.bin"),
            crafted(craft_words),
            encodes,
            False,
        ),
        "gguf": Reader(
            make_gguf,
            lambda f: load_pretrained(f / "m.gguf")[0],
            crafted(craft_gguf),
            answers,
            False,
        ),
        "model": Reader(
            model, lambda f: load_pretrained(f)[0], crafted(craft_model), answers, False
        ),
    }


def recipe_case(rng: random.Random) -> None:
    """A change of a recipe that nobody meant: refused by ValueError, or a recipe."""
    import dataclasses

    from nestling.train.parts import check
    from nestling.train.recipe import changed, get_recipe

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


def attempt(read: Callable[[], Any], sound: Callable[[Any], bool] | None = None) -> str:
    """How reading ended: refused, read, unsound, hang, or the name of an error nobody meant."""
    old = signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(SECONDS)
    begun = time.monotonic()
    try:
        try:
            value = read()
        except (ValueError, OSError):
            return "refused" if time.monotonic() - begun <= SECONDS else "hang"
        signal.alarm(0)
        if time.monotonic() - begun > SECONDS:
            return "hang"
        return "read" if sound is None or sound(value) else "unsound"
    except Timeout:
        return "hang"
    except Exception as error:
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return f"{type(error).__name__} at {where}: {error}"[:200]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


class Counts(NamedTuple):
    """How the cases of one reader ended."""

    ends: Counter[str]
    failures: list[str]
    megabytes: float  # at most, beyond what the process had before


def run(reader: Reader, randoms: int, crafts: int, seed: int, folder: Path) -> Counts:
    """So many random and crafted cases of one reader."""
    good, bad = folder / "good", folder / "bad"
    good.mkdir(parents=True)
    reader.make(good)
    assert reader.sound(reader.read(good)), "the good one must be read"  # with all its imports
    ends: Counter[str] = Counter()
    failures: list[str] = []
    before = peak_mb()
    for kind, cases in (("random", randoms), ("crafted", crafts)):
        for case in range(cases):
            rng = random.Random(f"{seed} {kind} {case}")
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            if kind == "random":
                damage(_some_file(bad, rng), rng)
            else:
                reader.craft(bad, rng)
            end = attempt(lambda: reader.read(bad), reader.sound)
            if end == "hang":  # on a busy machine: once more
                end = attempt(lambda: reader.read(bad), reader.sound)
            accepted = end == "read" and kind == "random" and reader.checked
            ends[f"{kind}: {end}"] += 1
            if accepted or end not in ("refused", "read"):
                failures.append(f"{kind} case {case} of seed {seed}: {end}")
    return Counts(ends, failures, peak_mb() - before)


@contextlib.contextmanager
def silent() -> Any:
    """Hide what other packages say about broken files."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ["TQDM_DISABLE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=10_000, help="cases of all readers together")
    parser.add_argument("--crafted", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", help="only this one")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a recipe may name a tokenizer of the hub
    torch.set_num_threads(1)
    chosen = {k: v for k, v in readers().items() if given.reader in (None, k)}
    recipes = given.crafted // 10 if given.reader in (None, "recipe") else 0
    shares = max(len(chosen), 1)
    total: Counter[str] = Counter()
    with silent():
        for number, (name, reader) in enumerate(chosen.items()):
            randoms = (given.random + number) // shares
            crafts = (given.crafted - recipes + number) // shares
            with tempfile.TemporaryDirectory() as folder:
                counts = run(reader, randoms, crafts, given.seed, Path(folder))
            total.update(random=randoms, crafted=crafts, failures=len(counts.failures))
            total["too much memory"] += counts.megabytes > MEGABYTES
            print(f"{name}: {dict(counts.ends)}; {len(counts.failures)} failures, at most"
                  f" {counts.megabytes:.0f} MB more", flush=True)  # fmt: skip
            for line in counts.failures[:10]:
                print(f"  {line}")
        cases = (random.Random(f"{given.seed} {case}") for case in range(recipes))
        ends = Counter(attempt(lambda rng=rng: recipe_case(rng)) for rng in cases)
    if recipes:
        print(f"recipe: {dict(ends)}")
    wrong = sum(count for end, count in ends.items() if end not in ("refused", "read"))
    total.update(crafted=recipes, failures=wrong)
    print(f"{total['random']} random and {total['crafted']} crafted files: {total['failures']}"
          f" failures, {total['too much memory']} readers beyond {MEGABYTES} MB")  # fmt: skip
    return 1 if total["failures"] or total["too much memory"] else 0


if __name__ == "__main__":
    sys.exit(main())
