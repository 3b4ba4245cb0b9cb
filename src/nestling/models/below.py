"""What lies below the levels that learn, read once for a whole call.

Where the levels of the last layers alone learn (`NestlingConfig.learning_layers`), everything below
them depends on no fast weights. So in first-order training it is one forward pass with one graph,
however many segments there are. Above, each segment's graph begins at a leaf; when all segments are
read, the leaves' gradients go on below. The memories below are then trained through the whole call,
not cut at every segment.

Shapes: B sequences, n tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.continuum.layers import BlockState
from nestling.continuum.stream import Outer
from nestling.tree import state_detach


class Below:
    """Reads a call's tokens for a `TokenStream`: `run` is its forward pass, `backward` comes last.

    tokens: [B, N] from the position `start` on, where a segment begins. kept: a cache goes on from
    the call; it needs the states where the last, unfinished segment begins, so the tokens of that
    segment are a piece of their own.
    """

    def __init__(self, model: Any, outer: Outer, tokens: Tensor, start: int, *, kept: bool) -> None:
        self.model, self.outer, self.first = model, outer, model.config.first_learning
        self.tokens, self.start = tokens, start
        self.last = self.end = start + tokens.shape[1]
        if kept:
            self.last, boundary = start, outer.engine.wiring.next_boundary
            while (end := boundary(self.last)) is not None and end < self.end:
                self.last = end
        self.pieces: list[_Piece] = []

    def run(self, ids: Tensor, tree: Any, seen: int) -> tuple[Tensor, Any]:
        """Logits [B, n, V] of tokens from position `seen` on, and the states after them."""
        piece = self.pieces[-1] if self.pieces else None
        if piece is None or seen >= piece.end:
            piece = self._read(tree, seen, seen + ids.shape[1])
        first = seen - piece.start
        x = piece.x[:, first : first + ids.shape[1]].detach().requires_grad_()
        piece.leaves.append(x)
        self.outer.edge = x
        x, above = self.model.model.above(x, tree, self.first)
        below: tuple[Any, ...] = (*[None] * self.first, BlockState(None, None))
        if seen + ids.shape[1] == piece.end:  # else nobody goes on from these
            below = state_detach(piece.states)
        both = below[-1]._replace(channel=above[0].channel)
        return self.model.lm_head(x), _After((*below[:-1], both, *above[1:]))

    def backward(self) -> None:
        """Let the gradients of all segments go on below, to every parameter there."""
        for piece in reversed(self.pieces):
            found = [torch.zeros_like(x) if x.grad is None else x.grad for x in piece.leaves]
            with torch.autocast(piece.x.device.type, enabled=False):  # as precise as forward
                self.outer.add(
                    torch.autograd.grad(
                        piece.x, self.outer.parameters, torch.cat(found, 1), allow_unused=True
                    )
                )
        self.outer.edge = None

    def _read(self, tree: Any, seen: int, least: int) -> _Piece:
        """Read on below: to where the last segment begins, or to the end."""
        end = max(self.last if seen < self.last else self.end, least)
        tokens = self.tokens[:, seen - self.start : end - self.start]
        x, states = self.model.model.below(tokens, tree, self.first)
        self.pieces.append(_Piece(seen, end, x, states, []))
        return self.pieces[-1]


class _Piece(NamedTuple):
    """Tokens read together."""

    start: int
    end: int
    x: Tensor  # [B, n, D] with its graph
    states: tuple[BlockState, ...]  # after them
    leaves: list[Tensor]  # x again, segment by segment, where the graphs above begin


class _After(NamedTuple):
    """A cache of which the stream only wants the states."""

    states: tuple[Any, ...]
