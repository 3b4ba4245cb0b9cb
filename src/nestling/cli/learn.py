"""`nestling learn`."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestling.cli import Parser
from nestling.cli.options import (
    MODEL,
    folder,
    load,
    new_file,
    number,
    several,
    trust_option,
    whole,
)

_EXAMPLES = """examples:
  nestling learn nestling:small --from diary.txt --memory mine    # a small model that comes along
  nestling learn SmolLM2-135M-Instruct.Q4_1.gguf --from diary.txt --memory mine
  nestling learn runs/tiny/model --from diary.txt --chunks 64,512,4096 --memory mine
  nestling learn MODEL --from more.txt --memory mine          # goes on with the same memory
  nestling learn MODEL --from book.txt --memory mine --out timeline.html
  nestling learn MODEL --memory mine --undo diary.txt         # takes one text back
  nestling learn MODEL --memory mine --export lora            # as a PEFT LoRA
  nestling generate MODEL --memory mine --prompt "Call me"

The model is a folder, nestling:small, a name on the hub, a .gguf file, or a llama2.c .bin file
beside its tokenizer. It is not changed: what is learned goes to the memory folder. A run that was
stopped goes on where it was when the same command is given again. Short texts are read several
times; a text that spoils what was known before is refused. The exit code is 1 when nothing was
learned. See docs/adapt.md."""


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        "learn",
        description="Let a pretrained model learn texts into a memory of several time scales.",
        epilog=_EXAMPLES,
    )
    made.add_argument("model", help=MODEL)
    made.add_argument(
        "--from",
        dest="files",
        nargs="+",
        default=[],
        metavar="FILE",
        type=Path,
        help="texts to learn, one after the other",
    )
    made.add_argument("--memory", required=True, type=folder, help="folder of the memory")
    any_number = number(lambda value: True, "a number")
    new = made.add_argument_group("a new memory (a memory that exists has its own settings)")
    new.add_argument(
        "--chunks", type=several(whole()), help="tokens between updates, fastest first (64,512)"
    )
    new.add_argument(
        "--rate", type=several(any_number), help="for all levels, or one each (natural steps: 1)"
    )
    new.add_argument("--rule", help="natural (default), gd, momentum, adam, dgd, muon, m3, ...")
    new.add_argument(
        "--retain", type=several(any_number), help="what a level keeps at each update (default 1)"
    )
    new.add_argument("--layers", help='layers that learn: "last half", "first 4", 3,4,5')
    new.add_argument("--assign", help="share (default), split, layers, own")
    new.add_argument("--rank", type=whole(), help="keep differences as factors of this rank")
    new.add_argument("--transfer", help="move, reptile, first_order: from fast to slow levels")
    made.add_argument("--passes", type=whole(), help="how often each text is read (short ones: 4)")
    new.add_argument("--context", type=whole(), help="the model's own context, in tokens")
    positive = number(lambda value: 0 < value < math.inf, "a finite number above 0")
    made.add_argument(
        "--drift",
        type=positive,
        default=1.0,
        help="how far a level may go, as a share of its weights' norm (1)",
    )
    made.add_argument(
        "--forget",
        type=float,
        default=1.0,
        help="a text is refused if it raises the loss on earlier ones by more (1 nat per token)",
    )
    made.add_argument("--tokens", type=whole(), help="read at most so many tokens of each file")
    made.add_argument(
        "--save-every",
        type=whole(),
        default=16384,
        metavar="TOKENS",
        help="save the memory after so many (default 16384): a stopped run goes on from there",
    )
    made.add_argument(
        "--out", type=new_file(".html", ".svg"), help="timeline of all levels, .html or .svg"
    )
    made.add_argument("--undo", metavar="NAME", help="take back what a text changed, by its name")
    made.add_argument("--export", type=Path, metavar="FOLDER", help="write a PEFT LoRA")
    trust_option(made)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Learn the files one after the other; returns 0, or 1 when nothing was learned.

    The memory is locked meanwhile: a second `learn` on it is refused and learns nothing.
    """
    from nestling.files import locked

    _check(arguments)
    texts = [_text(path) for path in arguments.files]
    new = not arguments.memory.exists()
    try:
        with locked(arguments.memory):
            return _learn(arguments, texts)
    finally:
        if new:
            with contextlib.suppress(OSError):
                arguments.memory.rmdir()  # if nothing was saved in it


