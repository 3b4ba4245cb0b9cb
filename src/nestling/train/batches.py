"""Which tokens step n reads: a pure function of the step, so resuming needs nothing but a number.

`Shuffled` gives independent windows in random order. `Sequential` gives every row of the batch long
documents in order, window after window, for memories that carry their state from step to step.
Both depend on the global batch only; a rank takes its rows, so any number of processes reads the
same data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nestling.losses import IGNORE
from nestling.train.packed import PackedCorpus


class Batch(NamedTuple):
    """One step's tokens; `targets` are shifted already, IGNORE where nothing is to be predicted."""

    ids: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, False = padding
    fresh: Tensor  # [B] bool: the row starts a document, so its memory starts anew


class _Window(NamedTuple):
    start: int  # first token
    stop: int  # one past the last token read
    fresh: bool


def windows_of(packed: PackedCorpus, length: int) -> tuple[np.ndarray, np.ndarray]:
    """How many windows of `length` each document has, and their running sum with a leading zero."""
    tokens = np.diff(packed.starts) - 1  # the last token is only predicted
    count = np.maximum(0, -(-tokens // length))
    return count, np.concatenate([[0], np.cumsum(count)])


def _rows_of(rows: int, rank: int, world: int) -> range:
    if rows % world:
        raise ValueError(f"a batch of {rows} rows cannot be split over {world} processes evenly")
    return range(rank * rows // world, (rank + 1) * rows // world)


def _collate(packed: PackedCorpus, windows: list[_Window], length: int) -> Batch:
    ids = np.zeros((len(windows), length), dtype=np.int64)
    targets = np.full((len(windows), length), IGNORE, dtype=np.int64)
    mask = np.zeros((len(windows), length), dtype=bool)
    for row, window in enumerate(windows):
        n = window.stop - window.start
        ids[row, :n] = packed.tokens[window.start : window.stop]
        targets[row, :n] = packed.tokens[window.start + 1 : window.stop + 1]
        mask[row, :n] = True
    fresh = torch.tensor([window.fresh for window in windows])
    return Batch(torch.from_numpy(ids), torch.from_numpy(targets), torch.from_numpy(mask), fresh)


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Windows of `length` tokens in a new random order every epoch.

    `cross=True` cuts the whole corpus into windows that may hold the end of one document and the
    beginning of the next (no padding, the memory reads on); `cross=False` keeps every window inside
    one document and pads its end.
    """

    packed: PackedCorpus
    rows: int
    length: int
    seed: int = 0
    cross: bool = True

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise ValueError(
                f"the corpus has {len(self.packed.tokens)} tokens; one window needs"
                f" {self.length + 1}"
            )

    @cached_property
    def _edges(self) -> np.ndarray:
        return windows_of(self.packed, self.length)[1]

    @property
    def windows(self) -> int:
        """Windows in an epoch."""
        if self.cross:
            return (len(self.packed.tokens) - 1) // self.length
        return int(self._edges[-1])

    def __call__(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """The rows of rank `rank` out of `world` at step `step` (from 0), forever."""
        windows = []
        for row in _rows_of(self.rows, rank, world):
            epoch, place = divmod(step * self.rows + row, self.windows)
            number = _permutation(self.windows, self.seed, epoch)[place]
            if self.cross:
                start = int(number) * self.length
                windows.append(_Window(start, start + self.length, fresh=True))
            else:
                windows.append(_document_window(self.packed, self._edges, int(number), self.length))
        return _collate(self.packed, windows, self.length)


def _document_window(packed: PackedCorpus, edges: np.ndarray, number: int, length: int) -> _Window:
    """Window `number` when the documents are cut one after the other."""
    document = int(np.searchsorted(edges, number, side="right")) - 1
    start = int(packed.starts[document]) + (number - int(edges[document])) * length
    stop = min(start + length, int(packed.starts[document + 1]) - 1)
    return _Window(start, stop, fresh=True)


@dataclass(frozen=True, kw_only=True)
class Sequential:
    """Each row reads documents from beginning to end, one window a step (truncated BPTT).

    The documents of an epoch are laid out in random order and cut evenly over the rows. `fresh`
    marks the windows that start a document (or a row's share), where the memory starts anew; a
    caller that carries memory over documents ignores it.
    """

    packed: PackedCorpus
    rows: int
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps_per_epoch < 1:
            windows = int(self._cut[1][-1])
            raise ValueError(
                f"the corpus has {windows} windows of {self.length} tokens, fewer than the"
                f" {self.rows} rows of a batch; take fewer rows or shorter windows"
            )

    @cached_property
    def _cut(self) -> tuple[np.ndarray, np.ndarray]:
        return windows_of(self.packed, self.length)

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every row has read its share."""
        return int(self._cut[1][-1]) // self.rows

    def __call__(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """The rows of rank `rank` out of `world` at step `step` (from 0), forever."""
        epoch, place = divmod(step, self.steps_per_epoch)
        count, edges = self._cut
        order = _permutation(self.packed.documents, self.seed, epoch)
        laid = np.concatenate([[0], np.cumsum(count[order])])
        windows = []
        for row in _rows_of(self.rows, rank, world):
            number = row * self.steps_per_epoch + place
            nth = int(np.searchsorted(laid, number, side="right")) - 1
            inside = number - int(laid[nth])
            cut = int(edges[order[nth]]) + inside
            window = _document_window(self.packed, edges, cut, self.length)
            windows.append(window._replace(fresh=inside == 0 or place == 0))
        return _collate(self.packed, windows, self.length)


Batches = Shuffled | Sequential
"""Batches by number: `batches(step, rank, world)` are the rows of a rank at a step."""
