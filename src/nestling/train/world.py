"""Processes: the only place that knows how many there are. One process is a world of size 1.

States leave a world whole (`whole`) and enter it cut as it needs them (`spread_`), so a checkpoint
does not depend on the number of processes or on the strategy: 2 -> 1 -> 2 just works.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestling.tree import tree_map

__all__ = ["World", "join", "spread_", "whole"]


@dataclass(frozen=True, kw_only=True)
class World:
    """Which process this is, and of how many."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def main(self) -> bool:
        """True in the process that writes files and talks."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for every process."""
        if self.size > 1:
            dist.barrier()

    def sum(self, *values: float) -> list[float]:
        """Sums over all processes (float64)."""
        if self.size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def any(self, flag: bool) -> bool:
        """True everywhere if true anywhere."""
        return self.sum(float(flag))[0] > 0

    def distribute(self, model: nn.Module, strategy: str) -> nn.Module:
        """The model as this world trains it: itself, DDP, or FSDP2 (in place)."""
        model.to(self.device)
        if self.size == 1:
            return model
        if strategy == "ddp":
            ids = [self.device.index] if self.device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(model, device_ids=ids)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.size,))
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of all processes, in rank order (a carried memory, for a checkpoint)."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def own_rows(self, tensor: Tensor) -> Tensor:
        """This process's part of rows that `rows` put together."""
        return tensor.chunk(self.size)[self.rank]


def whole(value: Any) -> Any:
    """Nested states with every sharded tensor put together (all processes must call this)."""
    return tree_map(lambda t: _gather(t) if hasattr(t, "device_mesh") else t, value, plain=True)


def _gather(tensor: Any) -> Tensor:
    """A sharded tensor whole; one blocking collective, rows padded to equal shards."""
    from torch.distributed.tensor import Shard

    mesh = tensor.device_mesh
    if mesh.ndim != 1 or tensor.placements != (Shard(0),):
        return tensor.full_tensor()
    local = tensor.to_local().detach()
    rows, size = tensor.shape[0], mesh.size()
    share = -(-rows // size)
    padded = local.new_zeros(share, *local.shape[1:])
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=mesh.get_group())
    return torch.cat(parts)[:rows].clone()


def spread_(model: nn.Module, optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> None:
    """Load whole states into a model and its optimizer, cut as their parameters are."""
    current = model.state_dict()
    missing = sorted(set(current) ^ set(states["model"]))
    if missing:
        raise ValueError(f"the checkpoint is of another model: {missing[0]} and others differ")
    model.load_state_dict({k: _like(v, current[k]) for k, v in states["model"].items()})
    saved = states["optimizer"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = [i for group in saved["param_groups"] for i in group["params"]]
    cut = {
        name: tree_map(lambda t, p=p: _like(t, p), saved["state"][name], plain=True)
        for name, p in zip(names, parameters, strict=True)
        if name in saved["state"]
    }
    optimizer.load_state_dict({**saved, "state": cut})


def _like(tensor: Tensor, reference: Any) -> Tensor:
    if not hasattr(reference, "device_mesh") or tensor.shape != reference.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    on_device = tensor.to(reference.device)
    return distribute_tensor(
        on_device, reference.device_mesh, reference.placements, src_data_rank=None
    )


@contextlib.contextmanager
def join() -> Iterator[World]:
    """The world torchrun started, or a world of one; left in order at the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if size == 1:
        yield World(device=device)
        return
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # torchrun may hand the same store to a restarted world, with the addresses of its dead members
    store = PrefixStore(f"attempt {attempt}", store)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield World(rank=dist.get_rank(), size=size, device=device)
    finally:
        # wrapped models hold the group in cycles; its threads must end before the interpreter does,
        # or a tensor they release too late aborts the process
        gc.collect()
        dist.destroy_process_group()
