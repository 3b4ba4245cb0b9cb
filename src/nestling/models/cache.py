"""The memory state of all layers in the form `generate` passes around."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from nestling.continuum.stream import ContinuumState
from nestling.tree import batch_size, state_repeat, state_select, state_stack


class Learned(NamedTuple):
    """A batch of sequences, as read and learned, in groups that stand at one position."""

    rows: tuple[Tensor, ...]  # per group: its sequences' places in the batch, [b] int64
    states: tuple[ContinuumState, ...]

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return sum(len(rows) for rows in self.rows)

    @property
    def position(self) -> Tensor:
        """How many tokens each sequence has read: [B]."""
        return self._by_row([s.start + s.tokens.shape[1] for s in self.states])

    @property
    def memories(self) -> tuple[Any, ...] | None:
        """The memories' states of all sequences, one per layer; None before the first token."""
        found = [s.ahead if s.tokens.shape[1] else s.cache for s in self.states]
        return None if any(each is None for each in found) else self._by_row(found)

    def select(self, index: Tensor) -> Learned:
        """The sequences `index` (long or bool) in that order."""
        places = index.nonzero()[:, 0] if index.dtype == torch.bool else index
        rows, states = [], []
        for mine, state in zip(self.rows, self.states, strict=True):
            here = places.to(mine.device).unsqueeze(1) == mine  # [new, b]
            new = here.any(1).nonzero()[:, 0]
            if len(new):
                rows.append(new)
                states.append(state_select(state, here[new].int().argmax(1)))
        return Learned(tuple(rows), tuple(states))

    def repeat(self, repeats: int) -> Learned:
        """Every sequence `repeats` times, neighbours together."""
        rows = [
            (mine.unsqueeze(1) * repeats + torch.arange(repeats, device=mine.device)).flatten()
            for mine in self.rows
        ]
        return Learned(tuple(rows), tuple(state_repeat(s, repeats) for s in self.states))

    def _by_row(self, parts: list[Any]) -> Any:
        """The groups' trees as one, in the order of the batch."""
        order = torch.argsort(torch.cat(self.rows))
        return state_select(state_stack(parts), order)


class MemoryLayer(CacheLayerMixin):
    """One layer's state, any tree of tensors with the batch in front, and the tokens it has seen.

    `seen` counts columns of input, padding included, as `generate` does; how many real tokens each
    sequence has seen is the state's own `position`.
    """

    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.seen = 0

    def advance(self, state: Any, tokens: int) -> None:
        """Keep the state after `tokens` more columns of input."""
        self.state, self.seen = state, self.seen + tokens
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a memory's state is made by the model, not from keys and values")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a memory's state is replaced by `advance`, not extended by keys")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.seen, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = state_select(self.state, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = state_repeat(self.state, repeats)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(
                "a memory cannot forget its last tokens: keep a copy of the state before them"
                " (assisted generation is not possible)"
            )

    def offload(self) -> None:
        raise NotImplementedError("offloading of memory states is not supported")

    prefetch = offload


class MemoryCache(Cache):
    """The state of a whole model: `states` is a tuple with one tree per layer, or None at first.

    In a model whose levels learn, `learned` has all that was read and learned; `states` are then
    the memories' states in it.
    """

    def __init__(self, layers: int, states: tuple[Any, ...] | None = None, seen: int = 0) -> None:
        super().__init__(layers=[MemoryLayer() for _ in range(layers)])
        self.learned: Learned | None = None
        if states is not None:
            self.advance(states, seen)

    @property
    def states(self) -> tuple[Any, ...] | None:
        """One state per layer, or None before the first token."""
        if self.learned is not None:
            return self.learned.memories
        states = tuple(layer.state for layer in self.layers)
        return None if any(state is None for state in states) else states

    def advance(self, states: tuple[Any, ...], tokens: int) -> None:
        """Keep the states after `tokens` more columns of input."""
        for layer, state in zip(self.layers, states, strict=True):
            layer.advance(state, tokens)

    def advance_learned(self, learned: Learned, tokens: int) -> None:
        """Keep what was learned after `tokens` more columns of input."""
        self.learned = learned
        for layer in self.layers:
            layer.advance(None, tokens)

    def reset(self) -> None:
        self.learned = None
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.learned is not None:
            self.learned = self.learned.select(indices)
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.learned is not None:
            self.learned = self.learned.repeat(repeats)
        super().batch_repeat_interleave(repeats)

    def copy(self) -> MemoryCache:
        """A second cache that goes its own way from here (states are never changed in place)."""
        if self.learned is None:
            return MemoryCache(len(self), self.states, self.get_seq_length())
        twin = MemoryCache(len(self))
        twin.advance_learned(self.learned, self.get_seq_length())
        return twin

    @property
    def batch_size(self) -> int:
        """The number of sequences, -1 before the first token."""
        if self.learned is not None:
            return self.learned.batch
        return -1 if self.states is None else batch_size(self.states)

    @property
    def position(self) -> Tensor | None:
        """How many real tokens each sequence has seen ([B]), None before the first token."""
        if self.learned is not None:
            return self.learned.position
        return None if self.states is None else position(self.states)


def position(states: tuple[Any, ...]) -> Tensor:
    """How many real tokens each sequence of a model's states has seen: [B]."""
    found: Tensor = states[0].mixer.position
    return found
