"""Run by test_distributed.py under torchrun: trains a small model and writes the parameters.

two_processes.py OUT: for every optimizer one process, DDP and FSDP2 must agree
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from nestling.levels import Level
from nestling.optim import (
    DGD,
    M3,
    AdaMuon,
    DeepMomentum,
    DeltaMomentum,
    Muon,
    NestedOptimizer,
    capture,
)

OPTIMIZERS = {
    "M3": lambda p: M3(p, lr=0.02, chunk=2),
    "Muon": lambda p: Muon(p, lr=0.02),
    "AdaMuon": lambda p: AdaMuon(p, lr=0.02),
    "DeltaMomentum": lambda p: DeltaMomentum(p, lr=0.02),
    "DeepMomentum": lambda p: DeepMomentum(p, lr=0.02),
    "nested": lambda p: NestedOptimizer(
        [(Level(name="slow", chunk=2), p, lambda q: M3(q, lr=0.02))]
    ),
}
STEPS, CUT = 5, 3


class Net(nn.Module):
    """Odd sizes, so that shards are uneven, and a row that one rank has nothing of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh())
        self.conv = nn.Conv1d(5, 3, 2)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        return self.head(self.conv(hidden[..., None].expand(-1, -1, 2))[..., 0])


def train(model: nn.Module, optimizer, first: int, steps: int, rank: int, ranks: int) -> None:
    for step in range(first, first + steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for p in model.parameters()
    ]


def sharded(net: Net) -> nn.Module:
    for part in (*net.layers, net.head):
        if isinstance(part, nn.Linear):
            fully_shard(part)
    return fully_shard(net)


def check(name: str, how: str, found: list, expected: list) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, msg=lambda m: f"{name} {how}: {m}")


def from_rank_0(rank: int) -> None:
    """A full state that only rank 0 has reaches all ranks whole."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for name in ("M3", "DeepMomentum"):
        model = Net()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        train(model, optimizer, 0, CUT, 0, 1)
        saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions())
        expected = {k: dict(optimizer.state[p]) for k, p in model.named_parameters()}
        model.zero_grad()  # as in a new process: torch then creates the state to load into
        fresh = OPTIMIZERS[name](list(model.parameters()))
        given = saved if rank == 0 else {}
        set_optimizer_state_dict(model, fresh, given, options=options)
        for key, parameter in model.named_parameters():
            for leaf, value in expected[key].items():
                found = fresh.state[parameter][leaf]
                torch.testing.assert_close(found, value, msg=f"{name} {key} {leaf} on rank {rank}")


def zero_redundancy(rank: int) -> None:
    """ZeRO over plain parameters: both ranks step, and end with the same weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(40, 12), nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12), nn.Linear(12, 40)
    )
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), M3, lr=0.01)
    losses = []
    for step in range(12):
        tokens = torch.arange(rank, 40, 2)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1, step
    assert losses[-1] < 0.9 * losses[0], losses
    inner = optimizer.optim
    for group in inner.param_groups:
        for p in group["params"]:
            assert not (inner.kind(group, p).hidden and 40 in p.shape), "a table was orthogonalised"
    for p in model.parameters():
        others = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(others, p.detach().contiguous())
        assert torch.equal(others[0], others[1])


def main(out: Path) -> None:
    """Compare, for each optimizer, one process with DDP, FSDP2, and FSDP2 stopped and resumed."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, make in OPTIMIZERS.items():
        alone = Net()
        train(alone, make(list(alone.parameters())), 0, STEPS, 0, 1)
        expected = whole(alone)

        replica = Net()
        wrapped = DistributedDataParallel(replica)
        train(wrapped, make(list(replica.parameters())), 0, STEPS, rank, ranks)
        check(name, "DDP", whole(replica), expected)

        model = sharded(Net())
        optimizer = make(list(model.parameters()))
        train(model, optimizer, 0, CUT, rank, ranks)
        shape = next(p for p in model.parameters() if p.ndim == 2)
        states = [
            v for v in optimizer.state[shape].values() if v.ndim == 2 and v.shape == shape.shape
        ]
        if name not in ("DeepMomentum", "nested"):
            assert states, name
        assert all(v.to_local().shape == shape.to_local().shape for v in states), "not sharded"
        if name in ("M3", "nested"):  # stopped, saved on both ranks, continued by a new optimizer
            folder = str(out / name)
            dcp.save(
                {"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder
            )
            model.zero_grad()  # as in a new process: torch then creates the state to load into
            optimizer = make(list(model.parameters()))
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=folder)
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        train(model, optimizer, CUT, STEPS - CUT, rank, ranks)
        check(name, "FSDP2", whole(model), expected)

    from_rank_0(rank)
    zero_redundancy(rank)

    model = sharded(Net())
    with pytest.raises(TypeError, match="FSDP"):
        DGD(model.parameters(), inputs=capture(model))
    if rank == 0:
        (out / "done").write_text(f"{len(OPTIMIZERS)} optimizers\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # Newton-Schulz magnifies rounding
    main(Path(sys.argv[1]))
