"""Continual-learning metrics: pure functions on the accuracy matrix.

`R[i, j]` is the accuracy on the test data of task j after learning task i, both from 0; a square
matrix of T tasks. Entries above the diagonal are accuracies on tasks not yet learned: they are
needed by `forward_transfer` only. Values are fractions in [0, 1].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "average_accuracy",
    "backward_transfer",
    "forgetting",
    "forgotten_share",
    "forward_transfer",
    "intransigence",
    "learning_curve",
]

Matrix = NDArray[np.float64]


def average_accuracy(r: ArrayLike) -> float:
    """The mean accuracy over all tasks after the last one: the mean of R's last row."""
    return float(_matrix(r)[-1].mean())


def forgetting(r: ArrayLike, *, best: bool = False) -> float:
    """How much accuracy was lost on earlier tasks by the end, mean over all tasks but the last.

    First minus last, `R[j, j] - R[T-1, j]`; with `best=True` the best accuracy a task ever had
    minus the last one (never negative).
    """
    r = _matrix(r)
    if len(r) == 1:
        return 0.0
    last = r[-1, :-1]
    if best:
        start = np.array([r[j:, j].max() for j in range(len(r) - 1)])
    else:
        start = np.diagonal(r)[:-1]
    return float((start - last).mean())


def forgotten_share(r: ArrayLike) -> float:
    """`forgetting` as a share of what was learned: over the mean of `R[j, j]` of the same tasks.

    A learner that learns little has little to forget; this compares learners that differ in that.
    """
    r = _matrix(r)
    learned = float(np.diagonal(r)[:-1].mean()) if len(r) > 1 else 0.0
    return forgetting(r) / learned if learned > 0 else 0.0


def backward_transfer(r: ArrayLike) -> float:
    """The effect of later tasks on earlier ones: mean of `R[T-1, j] - R[j, j]`, -forgetting."""
    return -forgetting(r)


def forward_transfer(r: ArrayLike, untrained: ArrayLike) -> float:
    """The effect of earlier tasks on a task before it was learned: the mean of `R[j-1, j] - b[j]`.

    `untrained[j]` is the accuracy on task j of a model that has learned nothing.
    """
    r = _matrix(r)
    base = np.asarray(untrained, dtype=np.float64)
    if base.shape != (len(r),):
        raise ValueError(f"untrained must hold {len(r)} accuracies, one per task; got {base.shape}")
    if len(r) == 1:
        return 0.0
    before = np.array([r[j - 1, j] for j in range(1, len(r))])
    return float((before - base[1:]).mean())


def learning_curve(r: ArrayLike) -> list[float]:
    """After each task, the mean accuracy over the tasks learned so far."""
    r = _matrix(r)
    return [float(r[i, : i + 1].mean()) for i in range(len(r))]


def intransigence(r: ArrayLike, joint: ArrayLike) -> float:
    """How much worse new tasks are learned than by joint training: mean of `joint[j] - R[j, j]`.

    `joint[j]` is the accuracy on task j of a model trained on all tasks together.
    """
    r = _matrix(r)
    reference = np.asarray(joint, dtype=np.float64)
    if reference.shape != (len(r),):
        raise ValueError(
            f"joint must hold {len(r)} accuracies, one per task; got {reference.shape}"
        )
    return float((reference - np.diagonal(r)).mean())


def _matrix(r: ArrayLike) -> Matrix:
    made = np.asarray(r, dtype=np.float64)
    if made.ndim != 2 or made.shape[0] != made.shape[1] or not len(made):
        raise ValueError(
            f"R must be a square matrix, one row and one column per task; got shape {made.shape}"
        )
    return made
