"""The cost of a run on GPUs: operations, bytes and communication, before anything is rented.

Operations are counted, not estimated: one block of the real width runs forward and backward on this
machine under torch's operation counter. Time follows from peak figures and an assumed utilisation;
it is an estimate to plan with, and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from nestling.checks import one_of, require


class Gpu(NamedTuple):
    """Peak dense bf16 operations per second, memory, and the link to its neighbours one way."""

    flops: float
    memory: float  # bytes
    link: float  # bytes per second


GPUS = {
    "a100": Gpu(312e12, 80e9, 300e9),
    "h100": Gpu(989e12, 80e9, 450e9),
    "b200": Gpu(2250e12, 180e9, 900e9),
}
"""GPUs by name, with the figures of their makers' data sheets."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of training a model on `gpus` devices with fully sharded data parallelism."""

    parameters: int
    flops_per_token: float
    state_bytes: float  # weights, gradients and optimizer state, per device
    activation_bytes: float  # per device and sequence, with every block recomputed
    traffic_bytes: float  # sent and received per device and step
    compute_seconds: float  # per step
    traffic_seconds: float  # per step
    tokens_per_second: float  # all devices, traffic hidden behind compute where it fits
    hours: float


def block_flops(config: Any, tokens: int = 256) -> float:
    """Operations per token of one block, forward and backward, counted on this machine."""
    from nestling.continuum import Block

    torch.manual_seed(0)
    block = Block(*config.build(0))
    x = torch.randn(1, tokens, config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y, _ = block(x)
        y.sum().backward()
    return counter.get_total_flops() / tokens


def cost(
    config: Any,
    *,
    tokens: float,
    gpus: int = 8,
    gpu: str = "h100",
    length: int = 4096,
    rows_per_gpu: int = 8,
    utilisation: float = 0.4,
) -> Cost:
    """Plan the training of a model on `tokens` tokens, in windows of `length`.

    State per device: bf16 weights and gradients, float32 master weights and two moments, all
    sharded: 16 bytes a parameter over the devices, and one block gathered. Traffic per step:
    weights gathered for forward and backward, gradients reduced, in bf16. Recomputing adds a pass
    (a third of the counted operations).
    """
    one_of("gpu", gpu, GPUS)
    require(gpus >= 1, "gpus", gpus, "at least 1")
    require(rows_per_gpu >= 1, "rows_per_gpu", rows_per_gpu, "at least 1")
    require(length >= 1, "length", length, "at least 1")
    require(0 < tokens < math.inf, "tokens", tokens, "a finite number above 0")
    require(0 < utilisation <= 1, "utilisation", utilisation, "in (0, 1]")
    from nestling.models.presets import parameter_count

    device = GPUS[gpu]
    parameters = parameter_count(config)
    flops = config.num_hidden_layers * block_flops(config) * 4 / 3
    flops += 6 * config.hidden_size * config.vocab_size
    step_tokens = rows_per_gpu * length
    compute = flops * step_tokens / (device.flops * utilisation)
    traffic = 0.0 if gpus == 1 else 3 * 2 * parameters * (gpus - 1) / gpus
    seconds = max(compute, traffic / device.link)
    speed = gpus * step_tokens / seconds
    layer = 2 * length * config.hidden_size  # a block's input in bf16
    return Cost(
        parameters=parameters,
        flops_per_token=flops,
        state_bytes=16 * parameters / gpus + 2 * 2 * parameters / config.num_hidden_layers,
        activation_bytes=config.num_hidden_layers * layer + 6 * length * config.vocab_size,
        traffic_bytes=traffic,
        compute_seconds=compute,
        traffic_seconds=traffic / device.link,
        tokens_per_second=speed,
        hours=tokens / speed / 3600,
    )
