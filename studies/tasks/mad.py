"""MAD (Poli et al. 2024), Table 4: six small tasks that tell sequence memories apart.

In-context recall, noisy recall, fuzzy recall, memorisation, selective copying, compression. The
formats are those of athms/mad-lab; `Task.harder` is one step of the task's difficulty.

Shapes: N sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

__all__ = ["IGNORE", "TASKS", "Examples", "Task", "accuracy"]

IGNORE = -100
Rng = np.random.Generator
Rows = tuple[list[list[int]], list[list[int]]]


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Sequences and their targets; -100 where nothing is asked."""

    tokens: Tensor  # [N, T] long
    targets: Tensor  # [N, T] long


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: its vocabulary and length, and how one sequence is drawn.

    draw(rng, task, test) gives tokens and targets. whole: all tokens are asked for after the last
    one (compression), through a decoder of its own.
    """

    name: str
    vocabulary: int
    length: int
    draw: Callable[[Rng, Task, bool], tuple[list[int], list[int]]]
    noise: float = 0.0
    copies: int = 16
    whole: bool = False

    def make(self, count: int, seed: int, *, test: bool = False) -> Examples:
        """`count` sequences from a seed."""
        rng = np.random.default_rng(seed)
        drawn = [self.draw(rng, self, test) for _ in range(count)]
        return Examples(
            tokens=torch.tensor([tokens for tokens, _ in drawn]),
            targets=torch.tensor([targets for _, targets in drawn]),
        )


def accuracy(predictions: Tensor, targets: Tensor) -> float:
    """The share of positions with a target that are right."""
    asked = targets != IGNORE
    return (predictions[asked] == targets[asked]).double().mean().item()


def _recall(rng: Rng, task: Task, test: bool) -> tuple[list[int], list[int]]:
    """Keys and values in turn, a new map for each sequence; some pairs replaced by noise.

    Trained on the next token everywhere, tested on the values of keys seen before; in the tests
    the last pair is of a key seen before.
    """
    symbols = task.vocabulary // 2 if task.noise else task.vocabulary
    half, pairs = symbols // 2, task.length // 2
    values = rng.integers(half, symbols, size=half)
    tokens: list[int] = []
    targets: list[int] = []
    seen: set[int] = set()
    for pair in range(pairs):
        if pair < pairs - 1 and rng.random() < task.noise:
            tokens += rng.integers(symbols, task.vocabulary, size=2).tolist()
            targets += [IGNORE, IGNORE]
            continue
        key = int(rng.integers(half))
        if pair == pairs - 1 and seen:
            key = int(rng.choice(sorted(seen)))
        value = int(values[key])
        asked = key in seen if test else True
        tokens += [key, value]
        targets += [value if asked else IGNORE, IGNORE]
        seen.add(key)
    if not test:
        following = [*tokens[1:], IGNORE]
        return tokens, following
    return tokens, targets


def _fuzzy(rng: Rng, task: Task, test: bool) -> tuple[list[int], list[int]]:
    """Keys and values are motifs of one to three tokens (test keys of three), padded on the left.

    The target of a value's token stands at the token before it.
    """
    pad, keys = task.vocabulary - 1, (task.vocabulary - 2) // 2
    bound: dict[tuple[int, ...], tuple[int, ...]] = {}
    tokens: list[int] = []
    targets: list[int] = []
    while True:
        size = 3 if test else int(rng.integers(1, 4))
        key = tuple(rng.permutation(keys)[:size].tolist())
        if test and bound and rng.random() < 0.5:
            key = list(bound)[int(rng.integers(len(bound)))]
        known = key in bound
        if not known:
            count = int(rng.integers(1, 4))
            bound[key] = tuple((keys + rng.permutation(pad - keys)[:count]).tolist())
        value = bound[key]
        if len(tokens) + len(key) + len(value) > task.length:
            break
        asked = known or not test
        tokens += [*key, *value]
        wanted = list(value) if asked else [IGNORE] * len(value)
        targets += [IGNORE] * (len(key) - 1) + wanted + [IGNORE]
    left = task.length - len(tokens)
    return [pad] * left + tokens, [IGNORE] * left + targets


def _copying(rng: Rng, task: Task, test: bool) -> tuple[list[int], list[int]]:
    """Tokens among blanks, then the copy token, then blanks whose targets are the tokens."""
    blank, copy = task.vocabulary - 2, task.vocabulary - 1
    count = task.copies
    given = rng.integers(blank, size=count)
    room = task.length - count - 1
    places = np.sort(rng.permutation(room)[:count])
    front = np.full(room, blank)
    front[places] = given
    tokens = [*front.tolist(), copy, *([blank] * count)]
    return tokens, [IGNORE] * (room + 1) + given.tolist()


def _compression(rng: Rng, task: Task, test: bool) -> tuple[list[int], list[int]]:
    """Random tokens and a last one; all of them are asked for from the last state."""
    last = task.vocabulary - 1
    given = rng.integers(last, size=task.length - 1).tolist()
    return [*given, last], [*given, IGNORE]


def _memorisation(rng: Rng, task: Task, test: bool) -> tuple[list[int], list[int]]:
    """Keys, each followed by a blank whose target is its value in one fixed map."""
    blank, keys = task.vocabulary - 1, task.vocabulary // 2 - 1
    fixed = np.random.default_rng(12345).permutation(np.arange(keys, blank))[:keys]
    chosen = rng.integers(keys, size=task.length // 2)
    tokens = [token for key in chosen.tolist() for token in (key, blank)]
    targets = [target for key in chosen for target in (IGNORE, int(fixed[key]))]
    return tokens, targets


_BASE = (
    Task(name="recall", vocabulary=16, length=128, draw=_recall),
    Task(name="noisy recall", vocabulary=32, length=128, draw=_recall, noise=0.2),
    Task(name="fuzzy recall", vocabulary=16, length=128, draw=_fuzzy),
    Task(name="memorisation", vocabulary=256, length=32, draw=_memorisation),
    Task(name="copying", vocabulary=16, length=256, draw=_copying),
    Task(name="compression", vocabulary=16, length=32, draw=_compression, whole=True),
)
_HARDER = {
    "recall": {"length": 256},
    "noisy recall": {"noise": 0.4},
    "fuzzy recall": {"length": 256},
    "memorisation": {"vocabulary": 512},
    "copying": {"copies": 32},
    "compression": {"length": 64},
}
TASKS: dict[str, Task] = {task.name: task for task in _BASE} | {
    f"{task.name}, harder": replace(task, name=f"{task.name}, harder", **_HARDER[task.name])
    for task in _BASE
}
"""The six tasks as published, and each one step harder in one variable."""
