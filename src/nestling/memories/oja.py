"""Oja's rule as a memory (Eq. 66-67): `M_t = (alpha I - eta v v^T) M_{t-1} + eta v k^T`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.memories.linear import LinearConfig
from nestling.norm import unit
from nestling.scan import scan


@dataclass(frozen=True, kw_only=True)
class OjaConfig(LinearConfig):
    """Oja's rule: it erases on the side of the values; `erase` has no other setting here."""

    retain: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.erase:
            raise ValueError("Oja's rule without erasing is linear attention: use that one")

    def scan(
        self, weight: Tensor, k: Tensor, v: Tensor, q: Tensor, rate: Tensor, retain: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Oja's rule with normalised values."""
        return oja_scan(weight, k, unit(v), q, rate, retain, self.chunk)


def oja_scan(
    weight: Tensor, k: Tensor, v: Tensor, q: Tensor, rate: Tensor, retain: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Reads `M_t q_t` and the end state of gradient descent on `-2 <M k, v> + |M^T v|^2` (Eq. 66).

    Eq. 67 is the delta rule on the transposed memory with keys v and values k. So one scan gives
    what each token writes, `w_t = eta_t (k_t - M_{t-1}^T v_t)`, and a Hebbian one, `M_t =
    alpha_t M_{t-1} + v_t w_t^T`, reads it. Shapes: weight [..., D, D], gates [..., T].
    """
    seen, _ = scan(
        weight.mT, v, k, rate, retain, v, erase=True, read="before", chunk=chunk, check=False
    )
    w = rate.unsqueeze(-1) * (k - seen)
    return scan(
        weight, w, v, torch.ones_like(rate), retain, q, erase=False, chunk=chunk, check=False
    )
