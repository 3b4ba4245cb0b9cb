"""`nestling learn`."""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from pathlib import Path
from typing import Any

__all__ = ["parser", "run"]

_EXAMPLES = """examples:
  nestling learn runs/tiny/model --from diary.txt --levels 64,512,4096 --memory mine
  nestling learn SmolLM2-135M-Instruct.Q4_1.gguf --from book.txt --layers "last third" --memory mine
  nestling learn MODEL --from more.txt --memory mine          # goes on with the same memory
  nestling learn MODEL --from book.txt --memory mine --out timeline.html
  nestling generate MODEL --memory mine --prompt "Call me"

The model is a folder, a name on the hub, a .gguf file, or a llama2.c .bin file beside its
tokenizer. It is not changed: what is learned goes to the memory folder. A run that was stopped goes
on where it was when the same command is given again. See docs/adapt.md."""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="nestling learn",
        description="Let a pretrained model learn texts into a memory of several time scales.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("model", help="folder, hub name, .gguf file or llama2.c .bin file")
    made.add_argument("--from", dest="files", nargs="+", required=True, metavar="FILE", type=Path)
    made.add_argument("--memory", required=True, type=Path, help="folder of the memory")
    new = made.add_argument_group("a new memory (a memory that exists has its own settings)")
    new.add_argument("--levels", help="tokens between updates, fastest first (256,1024,4096)")
    new.add_argument("--rate", help="for all levels, or one each (fastest chunk / 3200)")
    new.add_argument("--rule", help="gd (default), momentum, adam, dgd, muon, m3, ...")
    new.add_argument("--retain", help="what a level keeps at each update (default 1)")
    new.add_argument("--layers", help='layers that learn: "last half", "first 4", 3,4,5 (all)')
    new.add_argument("--assign", help="share (default), split, layers, own")
    new.add_argument("--rank", type=int, help="keep differences as factors of this rank")
    new.add_argument("--transfer", help="move, reptile, first_order: from fast to slow levels")
    new.add_argument("--context", type=int, help="the model's own context, in tokens")
    made.add_argument("--limit", type=float, default=1.0, help="drift that rolls back (default 1)")
    made.add_argument("--tokens", type=int, help="read at most so many tokens of each file")
    made.add_argument("--save-every", type=int, default=16384, metavar="TOKENS")
    made.add_argument("--out", type=Path, help="timeline of all levels, .html or .svg")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Learn the files one after the other; returns 0."""
    _check(arguments)
    texts = [_text(path) for path in arguments.files]
    from nestling.adaptation import Limits, adapt, load_learner
    from nestling.adaptation.texts import encode
    from nestling.cli.generate import load
    from nestling.host import keep_memory

    resumed = (arguments.memory / "memory.json").is_file()
    settings = _settings(arguments)
    if resumed:
        _refuse(arguments.memory, settings)
    keep_memory()
    model, tokenizer = load(arguments.model)
    options: dict[str, Any] = {"tokenizer": tokenizer, "limits": Limits(drift=arguments.limit)}
    if resumed:
        learner = load_learner(model, arguments.memory, **options)
    else:
        learner = adapt(model, **settings, **options)
    where = f"{arguments.memory} at position {learner.position:,}"
    _say(f"goes on with {where}" if resumed else f"a new memory, {arguments.memory}")
    plan = _plan(learner.notes, arguments.files, texts)
    for number, text in enumerate(texts):
        if not plan[number]["done"]:
            ids = encode(text, tokenizer, begin=True)[: arguments.tokens]
            _learn_file(learner, ids, plan, number, arguments)
    print(learner)
    if arguments.out is not None:
        print(f"timeline: {_draw(learner, arguments.out, arguments.memory)}")
    return 0


def _plan(notes: Any, files: list[Path], texts: list[str]) -> list[dict[str, Any]]:
    """Every file with how many of its tokens are learned: as a stopped run left it, or none."""
    sums = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    last = notes.get("files", []) if isinstance(notes, dict) else []
    stopped = not all(each["done"] for each in last)
    if stopped and [each["sha256"] for each in last] == sums:
        _say("the last run was stopped; going on where it was")
        return [dict(each) for each in last]
    if not stopped and last and {each["sha256"] for each in last} & set(sums):
        _say("some of this was learned in the last run; learning it once more")
    named = zip(files, sums, strict=True)
    return [{"name": f.name, "sha256": s, "tokens": 0, "done": False} for f, s in named]


def _learn_file(
    learner: Any, ids: Any, plan: list[dict[str, Any]], number: int, arguments: argparse.Namespace
) -> None:
    """Learn what is left of one file, saving as it goes."""
    entry = plan[number]
    done = min(int(entry["tokens"]), len(ids))
    if done == 0:
        learner.new_text()
    updates = 0
    with _Bar(entry["name"], len(ids)) as show:
        while not entry["done"]:
            piece = ids[done : done + arguments.save_every]
            report = learner.learn(piece, progress=lambda n, r, at=done: show(at + n, r))
            done, updates = done + len(piece), updates + len(report.changes)
            entry |= {"tokens": done, "done": done >= len(ids)}
            learner.save(arguments.memory, context=not entry["done"], notes={"files": plan})
            for alarm in report.alarms:
                _say(f"alarm: {alarm}")
    chunk = min((level.chunk for level in learner.levels if level.active), default=0)
    if not updates and len(ids) <= chunk:
        _say(
            f"{entry['name']}: nothing was learned, its {len(ids)} tokens do not fill a chunk of"
            f" {chunk}; a new memory may have shorter ones (--levels)"
        )


def _check(arguments: argparse.Namespace) -> None:
    for name in ("tokens", "save_every", "rank", "context"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
    if arguments.out is not None and arguments.out.suffix not in (".html", ".svg"):
        raise ValueError(f"--out must end in .html or .svg; got {arguments.out}")


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of a new memory, from the arguments that were given."""
    settings: dict[str, Any] = {}
    if arguments.levels is not None:
        settings["chunks"] = [_whole(part, "--levels") for part in arguments.levels.split(",")]
    for name in ("rate", "retain"):
        if (text := getattr(arguments, name)) is not None:
            values = [_number(part, f"--{name}") for part in text.split(",")]
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
            f" {', '.join('--' + name.replace('chunks', 'levels') for name in settings)}, or choose"
            " another folder"
        )


