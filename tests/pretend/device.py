"""A pretended CUDA device: tensors that call themselves cuda and compute on the CPU.

It raises where devices are mixed as CUDA would, and counts kernel launches and the moments at which
the host waits for the device. It runs in a process of its own (`believe` comes before torch), needs
a C++ compiler, and cannot tell whether CUDA has a kernel for an operation.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def believe() -> None:
    """Compile the guard (once a machine and torch) and load it; call before torch is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("torch is not installed")
    torch_at = Path(spec.submodule_search_locations[0])
    source = Path(__file__).with_name("guard.cpp")
    key = hashlib.sha256(source.read_bytes() + (torch_at / "version.py").read_bytes()).hexdigest()
    made = Path(tempfile.gettempdir()) / f"nestling-pretend-{os.getuid()}-{key[:16]}.so"
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}")
        include = (f"-I{torch_at / 'include'}", f"-I{torch_at / 'include/torch/csrc/api/include'}")
        library = (
            f"-L{torch_at / 'lib'}",
            "-ltorch_cpu",
            "-lc10",
            f"-Wl,-rpath,{torch_at / 'lib'}",
        )
        command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", *include, str(source)]
        subprocess.run([*command, "-o", str(part), *library], check=True)
        part.rename(made)
    ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)


believe()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils import _pytree as tree  # noqa: E402
from torch.utils._python_dispatch import (  # noqa: E402
    TorchDispatchMode,
    return_and_correct_aliasing,
)

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
FREE = frozenset(
    "view _unsafe_view reshape transpose t permute expand slice select unsqueeze squeeze detach"
    " alias split split_with_sizes unbind diagonal as_strided narrow unflatten flatten empty"
    " empty_like new_empty empty_strided new_empty_strided unfold lift_fresh _reshape_alias"
    " is_same_size view_as expand_as chunk movedim _local_scalar_dense resize_".split()
)
"""Operations that launch nothing."""

MIXED = frozenset("copy_ _to_copy index index_put_ index_put _index_put_impl_ set_".split())
"""Operations that take a CPU tensor beside a CUDA one."""

WAITS = frozenset("_local_scalar_dense nonzero masked_select _unique2 equal is_nonzero".split())
"""Operations whose result, or its size, the host must have."""


class Pretend(Tensor):
    """Holds a CPU tensor and calls itself cuda."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretend:
        made: Pretend = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=CUDA,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretend({self.held})"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        _count.wait("tolist")
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Count:
    """Launches by operation, and waits by operation and place."""

    def __init__(self) -> None:
        self.launches: collections.Counter[str] = collections.Counter()
        self.waits: collections.Counter[str] = collections.Counter()

    def wait(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/nestling/" in f.filename]
        where = (
            f"{frames[-1].filename.split('/nestling/')[-1]}:{frames[-1].lineno}" if frames else "?"
        )
        self.waits[f"{what} at {where}"] += 1


_count = Count()


@contextmanager
def counting() -> Iterator[Count]:
    """Count what happens inside."""
    global _count
    before, _count = _count, Count()
    try:
        yield _count
    finally:
        _count = before


def _on_cuda(value: Any) -> bool:
    return isinstance(value, Pretend)


def _check(
    func: Any, name: str, tensors: list[Tensor], device: torch.device | None, given: Any
) -> None:
    mixed = any(map(_on_cuda, tensors)) and any(not _on_cuda(t) and t.dim() for t in tensors)
    if mixed and name not in MIXED:
        shapes = [(str(t.device), tuple(t.shape)) for t in tensors]
        raise RuntimeError(f"expected all tensors to be on the same device: {func} of {shapes}")
    random = given.get("generator")
    target = device or (CUDA if any(map(_on_cuda, tensors)) else CPU)
    if random is not None and random.device.type != target.type:
        raise RuntimeError(f"{func} on {target.type} got a generator for {random.device.type}")


def _waits(name: str, args: Any, tensors: list[Tensor], device: torch.device | None) -> None:
    if name in WAITS and any(map(_on_cuda, tensors)):
        _count.wait(name)
    if name == "_to_copy" and device is not None and tensors[0].device.type != device.type:
        _count.wait(f"copy to {device.type}")
    if name == "copy_" and _on_cuda(args[0]) != _on_cuda(args[1]):
        _count.wait("copy between devices")
    if name in ("index", "index_put_", "_index_put_impl_") and _on_cuda(args[0]):
        by = [t for t in tree.tree_leaves(args[1]) if isinstance(t, Tensor)]
        if any(t.dtype == torch.bool for t in by):
            _count.wait("index by a mask")
        if any(not _on_cuda(t) for t in by):
            _count.wait("index by a CPU tensor")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name.split("::")[1]
    tensors = [t for t in tree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if name == "_fused_sdp_choice":
        return 0
    device = kwargs.get("device")
    device = None if device is None else torch.device(device)
    _check(func, name, tensors, device, kwargs)
    _waits(name, args, tensors, device)
    held = tree.tree_map(lambda t: t.held if _on_cuda(t) else t, (args, kwargs))
    if device is not None:
        held[1]["device"] = CPU
    out = func(*held[0], **held[1])
    cuda = any(map(_on_cuda, tensors))
    to_cuda = device.type == "cuda" if device is not None else cuda
    if name in ("copy_", "index"):
        to_cuda = _on_cuda(args[0])
    if (cuda or to_cuda) and name not in FREE:
        _count.launches[name] += 1
    writes = any(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)
    if not to_cuda:
        return return_and_correct_aliasing(func, args, kwargs, out) if writes else out

    def wrap(part: Any) -> Any:
        return Pretend(part) if isinstance(part, Tensor) and not _on_cuda(part) else part

    out = tree.tree_map(wrap, out)
    if cuda and name != "_to_copy":
        out = return_and_correct_aliasing(func, args, kwargs, out)
    return out


class Device(TorchDispatchMode):
    """Inside, `device="cuda"` is the pretended device."""

    def __enter__(self) -> Device:
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._before)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "nestling":  # look inside our own operators
            inside = torch._library.custom_ops.OPDEFS[func._schema.name]._init_fn
            with torch._C._AutoDispatchBelowAutograd(), self:
                return inside(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})


def prepare() -> None:
    """The parts of CUDA that torch asks for beside tensors, and Triton's launches on their data."""
    import torch.amp.autocast_mode
    import torch.cuda.amp.common
    from triton.runtime import interpreter

    from tests.kernels.interpreter import hurry

    hurry()
    torch.autograd.set_multithreading_enabled(False)
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda._lazy_init = lambda: None
    torch.cuda._initialized = True
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    launch = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = tree.tree_leaves((args, kwargs))
        if any(isinstance(t, Tensor) and not _on_cuda(t) for t in given):
            raise RuntimeError(f"{self.fn.__name__} was given a tensor that is not on cuda")
        _count.launches[f"triton {self.fn.__name__}"] += 1
        if _dry:
            return None
        args, kwargs = tree.tree_map(lambda t: t.held if _on_cuda(t) else t, (args, kwargs))
        with torch._C._DisableTorchDispatch():
            return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = counted


_dry = False


@contextmanager
def dry() -> Iterator[None]:
    """Triton kernels are counted but not run, so that long sequences can be counted quickly."""
    global _dry
    _dry = True
    try:
        yield
    finally:
        _dry = False
