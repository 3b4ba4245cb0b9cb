"""The scan on CUDA through flash-linear-attention's kernels (extra `nestling[fla]`).

fla's gated delta rule is, in our layout (memory `[Do, Di]`, fla keeps its transpose),

    M_t = a_t M_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T,    o_t = scale * M_t q_t,

given `g_t = log a_t`. Ours, `M_t = M_{t-1} (a_t I - n_t x_t x_t^T) + n_t u_t x_t^T`, is that with
`k = x, b_t = n_t / a_t, v_t = a_t u_t, scale = 1`. `gd` is its simple gated linear attention with
`v_t = n_t u_t`. fla reads after the write; reads before it are those of the token before, so the
queries move one token to the left and the first read is taken from the start state.

`a_t = 0` has no logarithm, and its gradient would be lost: a retain below 1e-6 is refused where
values are looked at (`check=True`), and raised to 1e-6, without a gradient, where they are not.
The mapping is tested, gradients included, against fla's own recurrent kernel in Triton's
interpreter; its chunked kernels, which run here, need a GPU: `benchmarks/gpu.py` checks them first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor

from nestling.scan.backends import INSTALLED, MISSING_FLA
from nestling.scan.checks import Read
from nestling.scan.delta.types import Options

LEAST = 1e-6
"""Smallest retain that the logarithm is taken of."""

WIDEST = 256
"""The widest key that fla's chunked kernels take."""

Kernel = Callable[..., tuple[Tensor, Tensor]]
Kernels = tuple[Kernel, Kernel]
"""The two operations used: fla's gated delta rule and its simple gated linear attention."""


def refusal_fla(x: Tensor, momentum: Tensor | None) -> str | None:
    """Why fla does not take a scan, or None."""
    if "fla" not in INSTALLED:
        return MISSING_FLA
    if momentum is not None:
        return "backend 'fla' has no momentum; use backend='chunk'"
    if not x.is_cuda:
        return f"backend 'fla' needs CUDA tensors; x is on {x.device}: use 'chunk'"
    if x.shape[-1] > WIDEST:
        return f"backend 'fla' takes keys of at most {WIDEST}; these have {x.shape[-1]}"
    return None


def check_fla(retain: Tensor) -> None:
    """Reject gates of which fla would lose the gradient."""
    if retain.numel() and bool((retain < LEAST).any()):
        raise ValueError(
            f"backend 'fla' needs retain of at least {LEAST:g}; got {float(retain.min()):g}:"
            " use backend='triton' or 'chunk'"
        )


def scan_fla(
    state: Any, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: Tensor | None,
    **options: Unpack[Options],
) -> tuple[Tensor | None, Any]:  # fmt: skip
    """The scan on CUDA; `chunk` and `recompute` are fla's own business."""
    why = refusal_fla(x, options["momentum"])
    if why is not None:
        raise ImportError(why) if why == MISSING_FLA else ValueError(why)
    given = (state, x, u, rate, retain, queries)
    return map_to_fla(_kernels(), *given, erase=options["erase"], read=options["read"])


def _kernels() -> Kernels:
    try:
        delta = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        linear = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    except ImportError as error:
        raise ImportError(MISSING_FLA) from error
    return delta, linear


def map_to_fla(
    kernels: Kernels, state: Tensor, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor,
    queries: Tensor | None, *, erase: bool, read: Read,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """The algebra of this back end, with any kernels that follow fla's conventions.

    fla's shapes are q, k `[B, T, H, Di]`, v `[B, T, H, Do]`, gates `[B, T, H]`, states
    `[B, H, Di, Do]`; all leading dimensions become B and H is 1.
    """
    lead, tokens = x.shape[:-2], x.shape[-2]
    if tokens == 0:
        return None if queries is None else queries.new_empty(u.shape), state.float()

    def rows(tensor: Tensor) -> Tensor:  # [..., T, D] -> [B, T, 1, D]
        return tensor.reshape(-1, tokens, 1, tensor.shape[-1])

    def gates(tensor: Tensor) -> Tensor:  # [..., T] -> [B, T, 1]
        return tensor.reshape(-1, tokens, 1).float()

    alpha, eta = gates(retain).clamp_min(LEAST), gates(rate)
    start = state.reshape(-1, 1, *state.shape[-2:]).mT.contiguous().float()
    asked = torch.zeros_like(x) if queries is None else queries
    if read == "before":
        asked = torch.cat([asked[..., 1:, :], torch.zeros_like(asked[..., :1, :])], -2)
    common: dict[str, Any] = {"scale": 1.0, "initial_state": start, "output_final_state": True}
    common |= {"q": rows(asked), "k": rows(x), "g": alpha.log()}
    weight = alpha if erase else eta
    value = (rows(u) * weight.unsqueeze(-1)).to(u.dtype)
    if erase:
        out, end = kernels[0](v=value, beta=eta / alpha, **common)
    else:
        out, end = kernels[1](v=value, **common)
    memory = end.mT.reshape(state.shape)
    if queries is None:
        return None, memory
    reads = out.reshape(*lead, tokens, -1)
    if read == "before":
        first = queries[..., :1, :].float() @ state.float().mT
        reads = torch.cat([first.to(reads.dtype), reads[..., :-1, :]], -2)
    return reads.to(queries.dtype), memory
