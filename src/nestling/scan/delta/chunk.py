r"""The chunked scan: its derivation, and a form that autograd differentiates to any order.

Inside one chunk let `M_0`, `Z_0` be the memory and the velocity at its start, `a_t` retain,
`n_t` rate, `h_t` momentum, and

    G_ts = prod_{s < r <= t} a_r  (0 for s > t)      g_t = G_t0
    H_ts = prod_{s < r <= t} h_r                     z_t = sum_{1 <= s <= t} G_ts H_s0.

**Memory.** `M_t = a_t M_{t-1} + n_t e_t x_t^T + Z_t` with `e_t = -M_{t-1} x_t` (0 without `erase`)
and `Z_t = h_t Z_{t-1} + n_t u_t x_t^T`. Unrolled, with `P = G H`,

    M_t = g_t M_0 + z_t Z_0 + sum_{s <= t} (G_ts n_s e_s + P_ts n_s u_s) x_s^T
    Z_t = H_t0 Z_0 + sum_{s <= t} H_ts n_s u_s x_s^T.

**Errors.** With `K_ts = n_s x_t . x_s` and G^-, P^-, g^-, z^- the rows of t - 1, e_t of M_{t-1} is

    (I + G^- o K) E = -(diag(g^-) X M_0^T + diag(z^-) X Z_0^T + (P^- o K) U)        (o elementwise)

is unit lower triangular: one solve per chunk. The matrix does not depend on the memory, so all
chunks are solved at once; then walking from chunk to chunk costs a few matmuls each.
**Reads.** `y_t = g_t M_0 q_t + z_t Z_0 q_t + sum_s (q_t . x_s) n_s (G_ts e_s + P_ts u_s)`: matmuls,
with row t - 1 of g, z, G, P for the memory before t. The rate sits with the column s everywhere, so
nothing divides by it. Without momentum H = I, P = G, z = 0 and only `w = u + e` is needed:

    w = J (U - diag(g^-) X M_0^T),    J = (I + L)^{-1},    L = G^- o K
    M_C = g_C M_0 + sum_s G_Cs n_s w_s x_s^T.

G and H are built from products (doubling the block size), never by dividing or subtracting
logarithms: no ratio exceeds 1, and retain = 0 is as good as any other value.

**Backward, by hand** (`kernel.py`, plain rule). Let A = Gr o (Q (nX)^T) with Gr, gr the rows
of G, g that the reads use. Given dY and the adjoint dM_C of the chunk's end,

    dw = A^T dY + diag(G_C) (nX) dM_C^T           dR = J^T dw                     (dU = dR)
    dM_0 = g_C dM_C + dY^T diag(gr) Q - dR^T diag(g^-) X

walks the chunks backwards; `dL = -dR w^T` because `dJ = -J dL J`. The rest is parallel:

    dA = dY w^T          dK = G^- o dL     dS = Gr o dA               (S = Q (nX)^T)
    d(nX) = diag(G_C) w dM_C + dK^T X + dS^T Q
    dX = diag(n) d(nX) + dK (nX) - diag(g^-) dR M_0         dn_t = d(nX)_t . x_t
    dQ = dS (nX) + diag(gr) dY M_0
    dG = (K o dL on rows t - 1) + (S o dA on its rows) + (<(w dM_C)_s, n_s x_s> on row C)
    dg = -<dR M_0, X> on rows t - 1, <dY M_0, Q> on its rows, <dM_C, M_0> on C
    da_r = sum_{t >= r} G_tr (sum_{s < r} dG_ts G_{r-1,s} + dg_t g_{r-1}).

Saved: the inputs, M_0 of every chunk, and (unless `recompute`) w and J: O(T) and O(chunks).
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nestling.scan.checks import Read
from nestling.scan.delta.naive import run_naive
from nestling.scan.delta.types import MatrixAndVelocity, Options
from nestling.scan.numerics import compute_dtype


def products(gate: Tensor) -> Tensor:
    """`[..., C]` -> `[..., C, C]`: row t, column s holds `prod_{s < r <= t} gate_r`, 0 above.

    Doubles the block size, out of place: differentiable to any order, exact where a gate is 0.
    """
    chunk = gate.shape[-1]
    size = 1 << max(0, chunk - 1).bit_length()
    before = F.pad(gate, (0, size - chunk), value=1.0).unsqueeze(-1)  # [..., blocks, b]
    behind = torch.ones_like(before)
    table = behind.unsqueeze(-1)  # [..., blocks, b, b]
    while table.shape[-3] > 1:
        one, two = before[..., 0::2, :], before[..., 1::2, :]
        first, second = behind[..., 0::2, :], behind[..., 1::2, :]
        upper, lower = table[..., 0::2, :, :], table[..., 1::2, :, :]
        corner = two.unsqueeze(-1) * first.unsqueeze(-2)
        rows = torch.cat([F.pad(upper, (0, upper.shape[-1])), torch.cat([corner, lower], -1)], -2)
        before = torch.cat([one, two * one[..., -1:]], -1)
        behind = torch.cat([first * two[..., -1:], second], -1)
        table = rows
    return table[..., 0, :chunk, :chunk]


def scan_chunk_autograd(
    state: Any, x: Tensor, u: Tensor, rate: Tensor, retain: Tensor, queries: Tensor | None,
    **options: Unpack[Options],
) -> tuple[Tensor | None, Any]:  # fmt: skip
    """The chunked scan (Eq. 90) in ordinary torch operations, with or without momentum.

    `recompute` keeps only the inputs for the backward pass.
    """
    if options["recompute"] and torch.is_grad_enabled():
        options["recompute"] = False
        given = (state, x, u, rate, retain, queries)
        return checkpoint(scan_chunk_autograd, *given, use_reentrant=False, **options)
    if 0 in (*x.shape, *u.shape):
        return run_naive(state, x, u, rate, retain, queries, **options)
    chunk, momentum = options["chunk"], options["momentum"]
    whole = x.shape[-2] // chunk * chunk
    parts: list[Any] = []
    for start, stop in ((0, whole), (whole, x.shape[-2])):  # whole chunks, then a shorter one
        if stop > start:
            rows = [None if t is None else t[..., start:stop, :] for t in (x, u, queries)]
            gates = [None if t is None else t[..., start:stop] for t in (rate, retain, momentum)]
            size = min(chunk, stop - start)
            reads, state = _whole_chunks(
                state, rows, gates, erase=options["erase"], read=options["read"], chunk=size
            )
            parts.append(reads)
    return (None if queries is None else torch.cat(parts, -2)), state


def _whole_chunks(
    state: Any, rows: Any, gates: Any, *, erase: bool, read: Read, chunk: int
) -> tuple[Tensor | None, Any]:
    (x, u, queries), (rate, retain, momentum) = rows, gates
    weight, velocity = state if isinstance(state, MatrixAndVelocity) else (state, None)
    dtype = compute_dtype(weight, velocity, x, u, rate, retain, queries, momentum)

    def cut(tensor: Tensor, dim: int) -> Tensor:  # [..., T, (D)] -> [..., N, C, (D)]
        return tensor.to(dtype).unflatten(dim, (-1, chunk))

    X, U, eta = cut(x, -2), cut(u, -2), cut(rate, -1)
    G, g = running(cut(retain, -1))
    H = P = z = h = None
    if momentum is not None:
        H, h = running(cut(momentum, -1))
        P = G @ H[..., 1:, :]  # [..., N, C + 1, C]
        z = G @ h[..., 1:, :]
    own = G if P is None else P
    scaled = X * eta.unsqueeze(-1)
    weight, velocity = weight.to(dtype), None if velocity is None else velocity.to(dtype)
    solved = None
    if erase:
        gram = X @ scaled.mT  # [..., N, C, C]
        given = [g[..., :-1, :] * X, (own[..., :-1, :] * gram) @ U]
        if z is not None:
            given.append(z[..., :-1, :] * X)
        eye = torch.eye(chunk, dtype=dtype, device=x.device)
        lower = eye + G[..., :-1, :] * gram
        solved = torch.linalg.solve_triangular(
            lower, torch.cat(given, -1), upper=False, unitriangular=True
        ).split([part.shape[-1] for part in given], -1)
    E, starts, end = _walk(weight, velocity, (G, H, own), (g, h, z), scaled, U, solved)
    if queries is None:
        return None, end
    q = cut(queries, -2)
    rows = slice(1, None) if read == "after" else slice(None, -1)
    scores = q @ scaled.mT
    reads = (own[..., rows, :] * scores) @ U + (g[..., rows, :] * q) @ starts[0].mT
    if E is not None:
        reads = reads + (G[..., rows, :] * scores) @ E
    if z is not None:
        reads = reads + (z[..., rows, :] * q) @ starts[1].mT
    return reads.flatten(-3, -2).to(queries.dtype), end


def running(gate: Tensor) -> tuple[Tensor, Tensor]:
    """Rows t = 0..C of the products from s to t `[..., C + 1, C]` and from the start `[..., 1]`."""
    table = F.pad(products(gate), (0, 0, 1, 0))
    first = table[..., 1:, :1] * gate[..., :1, None]
    return table, F.pad(first, (0, 0, 1, 0), value=1.0)


def _walk(
    weight: Tensor, velocity: Tensor | None, tables: Any, starts: Any, scaled: Tensor, U: Tensor,
    solved: Any,
) -> tuple[Tensor | None, tuple[Tensor, Tensor], Any]:  # fmt: skip
    """From chunk to chunk: errors `[..., N, C, Do]`, start states `[..., N, Do, Di]`, end state."""
    (G, H, own), (g, h, z) = tables, starts
    last = scaled * G[..., -1, :].unsqueeze(-1)
    writes = (U * own[..., -1, :].unsqueeze(-1)).mT @ scaled  # [..., N, Do, Di]
    pushes = None if H is None else (U * H[..., -1, :].unsqueeze(-1)).mT @ scaled
    errors, weights, velocities = [], [], []
    for n in range(U.shape[-3]):
        weights.append(weight)
        after = g[..., n, -1:, :] * weight + writes[..., n, :, :]
        if solved is not None:
            e = -(solved[0][..., n, :, :] @ weight.mT + solved[1][..., n, :, :])
            if velocity is not None:
                e = e - solved[2][..., n, :, :] @ velocity.mT
            errors.append(e)
            after = after + e.mT @ last[..., n, :, :]
        if velocity is not None and pushes is not None:
            velocities.append(velocity)
            after = after + z[..., n, -1:, :] * velocity
            velocity = h[..., n, -1:, :] * velocity + pushes[..., n, :, :]
        weight = after
    E = torch.stack(errors, -3) if errors else None
    begin = torch.stack(weights, -3)
    moving = torch.stack(velocities, -3) if velocities else begin
    end = weight if velocity is None else MatrixAndVelocity(weight, velocity)
    return E, (begin, moving), end
