"""A run's progress: a bar in a terminal, plain lines elsewhere, JSON lines and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO


class Progress:
    """Reports a run's steps; silent unless `speak` (the main process)."""

    def __init__(
        self,
        steps: int,
        folder: Path,
        *,
        speak: bool = True,
        every: int = 10,
        out: TextIO | None = None,
    ) -> None:
        self.steps, self.folder, self.speak, self.every = steps, folder, speak, every
        self.out = out or sys.stderr
        self._first = time.perf_counter()
        self._last = (self._first, 0)
        self._tokens = 0
        self._stack = contextlib.ExitStack()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if not self.speak:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self._stack.enter_context(open(self.folder / "metrics.jsonl", "a"))
        self._board = _tensorboard(self.folder)
        if self._board is not None:
            self._stack.callback(self._board.close)
        if self.out.isatty():
            self._bar = self._stack.enter_context(terminal_bar())
            self._task = self._bar.add_task("train", total=self.steps, note="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def step(self, step: int, tokens: int, facts: Mapping[str, Any]) -> None:
        """After a step: its number from 1, its tokens, and its facts (loss, lr, norms)."""
        if not self.speak:
            return
        self._tokens += tokens
        due = step % self.every == 0 or step in (1, self.steps)
        if due:
            now = time.perf_counter()
            speed = (self._tokens - self._last[1]) / max(now - self._last[0], 1e-9)
            self._last = (now, self._tokens)
            self.record(step, {**facts, "tokens_per_second": round(speed, 1)})
            note = f"loss {facts['loss']:.4f}  {speed:,.0f} tokens/s"
            if self._bar is not None:
                self._bar.update(self._task, completed=step, note=note)
            else:
                whole = self._tokens / max(now - self._first, 1e-9)  # of this run so far
                left = (self.steps - step) * tokens / max(whole, 1e-9)
                print(f"step {step}/{self.steps}  {note}  {_clock(left)} left", file=self.out)
        elif self._bar is not None:
            self._bar.update(self._task, completed=step)

    def record(self, step: int, facts: Mapping[str, Any]) -> None:
        """Keep facts in metrics.jsonl (and TensorBoard, if it is installed)."""
        if not self.speak:
            return
        self._file.write(json.dumps({"step": step, **facts}) + "\n")
        self._file.flush()
        if self._board is not None:
            for key, value in facts.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(key, value, step)

    def say(self, line: str) -> None:
        """One line for a person."""
        if not self.speak:
            return
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self.out, flush=True)


def terminal_bar() -> Any:
    """A bar of rich's: a name, how much is done, the task's field `note`, the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@contextlib.contextmanager
def preparing(what: str, *, speak: bool = True) -> Iterator[Any]:
    """A callback for data preparation: a counter that grows in a terminal, one line elsewhere."""
    if not speak:
        yield None
        return
    if not sys.stderr.isatty():
        print(f"preparing {what}", file=sys.stderr, flush=True)
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"preparing {what}")

        def show(documents: int, tokens: int) -> None:
            text = f"preparing {what}: {documents:,} documents, {tokens:,} tokens"
            bar.update(task, description=text)

        yield show
