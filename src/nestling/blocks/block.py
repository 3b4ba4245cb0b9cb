"""One block for every model: a mixer memory, then a channel memory (Eq. 69, 94-97)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from nestling.blocks.channel import Channel
from nestling.memories.core import Memory
from nestling.norm import RMSNorm

__all__ = ["Block", "BlockState"]


class BlockState(NamedTuple):
    """What a block knows of each sequence: its mixer's state and its channel's."""

    mixer: Any
    channel: Any


class Block(nn.Module):
    """`x <- x + mixer(norm(x))`, then the channel memory, which adds to the stream itself.

    With self-modifying Titans and a continuum memory this is Hope (Eq. 94-97); with attention and
    a continuum memory Hope-Attention; with attention and a feed-forward layer Transformer++; with
    attention and an in-context linear memory AdaTransformer (Eq. 69).
    """

    def __init__(self, mixer: Memory, channel: Channel, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = RMSNorm(mixer.width, eps)
        self.mixer = mixer
        self.channel = channel

    def init(self, batch_size: int, **options: Any) -> BlockState:
        """The state before the first token (`device` and `dtype` as for memories)."""
        return BlockState(
            self.mixer.init(batch_size, **options), self.channel.init(batch_size, **options)
        )

    def forward(
        self, x: Tensor, state: BlockState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, BlockState]:
        """[B, T, D] -> [B, T, D] and the state after the last token; mask as for memories."""
        mixer, channel = (None, None) if state is None else state
        y, mixer = self.mixer(self.norm(x), mixer, mask)
        x, channel = self.channel(x + y, channel, mask)
        return x, BlockState(mixer, channel)
