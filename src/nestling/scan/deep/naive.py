"""The two-layer scan as two matrix scans, one per layer: reads like the equations, slow.

A chunk of tokens takes its error signals from the weights where the chunk starts (Eq. 90,
deviation 2); then each layer is a matrix memory with its own input and its own error (deviation 6),
and a read composes the two reads, `z_t = W2_t q_t`, `y_t = q_t + W1_t sigma(z_t)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from nestling.activations import Activation, silu
from nestling.levels import boundaries
from nestling.objectives import Objective, l2
from nestling.scan.checks import Read, is_l2
from nestling.scan.deep.types import MLPOptions, MLPState, check_mlp, with_starts
from nestling.scan.delta.naive import scan_naive
from nestling.scan.delta.types import MatrixAndVelocity
from nestling.scan.numerics import compute_dtype


class Signals(NamedTuple):
    """The pairs the layers learn from each token: layer 2 `x -> u2`, layer 1 `h -> u1`."""

    h: Tensor  # [..., C, H]
    u1: Tensor  # [..., C, D]
    u2: Tensor  # [..., C, H]


def clipped(vector: Tensor, most: float | None) -> Tensor:
    """Shortened to the length `most` along the last dimension where it is longer."""
    if most is None:
        return vector
    length = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return vector * (most / length.clamp_min(most))


def signals(
    w1: Tensor, w2: Tensor, x: Tensor, v: Tensor, *,
    objective: Objective, clip: float | None, bound_inputs: bool, sigma: Activation,
) -> Signals:  # fmt: skip
    """Inputs and errors of both layers at the weights given (Eq. 29-31, 92-93; deviation 6, 10.8).

    `u1 = v - M(x)` (l2) or `v` (dot), `u2 = sigma'(z) * (W1^T u1)`: the negative gradients.
    """
    z = x @ w2.mT  # [..., C, H]
    gate = sigma.gate(z)
    h = sigma.value(z, gate)
    error = v - (x + h @ w1.mT) if is_l2(objective) else v  # [..., C, D]
    u1 = clipped(error, clip)
    u2 = clipped(sigma.slope(z, gate) * (u1 @ w1), clip)
    return Signals(clipped(h, 1.0 if bound_inputs else None), u1, u2)


def mlp_naive(
    state: MLPState,
    x: Tensor,
    v: Tensor,
    rate: Tensor,
    retain: Tensor,
    queries: Tensor | None = None,
    *,
    objective: Objective = l2,
    erase: bool = True,
    read: Read = "after",
    chunk: int = 64,
    clip: float | None = None,
    bound_inputs: bool = True,
    momentum: Tensor | None = None,
    recompute: bool = False,
    sigma: Activation = silu,
    check: bool = True,
) -> tuple[Tensor | None, MLPState]:
    """`scan_mlp` token by token, differentiable to any order; chunk = 1 is online (Eq. 88).

    `recompute` is accepted for the signature's sake and changes nothing.
    """
    options = MLPOptions(
        objective=objective, erase=erase, read=read, chunk=chunk, clip=clip,
        bound_inputs=bound_inputs, momentum=momentum, sigma=sigma,
    )  # fmt: skip
    given = (state, x, v, rate, retain, queries)
    check_mlp(*given, check=check, **options)
    return by_matrix_scans(scan_naive, *given, **options)


def by_matrix_scans(
    scan: Callable[..., tuple[Any, Any]], state: MLPState, x: Tensor, v: Tensor, rate: Tensor,
    retain: Tensor, queries: Tensor | None, **options: Unpack[MLPOptions],
) -> tuple[Tensor | None, MLPState]:  # fmt: skip
    """The two-layer scan out of any matrix scan; begins and ends anywhere in a chunk (Eq. 90)."""
    chunk, momentum, sigma = options["chunk"], options["momentum"], options["sigma"]
    dtype = compute_dtype(*state[:6], x, v, rate, retain, queries, momentum)
    state = MLPState(  # type: ignore[call-arg]
        *(s.to(dtype) if s is not None else None for s in state[:6]),  # type: ignore[arg-type]
        state.position,
    )
    stop = state.position + x.shape[-2]
    cuts = [state.position, *boundaries(state.position, stop, chunk)]
    cuts += [stop] if cuts[-1] != stop else []
    reads = []
    for i in range(len(cuts) - 1):
        part = slice(cuts[i] - state.position, cuts[i + 1] - state.position)
        if cuts[i] % chunk == 0:
            state = state._replace(start1=state.w1, start2=state.w2)
        xs, vs = x[..., part, :].to(dtype), v[..., part, :].to(dtype)
        qs = queries[..., part, :].to(dtype) if queries is not None else None
        gates = (rate[..., part], retain[..., part])
        theta = momentum[..., part] if momentum is not None else None
        learn = signals(
            state.start1, state.start2, xs, vs,  # type: ignore[arg-type]
            objective=options["objective"], clip=options["clip"],
            bound_inputs=options["bound_inputs"], sigma=sigma,
        )  # fmt: skip
        how: dict[str, Any] = {"momentum": theta, "check": False}
        how |= {"erase": options["erase"], "read": options["read"]}
        z, layer2 = scan(_layer(state.w2, state.velocity2, theta), xs, learn.u2, *gates, qs, **how)
        hidden = sigma(z) if qs is not None else None
        y, layer1 = scan(
            _layer(state.w1, state.velocity1, theta), learn.h, learn.u1, *gates, hidden, **how
        )
        if qs is not None:
            reads.append(qs + y)
        if theta is None:
            state = state._replace(w1=layer1, w2=layer2)
        else:
            (w1, velocity1), (w2, velocity2) = layer1, layer2
            state = state._replace(w1=w1, w2=w2, velocity1=velocity1, velocity2=velocity2)
    end = with_starts(state._replace(position=stop), chunk)
    if queries is None:
        return None, end
    joined = torch.cat(reads, dim=-2) if reads else queries.new_empty(queries.shape)
    return joined.to(queries.dtype), end


def _layer(weight: Tensor, velocity: Tensor | None, theta: Tensor | None) -> Any:
    if theta is None:
        return weight
    return MatrixAndVelocity(weight, torch.zeros_like(weight) if velocity is None else velocity)
