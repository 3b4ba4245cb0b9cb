"""The scan on CUDA through flash-linear-attention's kernels (extra `nestling[fla]`).

fla's gated delta rule is, in our layout (memory `[Do, Di]`, fla keeps its transpose),

    M_t = a_t M_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T,    o_t = scale * M_t q_t,

given `g_t = log a_t`. Ours, `M_t = M_{t-1} (a_t I - n_t x_t x_t^T) + n_t u_t x_t^T`, is that with
`k = x, b_t = n_t / a_t, v_t = a_t u_t, scale = 1`. `gd` is its simple gated linear attention with
`v_t = n_t u_t`. fla reads after the write; reads before it are those of the token before, so the
queries move one token to the left and the first read is taken from the start state.

`a_t = 0` has no logarithm: retain is raised to 1e-6 here, which is this back end's only deviation.
The mapping is tested against the naive form with a plain implementation of fla's two recurrences;
the kernels themselves need triton and a GPU and are **untested** in this project's own checks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nestling.scan.checks import Read, Rule

__all__ = ["Kernels", "map_to_fla", "scan_fla"]

LEAST = 1e-6
"""Smallest retain that the logarithm is taken of."""

Kernel = Callable[..., tuple[Tensor, Tensor]]
Kernels = tuple[Kernel, Kernel]
"""The two operations used: fla's gated delta rule and its simple gated linear attention."""


def scan_fla(
    state: Any,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None,
    *,
    rule: Rule,
    read: Read,
    chunk: int,
    momentum: Tensor | None,
    recompute: bool,
) -> tuple[Tensor | None, Any]:
    """The scan on CUDA; `chunk` and `recompute` are fla's own business."""
    if momentum is not None:
        raise ValueError("backend 'fla' has no momentum; use backend='chunk'")
    if not x.is_cuda:
        raise ValueError(f"backend 'fla' needs CUDA tensors; x is on {x.device}: use 'chunk'")
    return map_to_fla(_kernels(), state, x, u, rate, retain, queries, rule=rule, read=read)


def _kernels() -> Kernels:
    try:
        delta = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        linear = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    except ImportError as error:
        raise ImportError(
            "backend 'fla' needs flash-linear-attention and triton: pip install 'nestling[fla]';"
            " backend='chunk' runs everywhere"
        ) from error
    return delta, linear


def map_to_fla(
    kernels: Kernels,
    state: Tensor,
    x: Tensor,
    u: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None,
    *,
    rule: Rule,
    read: Read,
) -> tuple[Tensor | None, Tensor]:
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
    weight = alpha if rule == "dgd" else eta
    value = (rows(u) * weight.unsqueeze(-1)).to(u.dtype)
    if rule == "dgd":
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
