"""Run by test_learning_worlds.py under torchrun: levels that learn, under DDP and FSDP2.

learning_worlds.py OUT: two processes with one sequence each take the steps of one process with two
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nestling.models import NestlingConfig, NestlingForCausalLM

LEVELS = [{"name": "fast", "chunk": 4, "rate": 0.5}, {"name": "slow", "chunk": 8, "rate": 0.3}]


def build(learning: str, layers: int | None = None) -> NestlingForCausalLM:
    torch.manual_seed(0)
    config = NestlingConfig(
        vocab_size=13,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        mixer_options={"self_modifying": {"chunk": 4}},
        levels=LEVELS,
        learn_rates=True,
        learning=learning,
        learning_layers=layers,
    )
    return NestlingForCausalLM(config).double().train()


def sharded(model: NestlingForCausalLM) -> NestlingForCausalLM:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(model, batches) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():  # a pass without gradients leaves everything as it was
        model(input_ids=batches[0], labels=batches[0])
    return losses


def main(out: Path) -> None:
    warnings.simplefilter("ignore")  # FSDP2's own
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(1, 13, (2, 21), generator=generator) for _ in range(3)]
    mine = [ids[rank : rank + 1] for ids in batches]
    found = {}
    for learning, layers in (("first_order", None), ("first_order", 1), ("second_order", None)):
        alone = build(learning, layers)
        start = copy.deepcopy(alone.state_dict())
        train(alone, batches)
        want = alone.state_dict()
        moved = max(float((want[name] - start[name]).abs().max()) for name in want)
        for name, wrap in (("ddp", DistributedDataParallel), ("fsdp", sharded)):
            model = build(learning, layers)
            try:
                train(wrap(model), mine)
            except ValueError as error:
                found[f"{learning} {layers} {name}"] = str(error)
                continue
            apart = 0.0
            for key, value in model.state_dict().items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                apart = max(apart, float((whole - want[key]).abs().max()))
            found[f"{learning} {layers} {name}"] = [apart, moved]
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
