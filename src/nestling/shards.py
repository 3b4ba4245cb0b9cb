"""Tensors that FSDP2 (`fully_shard`) or `distribute_tensor` has sharded over processes.

They are told without importing `torch.distributed`; what makes or joins them imports it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """True for a DTensor."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Tensor:
    """This process's part of a DTensor; any other tensor as it is."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def full(tensor: Any) -> Tensor:
    """A DTensor put together in every process; any other tensor as it is."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def share_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows, from one to before another, that `Shard(0)` gives to a rank."""
    each = -(-rows // ranks)
    start = min(rank * each, rows)
    return start, min(start + each, rows)


def rows_of(tensor: Any) -> tuple[int, int] | None:
    """The rows of a tensor that this process holds; None unless it is cut by rows (FSDP2)."""
    if not is_sharded(tensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        return None
    return share_of(tensor.shape[0], mesh.get_local_rank(), mesh.size())


def joined(part: Tensor, like: Any) -> Tensor:
    """This process's part as a DTensor laid out like another; the others have theirs."""
    from torch.distributed.tensor import DTensor

    shape, stride = like.shape, like.stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def cut(whole: Tensor, like: Any) -> Tensor:
    """A tensor that every process has, laid out like a DTensor; no communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
