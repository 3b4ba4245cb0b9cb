"""The protocol: task after task, scores on all test data after each, and what it cost.

No peeking: a method is handed the training data of the present task only; test (or validation)
data goes in as inputs, and their labels are compared here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from studies.continual.features import Encoded
from studies.continual.learner import Method

__all__ = ["Result", "accuracies", "run_stream"]


class Result(NamedTuple):
    """The accuracy matrix, the accuracies before learning, and the costs."""

    matrix: list[list[float]]
    untrained: list[float]
    seconds: float  # processor time of learning
    passes: int  # examples learned from, forward and backward
    stored: int  # numbers kept beyond the base model

    def to_json(self) -> dict[str, Any]:
        """Plain values for a stored result."""
        return self._asdict()


def accuracies(
    scores: Tensor, y: Tensor, tasks: Sequence[Sequence[int]], seen: Sequence[int]
) -> list[float]:
    """The accuracy on each task's examples.

    A seen task's examples are classified among all classes seen; for a task not yet learned its
    own classes count too, so that the entry says what the model knows of it beforehand.
    """
    found = []
    for task in tasks:
        allowed = sorted({*seen, *task})
        own = torch.isin(y, torch.tensor(list(task)))
        mask = torch.full((scores.shape[1],), -math.inf)
        mask[allowed] = 0.0
        guess = (scores[own] + mask).nan_to_num(nan=-math.inf).argmax(1)
        found.append(float((guess == y[own]).double().mean()))
    return found


def run_stream(
    method: Method,
    train: Encoded,
    test: Encoded,
    tasks: Sequence[Sequence[int]],
    *,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Learn a stream and fill the accuracy matrix R; a joint method learns all tasks at once."""
    blind = Encoded(x=test.x, y=torch.full_like(test.y, -1), texts=test.texts)
    untrained = accuracies(method.scores(blind), test.y, tasks, ())
    matrix: list[list[float]] = []
    seen: list[int] = []
    seconds = 0.0
    groups = [[c for task in tasks for c in task]] if method.joint else tasks
    for number, classes in enumerate(groups):
        data = train.of(classes)
        if not len(data.y):
            raise ValueError(f"task {number} has no training examples (classes {list(classes)})")
        begin = time.process_time()
        method.learn(data, classes)
        seconds += time.process_time() - begin
        seen += classes
        matrix.append(accuracies(method.scores(blind), test.y, tasks, seen))
        if progress is not None:
            progress(number + 1)
    if method.joint:
        matrix = matrix * len(tasks)
    return Result(matrix, untrained, seconds, method.passes, method.stored())
