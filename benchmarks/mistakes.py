"""Wrong command lines: exit code 2, one line on standard error, nothing done.

    python benchmarks/mistakes.py                       # all lines in this process
    python benchmarks/mistakes.py --processes 40        # and some of them in processes of their own

Every line has one mistake beside a model, a text and a memory that are right, so a mistake that is
not noticed shows: the command succeeds. `tests/cli/test_mistakes.py` runs all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

TRAIN = (
    "train tiny run.steps=1 run.rows=1 run.eval_windows=1 data.train=text.txt data.valid=text.txt"
    " data.length=8 data.cache=cache model.fields.hidden_size=16 model.fields.num_hidden_layers=1"
    " model.fields.num_attention_heads=2 model.fields.intermediate_size=16 --out run"
).split()
COUNTS = {
    "run.steps": 0, "run.rows": 0, "run.micro": 0, "run.seed": -1, "run.eval_every": 0,
    "run.eval_windows": 0, "run.save_every": 0, "run.keep": 0, "run.sample_every": 0,
    "run.patience": 0, "run.max_bad": 0, "data.length": 1, "data.workers": 0, "optim.warmup": -1,
}  # fmt: skip
SETTINGS = {
    "optim.lr": "inf nan -1 0 x",
    "optim.clip": "-1 0 nan inf x",
    "optim.weight_decay": "-1 nan inf x",
    "optim.floor": "-1 2 nan x",
    "optim.shape": "x Cosine",
    "optim.name": "x AdamW Optimizer",
    "optim.chunks": "0 -1 x 4,0",
    "optim.options": "3",
    "optim.options.x": "3",
    "data.order": "x Shuffled",
    "data.carry": "perhaps 2",
    "data.train": "hf: builtin:9-3 builtin:x builtin:0 nofile.txt empty",
    "data.valid": "hf: builtin:9-3 builtin:x nofile.txt",
    "data.tokenizer": "x bpe: bpe:x bpe:-1 bpe:1 bpe:99999999999999999999 empty",
    "run.precision": "x float64",
    "run.strategy": "x FSDP",
    "run.compile": "maybe",
    "run.recompute": "2",
    "run.stepz": "3",
    "run": "3",
    "a.b": "1",
    "run.steps.x": "1",
    "model.fields": "1",
    "model.preset": "x Size configure Tiny",
    "model.name": "x Hope size",
    "model.start": "nowhere empty",
    "model.grow": "x -1 3,4",
    "model.fields.hidden_size": "x -1 0 1.5 17 null",
    "model.fields.num_hidden_layers": "x -1 0 1.5",
    "model.fields.num_attention_heads": "x -1 0 3",
    "model.fields.intermediate_size": "x -1 0",
    "model.fields.levels": '3 x [3] [{}] [{"name":"a"}] [{"name":"a","chunk":0}]',
    "model.fields.topology": "x 3",
    "model.fields.activation": "x 3",
    "model.fields.hidden_sizes": "8",
}
LINES = {  # a right line: its options and what may not stand there ('' is an empty text)
    "cost tiny": {
        "--tokens": "0 -1 nan inf x",
        "--gpus": "0 -1 x 1.5",
        "--gpu": "x H1000 ''",
        "--length": "0 -1 x",
        "--rows": "0 -1 x",
        "--utilisation": "0 -1 2 nan x",
        "--model": "x ''",
    },
    "eval model text.txt": {
        "--tokens": "-5 0 1 x 1.5",
        "--bins": "0 -1 x",
        "--memory": "'' nowhere empty text.txt",
        "--out": "nodir/x.json empty",
        "--limit": "0 -1 x",
        "--include": "nowhere text.txt",
        "--tasks": "'' , a,,b",
        "--suite": "x ''",
    },
    "eval model --suite ruler": {
        "--lengths": "0 x -1 '' 1k,,2k",
        "--data": "nowhere text.txt",
        "--tasks": "x '' ,",
        "--memory": "memory",
    },
    "generate model": {
        "--tokens": "0 -1 x",
        "--temperature": "nan -1 inf x",
        "--top-p": "0 -1 2 nan x",
        "--seed": "-1 x 9223372036854775808",
        "--memory": "'' nowhere empty text.txt",
        "--prompt": "\udcff",
    },
    "learn model --from text.txt --memory new": {
        "--drift": "nan 0 -1 x",
        "--forget": "nan 0 -1 x",
        "--tokens": "0 -1 x",
        "--save-every": "0 -1 x",
        "--passes": "0 -1 x",
        "--chunks": "0 -1 x '' , 64,x 512,64",
        "--rate": "-1 nan inf x '' 0.1,0.2,0.3",
        "--rule": "x '' Adam",
        "--retain": "-1 2 nan x",
        "--layers": "x 99 '' 'last 0' 0,99",
        "--assign": "x ''",
        "--rank": "0 -1 x",
        "--transfer": "x",
        "--context": "0 -1 x",
        "--out": "nodir/x.html x.png empty",
        "--undo": "x ''",
        "--export": "text.txt",
        "--memory": "'' text.txt",
        "--from": "nofile.txt empty blank.txt odd.txt",
    },
    "learn model --from text.txt --memory memory": {
        "--chunks": "8",
        "--rate": "0.1",
        "--rank": "4",
        "--undo": "x",
    },
    "describe hope": {
        "--out": "nodir/x.svg x.png empty",
        "--optimizer": "x Optimizer '' LBFGSS",
        "--size": "x '' Tiny",
    },
    f"tune {' '.join(TRAIN[1:-2])} optim.lr=1e-3..1e-2 --trials 1 --out search": {
        "--trials": "0 -1 x 1.5",
        "--jobs": "0 -1 x",
        "--minutes": "0 -1 nan x",
        "--sampler": "x '' Halton",
        "--out": "text.txt",
    },
    "demo --out run": {
        "--steps": "0 -1 x",
        "--documents": "0 -1 x",
        "--characters": "10 -1 x",
        "--seed": "-1 x",
        "--out": "text.txt",
    },
}
TUNED = (  # searches that cannot begin
    "optim.lr=x..1 optim.lr=1..x optim.lr=2..1 optim.lr=1..1 optim.lr=nan..1 optim.lr=1|| a.b=1..2"
    " optim.lr=1|1 optim.lr=1|x optim.name=adamw|x|m3 run.steps=0..3 run.rows=1|0|2 level=1..2"
    " level.x.rate=1..2 level.fast.x=1..2 model.preset=Size model.preset=x model.name=x"
    " data.train=nofile model.fields.hidden_size=x model.fields.levels=3 optim.lr=inf"
    " data.length=8|1"
).split()
WHOLE = [  # mistakes of their own kind
    ["unknown"], ["Train"], ["--x"], ["\udcff"], ["train"], ["train", "huge"], ["train", ""],
    ["train", "tiny", "run.steps"], ["train", "tiny", "="], ["train", "tiny", "data.train="],
    ["train", "tiny", "data.valid="], ["train", "tiny", "--out"], ["cost"], ["cost", "huge"],
    ["cost", "tiny", "x"], ["eval"], ["eval", "model"], ["eval", "model", "nofile.txt"],
    ["eval", "model", "empty"], ["eval", "nowhere", "text.txt"], ["eval", "empty", "text.txt"],
    ["eval", "text.txt", "text.txt"], ["eval", "model", "text.txt", "x"], ["generate"],
    ["generate", "nowhere"], ["generate", "empty"], ["generate", "text.txt"],
    ["generate", "no.gguf"], ["generate", "no.bin"], ["generate", "odd.gguf"],
    ["generate", "odd.bin"], ["generate", ""], ["generate", "model", "x"],
    ["learn", "model"], ["learn", "--memory", "new"], ["learn", "model", "--memory", "new"],
    ["learn", "nowhere", "--from", "text.txt", "--memory", "new"],
    ["learn", "empty", "--from", "text.txt", "--memory", "new"], ["describe"],
    ["describe", "nowhere"], ["describe", "empty"], ["describe", "hop"], ["describe", ""],
    ["describe", "hope", "x"], ["demo", "x"], ["doctor", "x"], ["doctor", "--fast"],
]  # fmt: skip


def _values(listed: str) -> list[str]:
    import shlex

    return shlex.split(listed) if "'" in listed else listed.split()


def lines() -> list[list[str]]:
    """All of them."""
    made = [list(line) for line in WHOLE]
    for key, least in COUNTS.items():
        made += [[*TRAIN, f"{key}={value}"] for value in (str(least), "x", "1.5", "nan")]
    made += [["tune", *TRAIN[1:-2], *"--trials 1 --out search".split(), one] for one in TUNED]
    made += [["tune"], ["tune", "huge"], ["tune", "tiny", "x"]]
    for key, listed in SETTINGS.items():
        made += [[*TRAIN, f"{key}={value}"] for value in listed.split()]
    for base, options in LINES.items():
        for option, listed in options.items():
            made += [[*base.split(), option, value] for value in _values(listed)]
            made.append([*base.split(), option])  # nothing after it
            made.append([*base.split(), f"{option}z", "1"])  # misspelt
    return made


def prepare(folder: Path) -> None:
    """A model, a memory and a text that are right, and some files that are not."""
    import torch

    import nestling
    from nestling.models import NestlingForCausalLM, presets
    from nestling.models.tokenizer import byte_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = presets.tiny("transformer", vocab_size=259, intermediate_size=16, **sizes)
    model = NestlingForCausalLM(config).eval()
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    nestling.adapt(model, [8], rate=0.1).save(folder / "memory")
    (folder / "text.txt").write_text("Day 1, spring. The rain fell on the harbour. " * 8)
    (folder / "blank.txt").write_text(" \n")
    (folder / "odd.txt").write_bytes(b"\xff\xfe\x00" * 40)
    for name in ("odd.gguf", "odd.bin"):
        (folder / name).write_bytes(b"GGUF" + bytes(range(200)))
    (folder / "empty").mkdir()


def listing(folder: Path) -> dict[str, int]:
    """Every path below a folder, and when each file was changed."""
    return {
        str(p.relative_to(folder)): p.is_file() * p.stat().st_mtime_ns for p in folder.rglob("*")
    }


def wrong(code: int, out: str, err: str, changed: bool) -> str:
    """The fault in how a line ended; empty if there is none."""
    if code != 2:
        return f"exit code {code}: {(err or out).strip().splitlines()[-1:]}"
    if len(err.splitlines()) != 1 or not err.startswith("nestling"):
        return f"{len(err.splitlines())} lines: {err[-300:]!r}"
    if out:
        return f"it printed {out[:80]!r}"
    return "files were changed" if changed else ""


def run_here(folder: Path, chosen: list[list[str]]) -> Iterator[tuple[list[str], str]]:
    """Run lines in this process, in `folder`; yields each with what is wrong."""
    from nestling.cli import main

    before = listing(folder)
    with contextlib.chdir(folder):
        for line in chosen:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        code = main(line)
                except SystemExit as ended:
                    code = int(ended.code or 0)
                except Exception as error:
                    code, err = 1, io.StringIO(f"{type(error).__name__}: {error}")
            after = listing(folder)
            yield line, wrong(code, out.getvalue(), err.getvalue(), after != before)
            before = after


def run_outside(folder: Path, chosen: list[list[str]]) -> Iterator[tuple[list[str], str]]:
    """The same, each line in a process of its own, with nothing on standard input."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    for line in chosen:
        before = listing(folder)
        done = subprocess.run(
            [sys.executable, "-m", "nestling.cli", *(os.fsencode(part) for part in line)],
            cwd=folder, env=environment, capture_output=True, stdin=subprocess.DEVNULL,
            timeout=300, check=False,
        )  # fmt: skip
        out, err = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
        yield line, wrong(done.returncode, out, err, listing(folder) != before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=0, help="so many also outside")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    chosen, bad = lines(), 0
    sample = random.Random(given.seed).sample(chosen, given.processes)
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for run, some in ((run_here, chosen), (run_outside, sample)):
            for line, said in run(Path(name), some):
                if said:
                    bad += 1
                    shown = " ".join(part for part in line if part not in TRAIN[2:])
                    print(f"{shown!a}: {said}", flush=True)
    print(f"{len(chosen)} wrong lines here and {len(sample)} in processes of their own:"
          f" {bad} did not end with exit code 2, one line and nothing done")  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
