"""Blocks: a mixer memory and a channel memory, composed (Eq. 69-70, 74, 94-97)."""

from nestling.blocks.adaptive import AdaptiveMLP, AdaptiveState
from nestling.blocks.block import Block, BlockState
from nestling.blocks.channel import Chain, Channel, FeedForward, InContext, Parallel
from nestling.blocks.mlp import ACTIVATIONS, MLP, SwiGLU
from nestling.blocks.parts import CHANNELS, MIXERS, ChannelSpec, MixerSpec
from nestling.norm import RMSNorm, rms_norm

__all__ = [
    "ACTIVATIONS",
    "CHANNELS",
    "MIXERS",
    "MLP",
    "AdaptiveMLP",
    "AdaptiveState",
    "Block",
    "BlockState",
    "Chain",
    "Channel",
    "ChannelSpec",
    "FeedForward",
    "InContext",
    "MixerSpec",
    "Parallel",
    "RMSNorm",
    "SwiGLU",
    "rms_norm",
]