def _whole(text: str, name: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{name}: whole numbers with commas between, such as 64,512; got {text!r}")
    return int(text)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: a number, or several with commas; got {text!r}") from None


def _text(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error.reason}") from error
    if not text.strip():
        raise ValueError(f"{path}: an empty file")
    return text


class _Bar:
    """A bar in a terminal, plain lines elsewhere: `show(tokens, report)`."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.said = name, total, 0
        self.bar: Any = None

    def __enter__(self) -> Any:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.bar.start()
            self.task = self.bar.add_task(self.name, total=self.total, note="")
        return self.show

    def show(self, tokens: int, report: Any) -> None:
        speed = report.tokens / max(report.seconds, 1e-9) if report else 0.0
        note = f"loss {report.loss:.4f}  {speed:,.0f} tokens/s" if report else ""
        if self.bar is not None:
            self.bar.update(self.task, completed=tokens, note=note)
        elif report and (tokens == self.total or tokens - self.said >= 4096):
            self.said = tokens
            _say(f"{self.name}: {tokens:,}/{self.total:,} tokens  {note}")

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _draw(learner: Any, out: Path, memory: Path) -> Path:
    """Which level updated when: surprise as bars, the distance from the base as a line."""
    from nestling.description import Timeline
    from nestling.levels import LevelUpdate

    timeline, before = Timeline(), dict.fromkeys((lv.name for lv in learner.levels), 0.0)
    for change in learner.history:
        moved = abs(change.drift - before[change.level])
        before[change.level] = change.drift
        timeline.record(
            LevelUpdate(
                change.position, change.level, change.surprise, math.nan, moved, change.drift
            )
        )
    if out.suffix == ".svg":
        return timeline.draw(out)
    from html import escape

    rows = "".join(
        f"<tr><td>{escape(d.level)}</td><td>{d.chunk}</td><td>{d.updates}</td>"
        f"<td>{d.surprise:.4f}</td><td>{d.gradient:.4f}</td><td>{d.drift:.4f}</td></tr>"
        for d in learner.drift
    )
    out.write_text(
        '<!doctype html><meta charset="utf-8"><title>Memory timeline</title>'
        "<style>body{font:15px system-ui,sans-serif;margin:2rem}td,th{padding:.2rem 1rem;"
        f"text-align:right}}</style><h1>{escape(str(memory))}</h1>{timeline.picture()}"
        "<table><tr><th>level</th><th>chunk</th><th>updates</th><th>surprise</th>"
        f"<th>gradient</th><th>drift</th></tr>{rows}</table>\n",
        encoding="utf-8",
    )
    return out


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
