"""The memory state of all layers in the form `generate` passes around."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from nestling.tree import batch_size, state_repeat, state_select

__all__ = ["MemoryCache", "MemoryLayer", "position"]


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
    """The state of a whole model: `states` is a tuple with one tree per layer, or None at first."""

    def __init__(self, layers: int, states: tuple[Any, ...] | None = None, seen: int = 0) -> None:
        super().__init__(layers=[MemoryLayer() for _ in range(layers)])
        if states is not None:
            self.advance(states, seen)

    @property
    def states(self) -> tuple[Any, ...] | None:
        """One state per layer, or None before the first token."""
        states = tuple(layer.state for layer in self.layers)
        return None if any(state is None for state in states) else states

    def advance(self, states: tuple[Any, ...], tokens: int) -> None:
        """Keep the states after `tokens` more columns of input."""
        for layer, state in zip(self.layers, states, strict=True):
            layer.advance(state, tokens)

    def copy(self) -> MemoryCache:
        """A second cache that goes its own way from here (states are never changed in place)."""
        return MemoryCache(len(self), self.states, self.get_seq_length())

    @property
    def batch_size(self) -> int:
        """The number of sequences, -1 before the first token."""
        return -1 if self.states is None else batch_size(self.states)

    @property
    def position(self) -> Tensor | None:
        """How many real tokens each sequence has seen ([B]), None before the first token."""
        return None if self.states is None else position(self.states)


def position(states: tuple[Any, ...]) -> Tensor:
    """How many real tokens each sequence of a model's states has seen: [B]."""
    found: Tensor = states[0].mixer.position
    return found
