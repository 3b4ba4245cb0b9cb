"""Sequences of different lengths in one batch: padding belongs behind them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["align"]


def align(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding from the front to the end: ids [B, T] and what is to be learned, [B, T] bool.

        ids, learn = align(batch.input_ids, batch.attention_mask)
        out = continuum(ids, learn=learn)

    A memory's clock counts from the first token on, for all sequences alike, so they must begin
    together. `mask` is 1 (or True) where there is text; padding inside a text is refused.
    """
    if ids.dim() != 2 or mask.shape != ids.shape:
        raise ValueError(
            f"ids and mask must be [batch, tokens] alike; got {tuple(ids.shape)} and"
            f" {tuple(mask.shape)}"
        )
    text = mask.bool()
    if bool((text[:, 1:] & ~text[:, :-1]).sum(1).gt(1 - text[:, 0].long()).any()):
        raise ValueError("mask: every sequence must be one piece; got padding inside a text")
    first = text.long().argmax(1, keepdim=True)  # [B, 1]: where the text begins
    order = (torch.arange(ids.shape[1], device=ids.device) + first) % ids.shape[1]
    return ids.gather(1, order), text.gather(1, order)
