"""A model's own running state as a tree of tensors, so that it can be kept, branched and saved.

Two kinds: the memory states of our models, and the keys and values of Hugging Face decoders, whose
cache grows by making new tensors: holding the old ones is a snapshot.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["cache_from", "cache_tree", "context_limit"]


def cache_from(model: nn.Module, tree: Any, seen: int) -> Any:
    """A cache object for the model's next call, after `seen` tokens; None begins a new one."""
    make: Any = getattr(model, "make_cache", None)
    if make is not None:
        return make(tree, seen)
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    if tree is None:
        return cache
    if len(tree) != len(cache.layers):
        raise ValueError(
            f"the state's cache has {len(tree)} layers, the model {len(cache.layers)}: it belongs"
            " to another model"
        )
    for layer, (keys, values) in zip(cache.layers, tree, strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = seen
    return cache


def cache_tree(cache: Any) -> Any:
    """The tensors of a cache: one tree per layer."""
    states = getattr(cache, "states", None)
    if states is not None:
        return states
    layers = getattr(cache, "layers", None)
    if not layers or not all(hasattr(layer, "keys") for layer in layers):
        raise TypeError(
            f"{type(cache).__name__}: only caches of keys and values, and the memory states of"
            " nestling's own models, can be carried along"
        )
    return tuple((layer.keys, layer.values) for layer in layers)


def context_limit(model: nn.Module) -> int | None:
    """How many tokens the model can see at once; None without limit."""
    if hasattr(model, "make_cache"):
        return None
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    limit = next(filter(None, found), None)  # MPT calls it max_seq_len
    return int(limit) if limit else None
