"""Levels that learn from a stream of (input, target) pairs, in any module with a loss (Eq. 71).

The module sees a plain batch of examples. Segments end at the absolute positions where some level
is due; pairs of an unfinished segment are answered at once and wait in the state, so any split of a
stream gives the same fast weights. Shapes: B streams, n pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.continuum.engine import Engine, LevelState, Rate, Segment
from nestling.continuum.fast import Reading
from nestling.continuum.stream import ContinuumState, Output
from nestling.levels import LevelUpdate

Loss = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets of N examples to their losses, [N] or [N, ...] (not reduced)."""


class PairStream:
    """One call over some pairs of a stream: what it answers, and what is learned from them."""

    def __init__(
        self,
        engine: Engine,
        loss: Loss,
        rates: Sequence[Rate],
        *,
        meta: str | None = None,
        measure: bool = True,
    ) -> None:
        self.engine, self.loss, self.rates = engine, loss, rates
        self.meta, self.measure = meta, measure
        self.graph = meta == "second_order" or engine.wiring.transfer == "second_order"
        self.constant = meta in (None, "frozen")
        self.updates: list[LevelUpdate] = []

    def learn(
        self, x: Tensor, y: Tensor, wanted: Tensor, state: ContinuumState, *, learn: bool = True
    ) -> Output:
        """Answer inputs [B, T, ...], and learn from those whose segment is complete.

        wanted: [B, T] bool, which pairs are learned.
        """
        waiting, start = state.tokens.shape[1], int(state.start[0])
        levels, outputs, losses = state.levels, [], []
        if waiting:
            old_x, old_y = state.cache
            x, y = torch.cat([old_x, x], 1), torch.cat([old_y, y], 1)
            wanted = torch.cat([state.wanted, wanted], 1)
        while learn and x.shape[1]:
            end = self.engine.wiring.next_boundary(start)
            many = x.shape[1] + 1 if end is None else end - start
            if end is None or x.shape[1] < many:
                break
            out, loss, levels = self._segment(
                x[:, :many], y[:, :many], wanted[:, :many], levels, end
            )
            outputs.append(out[:, waiting:])
            losses.append(loss[:, waiting:])
            x, y, wanted, waiting, start = x[:, many:], y[:, many:], wanted[:, many:], 0, end
        if x.shape[1] > waiting:
            with torch.set_grad_enabled(self.meta is not None):
                reading = Reading(self.engine.live(levels), len(x), constant=self.constant)
                out, loss = self._run(reading, x[:, waiting:], y[:, waiting:])
            outputs.append(out)
            losses.append(loss)
        if not learn:
            start, x, y, wanted = start + x.shape[1], x[:, :0], y[:, :0], wanted[:, :0]
        after = state._replace(
            levels=levels,
            start=torch.full_like(state.start, start),
            tokens=torch.zeros_like(wanted, dtype=torch.int64),
            wanted=wanted,
            cache=(x, y) if x.shape[1] else None,
        )
        return Output(torch.cat(outputs, 1), torch.cat(losses, 1), after, tuple(self.updates))

    def _run(self, reading: Reading, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The module's answers [B, n, ...] and their losses [B, n]."""
        batch, many = x.shape[:2]
        with reading:
            out: Any = self.engine.model(x.flatten(0, 1))
        losses = self.loss(out, y.flatten(0, 1))
        if losses.dim() == 0 or losses.shape[0] != batch * many:
            raise ValueError(
                f"loss must give one loss per example ([{batch * many}] or more dimensions, as with"
                f" reduction='none'); got the shape {tuple(losses.shape)}"
            )
        losses = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
        return out.unflatten(0, (batch, many)), losses.view(batch, many)

    def _segment(
        self,
        x: Tensor,
        y: Tensor,
        wanted: Tensor,
        levels: tuple[LevelState, ...],
        position: int,
    ) -> tuple[Tensor, Tensor, tuple[LevelState, ...]]:
        """Answer one whole segment, and let the levels learn from it."""
        some, live, segment = bool(wanted.any()), self.engine.live(levels), None
        reading = Reading(live, len(x), record=some, constant=self.constant)
        with torch.set_grad_enabled(some or self.meta is not None):
            out, losses = self._run(reading, x, y)
            learned = losses * wanted
            if some:
                keep = self.graph or self.meta is not None
                found = self.engine.surprises(reading, learned.sum(), graph=self.graph, keep=keep)
                count = wanted.sum(1).to(levels[0].seen.dtype)
                total = (learned if self.graph else learned.detach()).sum(1).to(count.dtype)
                segment = Segment(found, count, total)
        levels, updates = self.engine.learn(
            levels,
            segment,
            live,
            position,
            self.rates,
            graph=self.graph,
            outer=self.meta == "second_order",
            measure=self.measure,
        )
        self.updates += updates
        if self.meta is None:
            out, losses = out.detach(), losses.detach()
        return out, losses, levels
