"""The memory a sharded checkpoint takes in each process, against the share of states it holds.

    torchrun --nproc-per-node 2 benchmarks/checkpoints.py
    torchrun --nproc-per-node 4 benchmarks/checkpoints.py --width 1024 --layers 24

Every process holds its rows of a model and of AdamW's two moments (FSDP2). Printed for saving and
for loading: the most memory a process had in use for states, over the bytes of its share (1.2 is
the limit), and that what was loaded is equal bit for bit.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nestling.train.checkpoint import load_checkpoint, restore_, save_checkpoint
from nestling.train.distributed import World, join
from nestling.tree import tree_map

LIMIT = 1.2


def resident(*, peak: bool = False) -> int:
    """Bytes this process has in memory now, or had at most since `reset`."""
    key = "VmHWM" if peak else "VmRSS"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def reset() -> None:
    """Begin a new peak, with what was freed given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def shards(value: Any) -> int:
    """The bytes of all tensors that this process holds of a state."""
    total = 0

    def count(tensor: Any) -> Any:
        nonlocal total
        local = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor
        total += local.numel() * local.element_size()
        return tensor

    tree_map(count, value, plain=True)
    return total


def make(world: World, width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(world.size)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    if world.size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # FSDP2's own
    torch.set_num_threads(1)
    with join() as world, tempfile.TemporaryDirectory() as own:
        folder = Path(world.gather(own)[0])
        model, optimizer = make(world, given.width, given.layers)
        model(torch.randn(4, given.width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        held = states(model, optimizer)
        share = shards(held)
        reset()
        before = resident()
        save_checkpoint(folder, 1, held, {}, world=world)
        saving = 1 + (resident(peak=True) - before) / share
        del model, optimizer
        kept = tree_map(lambda t: t.clone(), held, plain=True)
        fresh, other = make(world, given.width, given.layers)
        with torch.no_grad():
            for weight in fresh.parameters():
                weight.zero_()
        weights = shards(fresh.state_dict())
        reset()
        before = resident()
        restore_(fresh, other, load_checkpoint(folder / "step-00000001", world=world))
        loading = (weights + resident(peak=True) - before) / share
        same: list[bool] = []

        def compare(a: Any, b: Any) -> Any:
            if hasattr(a, "device_mesh"):
                a, b = a.to_local(), b.to_local()
            same.append(torch.equal(a, b))
            return a

        for part in ("model", "optimizer"):
            mine, theirs = kept[part], states(fresh, other)[part]
            mine, theirs = (x["state"] if part == "optimizer" else x for x in (mine, theirs))
            tree_map(compare, dict(mine), dict(theirs), plain=True)
        found = world.gather((saving, loading, all(same), len(same), share))
        world.barrier()
    if world.main:
        for rank, (saving, loading, equal, count, share) in enumerate(found):
            print(
                f"rank {rank} of {world.size}: share {share / 2**20:.1f} MiB, saving"
                f" {saving:.3f}x, loading {loading:.3f}x, {count} tensors"
                f" {'equal' if equal else 'DIFFER'}"
            )
    good = all(max(s, lo) <= LIMIT and equal for s, lo, equal, _, _ in found)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
