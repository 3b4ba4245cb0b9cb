"""Closed-form learners on frozen features: sums that no order changes, and how they are read.

A memory keeps, over all rows r it was given with their classes c,

    n_c = count,   s_c = sum of r,   S = C_0 + sum of r r^T,

the accumulated constraints of the retaining rule (`nestling.rules.retaining`): after any stream its
weight is the ridge regression on all of it. Reads differ: the nearest mean; the ridge regression
itself (RanPAC); or linear discriminant analysis, with means `m_c = s_c / n_c` and the covariance
within classes `K = (S - sum_c n_c m_c m_c^T) / n`, shrunk towards a multiple of the identity,

    score_c(r) = m_c^T K^-1 r - 1/2 m_c^T K^-1 m_c,

which is a C x C map of the ridge regression (`from_least_squares`). Sums do not depend on the order
of what was written, so nothing is forgotten while r stays the same.

Shapes: N rows, P places, D width of a place, W width of a row, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, relu

from nestling.checks import one_of

__all__ = ["Fourier", "Memory", "Rectified", "from_least_squares", "one_place", "unit"]

Map = Callable[[Tensor], Tensor]


def unit(x: Tensor, places: Sequence[int]) -> Tensor:
    """[N, P, D] -> [N, places, D]: some places, each vector centred over its width, of length 1."""
    some = x[:, list(places)].float()
    return normalize(some - some.mean(-1, keepdim=True), dim=-1)


def one_place(x: Tensor, place: int) -> Tensor:
    """[N, P, D] -> [N, D]: one of the places, as `unit` makes it."""
    return unit(x, (place,))[:, 0]


@dataclass(frozen=True, kw_only=True)
class Fourier:
    """Random Fourier features of places: `cos(x w + b)`, for the kernel exp(-gamma |x - y|^2).

    together: one kernel over all places (each adds its squared distance); else every place has a
    share of the width and a kernel of its own.
    """

    places: tuple[int, ...]
    width: int
    gamma: float
    seed: int
    together: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """[N, P, D] -> [N, W]."""
        x = unit(x, self.places)
        parts = [x.flatten(1)] if self.together else list(x.unbind(1))
        draw = torch.Generator().manual_seed(self.seed)
        rows = []
        for i, part in enumerate(parts):
            width = self.width * (i + 1) // len(parts) - self.width * i // len(parts)
            w = torch.randn(part.shape[1], width, generator=draw) * math.sqrt(2 * self.gamma)
            b = 2 * math.pi * torch.rand(width, generator=draw)
            rows.append((part @ w + b).cos() * math.sqrt(2 / self.width))
        return torch.cat(rows, 1)


@dataclass(frozen=True, kw_only=True)
class Rectified:
    """A random projection and a ReLU, as in RanPAC; several places stand side by side."""

    places: tuple[int, ...]
    width: int
    seed: int

    def __call__(self, x: Tensor) -> Tensor:
        """[N, P, D] -> [N, W]."""
        part = unit(x, self.places).flatten(1)
        draw = torch.Generator().manual_seed(self.seed)
        return relu(part @ torch.randn(part.shape[1], self.width, generator=draw))


class Memory:
    """The sums of the module's docstring; `read` is "mean", "ridge" or "lda".

    shrink: of the mean variance, added to the diagonal. start: C_0 [W, W], a covariance within
    classes that is worth `weight` rows, such as that of other data (`covariance`).
    even: a row counts `n^-even`, n the rows of its class that were learned with it; 0 counts rows,
    1 counts classes (the ridge regression of uneven classes favours the large ones).
    """

    joint = False

    def __init__(
        self,
        classes: int,
        rows: Map,
        *,
        read: str = "lda",
        shrink: float = 1e-3,
        start: Tensor | None = None,
        weight: float = 0.0,
        even: float = 0.0,
    ) -> None:
        one_of("read", read, ("mean", "ridge", "lda"))
        if not shrink > 0.0:
            raise ValueError(f"shrink must be above 0; got {shrink}")
        if not 0.0 <= even <= 1.0:
            raise ValueError(f"even must be in [0, 1]; got {even}")
        self.rows, self.read, self.shrink, self.even = rows, read, shrink, even
        self.counts = torch.zeros(classes, dtype=torch.float64)
        self.sums: Tensor | None = None  # [C, W]
        self.squares: Tensor | None = None  # [W, W]
        self.start, self.weight = start, weight
        self._solved: tuple[Tensor, Tensor] | None = None
        self._asked: tuple[Tensor, Tensor] | None = None  # the last texts scored, and their rows

    def learn(self, x: Tensor, y: Tensor) -> None:
        """Add examples [N, P, D] of classes y [N]."""
        self._solved = None
        r = self.rows(x)
        if self.sums is None:
            self.sums = torch.zeros(len(self.counts), r.shape[1], dtype=torch.float64)
            self.squares = torch.zeros(r.shape[1], r.shape[1], dtype=torch.float64)
        worth = torch.bincount(y, minlength=len(self.counts))[y].double() ** -self.even  # [N]
        self.counts.index_add_(0, y, worth)
        self.sums.index_add_(0, y, worth.unsqueeze(1) * r)
        if self.read != "mean":
            r = worth.sqrt().float().unsqueeze(1) * r
            for part in r.split(1024):  # products in float32, their sum in float64
                self.squares += part.mT @ part

    @property
    def means(self) -> Tensor:
        """[C, W]; zero for a class not seen."""
        return self.sums / self.counts.clamp(min=1).unsqueeze(1)

    def covariance(self) -> Tensor:
        """[W, W]: within classes, the start counted in."""
        means, total = self.means, float(self.counts.sum())
        within = self.squares - (means * self.counts.unsqueeze(1)).mT @ means
        if self.start is not None:
            within, total = within + self.weight * self.start, total + self.weight
        return within / max(total, 1.0)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Weight [C, W] and bias [C] of the read."""
        if self.sums is None:
            raise ValueError("the memory is empty; learn something before reading")
        means = self.means
        if self.read == "mean":
            centre = self.sums.sum(0) / self.counts.sum()
            weight = normalize(means - centre, dim=1)
            return weight, -weight @ centre
        if self.read == "ridge":
            gram = self.squares / self.counts.sum()
            weight = _solved(gram, self.shrink, self.sums / self.counts.sum())
            return weight, torch.zeros(len(weight), dtype=torch.float64)
        weight = _solved(self.covariance(), self.shrink, means)
        return weight, -0.5 * (weight * means).sum(1)

    def scores(self, x: Tensor) -> Tensor:
        """[N, P, D] -> [N, C]; -inf for a class not seen."""
        if self._solved is None:
            weight, bias = self.solve()
            self._solved = weight.float(), bias.float().masked_fill(self.counts == 0, -torch.inf)
        weight, bias = self._solved
        if self._asked is None or self._asked[0] is not x:
            self._asked = x, self.rows(x)
        return self._asked[1] @ weight.mT + bias

    def stored(self) -> int:
        """How many numbers it keeps."""
        kept = (self.counts, self.sums, None if self.read == "mean" else self.squares)
        return sum(each.numel() for each in kept if each is not None)


def _solved(spread: Tensor, shrink: float, targets: Tensor) -> Tensor:
    """[C, W]: `targets (spread + shrink * mean variance)^-1`."""
    spread = spread + shrink * spread.diagonal().mean() * torch.eye(len(spread), dtype=spread.dtype)
    return torch.cholesky_solve(targets.mT, torch.linalg.cholesky(spread)).mT


def from_least_squares(weight: Tensor, means: Tensor, counts: Tensor) -> Tensor:
    """[C, W]: `(P^-1 - sum_c n_c m_c m_c^T)^-1 m_c` from the ridge regression `W_c = n_c P m_c`.

    By Woodbury's identity, with `Q = W m^T` (what the memory answers to the class means): the rows
    of `(I - Q^T)^-1 diag(1/n) W`.
    """
    answers = weight @ means.mT  # [C, C]
    eye = torch.eye(len(weight), dtype=weight.dtype)
    return torch.linalg.solve(eye - answers.mT, weight / counts.unsqueeze(1))
