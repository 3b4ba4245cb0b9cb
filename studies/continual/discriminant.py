"""A readout that is a memory: class means and one covariance, written by sums, read in closed form.

The memory keeps, over all rows r it was given with their classes c,

    n_c = count,   s_c = sum of r,   S = sum of r r^T,

and reads by linear discriminant analysis: with means `m_c = s_c / n_c` and the
covariance within classes `K = (S - sum_c n_c m_c m_c^T) / n`, shrunk towards a multiple of the
identity,

    score_c(r) = m_c^T K^-1 r - 1/2 m_c^T K^-1 m_c + prior log(n_c / n).

`prior = 0` takes all classes for equally likely, 1 for as likely as they were seen.

It is the least-squares memory of the retaining rule (`nestling.rules.retaining`) with a corrected
read: with W the ridge regression on one-hot targets and P its memory of inputs, `W_c = n_c P m_c`,
and by Woodbury's identity the read is a C x C map of W (`from_least_squares`). Least squares alone
favours large classes and masks those that lie between others; the corrected read does not. Sums do
not depend on the order of what was written, so nothing is forgotten while r stays the same.

Shapes: N rows, D width, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Discriminant", "from_least_squares"]

_PIECE = 256


class Discriminant:
    """The memory of the module's docstring; `shrink` is a share of the mean variance in K."""

    def __init__(self, classes: int, width: int, *, shrink: float, prior: float = 0.0) -> None:
        if not shrink > 0.0:
            raise ValueError(f"shrink must be above 0; got {shrink}")
        self.shrink, self.prior = shrink, prior
        self.counts = torch.zeros(classes, dtype=torch.float64)
        self.sums = torch.zeros(classes, width, dtype=torch.float64)
        self.squares = torch.zeros(width, width, dtype=torch.float64)
        self._waiting: list[Tensor] = []

    def write(self, r: Tensor, y: Tensor) -> None:
        """Add rows r [N, D] of classes y [N]."""
        self.sums.index_add_(0, y, r.double())
        self.counts.index_add_(0, y, torch.ones(len(y), dtype=torch.float64))
        self._waiting.append(r)
        if sum(map(len, self._waiting)) >= _PIECE:
            self._add_squares()

    def _add_squares(self) -> None:
        """Products of a piece in its own precision, their sum in float64."""
        if self._waiting:
            rows = torch.cat(self._waiting)
            self.squares += rows.mT @ rows
            self._waiting = []

    @property
    def means(self) -> Tensor:
        """[C, D]; zero for a class not seen."""
        return self.sums / self.counts.clamp(min=1).unsqueeze(1)

    def solve(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Weight [C, D] and bias [C] of the read; the bias of a class not seen is -inf.

        `dtype` is that of the solution; float32 is quicker and good enough to learn from.
        """
        self._add_squares()
        means, counts = self.means.to(dtype), self.counts.to(dtype)
        total = counts.sum().clamp(min=1)
        scatter = (means * counts.unsqueeze(1)).mT @ means
        within = (self.squares.to(dtype) - scatter) / total  # [D, D]
        size = within.diagonal().mean().clamp(min=1e-12)
        within.diagonal().add_(self.shrink * size)
        root, failed = torch.linalg.cholesky_ex(within)
        if failed and dtype != torch.float64:
            return self.solve()
        weight = torch.cholesky_solve(means.mT, root).mT  # [C, D]
        bias = -0.5 * (weight * means).sum(1)
        bias = bias + self.prior * (counts.clamp(min=1) / total).log()
        return weight.float(), bias.float().masked_fill(self.counts == 0, -torch.inf)

    def numel(self) -> int:
        """How many numbers it keeps."""
        return self.counts.numel() + self.sums.numel() + self.squares.numel()


def from_least_squares(weight: Tensor, means: Tensor, counts: Tensor) -> Tensor:
    """[C, D]: `(P^-1 - sum_c n_c m_c m_c^T)^-1 m_c` from the ridge regression `W_c = n_c P m_c`.

    By Woodbury's identity, with `Q = W m^T` (what the memory answers to the class means): the rows
    of `(I - Q^T)^-1 diag(1/n) W`.
    """
    answers = weight @ means.mT  # [C, C]
    eye = torch.eye(len(weight), dtype=weight.dtype)
    return torch.linalg.solve(eye - answers.mT, weight / counts.unsqueeze(1))
