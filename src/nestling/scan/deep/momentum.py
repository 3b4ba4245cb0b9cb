"""Whole chunks of the two-layer scan whose writes have momentum, without erasing (Titans).

Within a chunk each layer is the matrix scan of `nestling.scan.delta.chunk` with e = 0. With its
tables G, H, P = G H and its vectors g, z, h of retain and momentum, and S, Z a layer's weight and
velocity where the chunk starts,

    S_t = g_t S + z_t Z + sum_{s <= t} P_ts rate_s u_s x_s^T
    Z_C = h_C Z + sum_s H_Cs rate_s u_s x_s^T.

So momentum only changes the tables, which do not depend on the weights: they are made for all
chunks at once, and so is all that is asked of the first layer's inputs. Autograd differentiates it,
to any order. `nestling.scan.deep.naive.by_matrix_scans` is the same out of two matrix scans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.scan.deep.naive import signals
from nestling.scan.delta.chunk import running


class Momentum(NamedTuple):
    """Both layers' weights and velocities: [N, D, H], [N, H, D] twice."""

    w1: Tensor
    w2: Tensor
    v1: Tensor
    v2: Tensor


def scan_momentum(
    start: Momentum, x: Tensor, v: Tensor, gates: Tensor, q: Tensor | None, *,
    after: bool, **how: Any,
) -> tuple[Tensor | None, Momentum]:  # fmt: skip
    """Reads [count, N, C, D] and the state after all chunks.

    x, v, q: [count, N, C, D]. gates: rate, retain and momentum, [count, N, C, 3]. how: as
    `signals` takes it.
    """
    rate, retain, theta = gates.unbind(-1)
    (G, g), (H, h) = running(retain), running(theta)  # [count, N, C + 1, C], [count, N, C + 1, 1]
    P, z = G @ H[..., 1:, :] * rate.unsqueeze(-2), G @ h[..., 1:, :]
    end = torch.cat([g[..., -1, :], z[..., -1, :], torch.zeros_like(h[..., -1, :])], -1)
    mix = torch.cat([end, h[..., -1, :]], -1).unflatten(-1, (2, 2)).unbind(0)  # [N, 2, 2]
    last = torch.stack([P[..., -1, :], H[..., -1, :] * rate], -1).unsqueeze(-1)  # [.., C, 2, 1]
    wide = _twice(x, last).mT.unbind(0)  # [N, 2 D, C]
    rows = slice(1, None) if after else slice(None, -1)
    table = P[..., rows, :]
    both = torch.cat([g[..., rows, :], z[..., rows, :]], -1).unsqueeze(-1)  # [count, N, C, 2, 1]
    asked: Sequence[Tensor] = ()
    seen: Sequence[Tensor] = ()
    if q is not None:
        asked, seen = _twice(q, both).unbind(0), (table * (q @ x.mT)).unbind(0)
    tables, boths, lasts, reads = table.unbind(0), both.unbind(0), last.unbind(0), []
    size = x.shape[-1]
    one = torch.cat([start.w1, start.v1], -2)  # weight and velocity of layer 1: [N, 2 D, H]
    two = torch.cat([start.w2, start.v2], -1).mT  # of layer 2, transposed
    for i, (x_i, v_i) in enumerate(zip(x.unbind(0), v.unbind(0), strict=True)):
        k, u1, u2 = signals(one[:, :size], two[:, :size].mT, x_i, v_i, **how)
        if q is not None:
            hidden = how["sigma"](torch.baddbmm(torch.bmm(seen[i], u2), asked[i], two))
            said = torch.bmm(hidden, one.mT).unflatten(-1, (2, size))
            said = (said * boths[i]).sum(-2)
            reads.append(torch.baddbmm(said, tables[i] * torch.bmm(hidden, k.mT), u1))
        one = _moved(one, mix[i], torch.bmm(_twice(u1, lasts[i]).mT, k))
        two = _moved(two, mix[i], torch.bmm(wide[i], u2))
    (w1, v1), (w2, v2) = one.chunk(2, -2), two.chunk(2, -2)
    return None if q is None else q + torch.stack(reads), Momentum(w1, w2.mT, v1, v2.mT)


def _twice(x: Tensor, scales: Tensor) -> Tensor:
    """Rows x [..., C, D] scaled by two numbers each [..., C, 2, 1], side by side: [..., C, 2 D]."""
    return (x.unsqueeze(-2) * scales).flatten(-2)


def _moved(pair: Tensor, mix: Tensor, new: Tensor) -> Tensor:
    """Weight and velocity [N, 2 D, H] after a chunk: mixed by [N, 2, 2], and its writes added."""
    count = pair.shape[0]
    return torch.baddbmm(new.view(count, 2, -1), mix, pair.reshape(count, 2, -1)).view_as(pair)