def _learn(arguments: argparse.Namespace, texts: list[str]) -> int:
    from nestling.adaptation import DriftWarning, Limits, adapt, load_learner
    from nestling.adaptation.learner import encode
    from nestling.machine import keep_memory

    resumed = (arguments.memory / "memory.json").is_file()
    settings = _settings(arguments)
    if resumed:
        _refuse(arguments.memory, settings)
    elif not texts:
        raise ValueError(f"{arguments.memory}: no memory there; --from FILE makes one")
    limits = Limits(drift=arguments.drift, forget=arguments.forget)
    keep_memory()
    model, tokenizer = load(arguments)
    options: dict[str, Any] = {"tokenizer": tokenizer, "limits": limits}
    if not resumed:
        learner = adapt(model, **settings, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)  # alarms are told below
        if resumed:
            learner = load_learner(model, arguments.memory, **options)
        where = f"{arguments.memory} at position {learner.position:,}"
        if arguments.export is not None and any(level.rank is None for level in learner.levels):
            raise ValueError("--export: this memory keeps full matrices; make it with --rank")
        if arguments.undo is not None:
            learner.undo(arguments.undo)
        _say(f"goes on with {where}" if resumed else f"a new memory, {arguments.memory}")
        if arguments.undo is not None:
            learner.save(arguments.memory)
            _say(f"{arguments.undo}: what it changed is taken back")
        plan = _plan(learner.notes, arguments.files, texts)
        if arguments.passes is not None:
            plan = [{**entry, "passes": arguments.passes} for entry in plan]
        learned, told = not texts, []
        for number, text in enumerate(texts):
            if not plan[number]["done"]:
                ids = encode(text, tokenizer, begin=True)[: arguments.tokens]
                told.append(_learn_file(learner, ids, plan, number, arguments))
            learned = learned or bool(plan[number].get("updates"))
        print(learner)
        if arguments.out is not None:
            print(f"timeline: {_draw(learner, arguments.out, arguments.memory, told)}")
        if arguments.export is not None:
            print(f"PEFT LoRA: {learner.export_peft(arguments.export)}")
    return 0 if learned else 1


def _plan(notes: Any, files: list[Path], texts: list[str]) -> list[dict[str, Any]]:
    """Every file with how much of it is learned: as a stopped run left it, or nothing."""
    sums = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    last = notes.get("files", []) if isinstance(notes, dict) else []
    stopped = not all(each["done"] for each in last)
    if stopped and [each["sha256"] for each in last] == sums:
        _say("the last run was stopped; going on where it was")
        return [dict(each) for each in last]
    if not stopped and last and {each["sha256"] for each in last} & set(sums):
        _say("some of this was learned in the last run; learning it once more")
    fresh = {"tokens": 0, "pass": 1, "updates": 0, "done": False}
    return [{"name": f.name, "sha256": s, **fresh} for f, s in zip(files, sums, strict=True)]


