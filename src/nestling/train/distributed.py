"""The processes of a run: the only place that knows how many. One is a world of size 1."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestling.shards import cut, full, is_sharded, joined, local, rows_of
from nestling.tree import tree_map


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's rank, the number of processes, and the device."""

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

    def all(self, flag: bool) -> bool:
        """True everywhere if true everywhere."""
        return not self.any(not flag)

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

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order, in every process (small Python values)."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def gathered(value: Any) -> Any:
    """Nested states with every sharded tensor put together (all processes must call this)."""
    return tree_map(lambda t: _gather(t) if is_sharded(t) else t, value, plain=True)


def _gather(tensor: Any) -> Tensor:
    """A sharded tensor whole; one blocking collective, rows padded to equal shards."""
    if rows_of(tensor) is None:
        return full(tensor)
    mesh, own = tensor.device_mesh, local(tensor).detach()
    rows, size = tensor.shape[0], mesh.size()
    padded = own.new_zeros(-(-rows // size), *own.shape[1:])
    padded[: own.shape[0]] = own
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=mesh.get_group())
    return torch.cat(parts)[:rows].clone()


def own_rows(like: Any, read: Callable[[int, int], Tensor]) -> Tensor:
    """A tensor cut as `like` is, of the rows that `read(start, stop)` gives."""
    place = rows_of(like)
    if place is not None:
        return joined(read(*place).to(like.device), like)
    held = read(0, like.shape[0] if like.dim() else 0)
    return cut(held.to(like.device), like) if is_sharded(like) else held


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
