"""Carried memories start anew where a document starts, row by row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from nestling.tree import tree_map

__all__ = ["Restarts"]


class Restarts:
    """Gives the rows of a batch that start a document the layers' trained initial states.

    The exchange happens inside each layer, before it reads: there FSDP2 has put its parameters
    together, and gradients reach the initial states in the same way for any number of processes.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        self._fresh: Tensor | None = None
        for layer in layers:
            layer.register_forward_pre_hook(self._exchange)

    @contextlib.contextmanager
    def rows(self, fresh: Tensor | None) -> Iterator[None]:
        """While this lasts, these rows ([B] bool) start anew."""
        self._fresh = fresh if fresh is not None and bool(fresh.any()) else None
        try:
            yield
        finally:
            self._fresh = None

    def _exchange(self, layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._fresh is None or len(arguments) < 2 or arguments[1] is None:
            return None
        x, states, *rest = arguments
        fresh = self._fresh.to(x.device)

        def pick(new: Tensor, old: Tensor) -> Tensor:
            if new.shape != old.shape:
                raise ValueError(
                    "this mixer's state grows with what it has read, so it cannot start anew row"
                    " by row; set data.carry=false (or give attention a window)"
                )
            return torch.where(fresh.view(-1, *[1] * (old.dim() - 1)), new, old)

        return (x, tree_map(pick, layer.init(len(fresh)), states), *rest)