def _learn_file(
    learner: Any, ids: Any, plan: list[dict[str, Any]], number: int, arguments: argparse.Namespace
) -> str:
    """Learn what is left of one file, saving as it goes; say, and return, what it brought."""
    from nestling.adaptation.learner import SCORED, Report, passes_for
    from nestling.adaptation.own_text import own_texts

    entry = plan[number]
    passes = entry.get("passes") or passes_for(len(ids))
    sample = ids[:SCORED]
    if entry["tokens"] == 0 and entry["pass"] == 1:
        if len(ids) > 1:
            if own_texts.drawn(learner.model) is None:
                _say("the model writes a sample of its own, by which forgetting is measured")
            entry["before"] = [learner.score(sample), learner.own_loss()]
        learner.begin_text(entry["name"])
    else:
        learner.begin_text(entry["name"], go_on=True)
    with _Bar(entry["name"], len(ids) * passes) as show:
        while not entry["done"]:
            done, before = entry["tokens"], len(ids) * (entry["pass"] - 1)
            piece = ids[done : done + arguments.save_every]
            report = learner.learn(piece, progress=lambda n, r, at=before + done: show(at + n, r))
            entry["tokens"] += len(piece)
            if not report.refused and entry["tokens"] >= len(ids):
                learner.finish_pass(report)
                if entry["pass"] < passes:
                    entry |= {"pass": entry["pass"] + 1, "tokens": 0}
                else:
                    learner.end_text(ids, report)
                    entry["done"] = True
            entry["updates"] = 0 if report.refused else entry["updates"] + len(report.updates)
            entry["done"] = entry["done"] or report.refused
            learner.save(arguments.memory, context=not entry["done"], notes={"files": plan})
            for alarm in report.alarms:
                _say(f"alarm: {alarm}")
    if report.refused:
        said = "refused; the memory is as it was before this text"
    elif not entry["updates"]:
        said = "nothing was learned, a text needs 2 tokens at least"
    elif "before" in entry:
        after = learner.score(sample), learner.own_loss()
        total = Report(text=(entry["before"][0], after[0]), own=(entry["before"][1], after[1]))
        total.tokens, total.updates = len(ids) * passes, [None] * entry["updates"]  # type: ignore[list-item]
        said = str(total)
    else:
        return f"{entry['name']}: learned"
    _say(f"{entry['name']}: {said}")
    return f"{entry['name']}: {said}"


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.files and arguments.undo is None and arguments.export is None:
        raise ValueError("give texts to learn with --from, or --undo NAME, or --export FOLDER")
    if arguments.export is not None and arguments.export.exists() and not arguments.export.is_dir():
        raise ValueError(f"--export: {arguments.export} is not a folder")


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of a new memory, from the arguments that were given."""
    settings: dict[str, Any] = {}
    for name in ("chunks", "rate", "retain"):
        if (values := getattr(arguments, name)) is not None:
            settings[name] = values if len(values) > 1 else values[0]
    if arguments.layers is not None:
        words = arguments.layers.replace("-", "").replace(",", "")
        numbers = [int(part) for part in arguments.layers.split(",")] if words.isdecimal() else None
        settings["layers"] = arguments.layers if numbers is None else numbers
    for name in ("rule", "assign", "rank", "transfer", "context"):
        if getattr(arguments, name) is not None:
            settings[name] = getattr(arguments, name)
    return settings


def _refuse(memory: Path, settings: dict[str, Any]) -> None:
    if settings:
        raise ValueError(
            f"{memory}: this memory exists and has its own settings; leave out"
            f" {', '.join('--' + name for name in settings)}, or choose another folder"
        )


def _text(path: Path) -> str:
    from nestling.train.corpus import read_text

    text = read_text(path)
    if not text.strip():
        raise ValueError(f"{path}: an empty file")
    return text


class _Bar:
    """A bar in a terminal, plain lines elsewhere: `show(tokens, report)`.

    A line comes after 4,096 tokens or 20 seconds, whichever is first, and at the end.
    """

    seconds = 20.0

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.said, self.at = name, total, 0, time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Any:
        if sys.stderr.isatty():
            from nestling.train.progress import terminal_bar

            self.bar = terminal_bar()
            self.bar.start()
            self.task = self.bar.add_task(self.name, total=self.total, note="")
        return self.show

    def show(self, tokens: int, report: Any) -> None:
        speed = report.tokens / max(report.seconds, 1e-9) if report else 0.0
        note = f"loss {report.loss:.4f}  {speed:,.0f} tokens/s" if report else ""
        if self.bar is not None:
            self.bar.update(self.task, completed=tokens, note=note)
            return
        waited = time.monotonic() - self.at >= self.seconds
        if report and (tokens == self.total or tokens - self.said >= 4096 or waited):
            self.said, self.at = tokens, time.monotonic()
            _say(f"{self.name}: {tokens:,}/{self.total:,} tokens  {note}")

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _draw(learner: Any, out: Path, memory: Path, told: Sequence[str] = ()) -> Path:
    """Which level updated when: surprise as bars, the distance from the base as a line.

    told: what each text brought, which the page says first.
    """
    from nestling.description import Timeline

    timeline = Timeline()
    for update in learner.history:
        timeline.record(update)
    if out.suffix == ".svg":
        return timeline.draw(out)
    from nestling.report import Page

    drift = {d.level: f"{d.drift:.1%}" for d in learner.drift}
    page = Page(f"What the memory {str(memory)!r} learned, and when", " ".join(told))
    page.figure(
        timeline.picture({level: f"drift {size}" for level, size in drift.items()}),
        "Every update of every level, its surprise, and the path of its weights.",
        wide=True,
    )
    page.table(
        ["level", "learns", "updates", "drift"],
        [
            (
                d.level,
                f"{'receives ' if d.level in learner.receiving else ''}every {d.chunk} tokens",
                d.updates,
                drift[d.level],
            )
            for d in learner.drift
        ],
    )
    page.text(
        f"The memory's clock stands at {learner.position:,} tokens. Drift is the size of what a"
        " level has learned over the size of the weights it changes."
        + " A level that receives takes over, in whole or in part, what the next faster one has"
        " learned, and that one lets go of it." * bool(learner.receiving)
    )
    return page.save(out)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
