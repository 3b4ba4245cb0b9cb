"""Two small problems the paper argues with: a curved surface (Eq. 53), orthogonal tasks (Eq. 45).

Both are losses on plain tensors; they serve the examples, the tests and the optimizer benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SURFACE_START = (-3.5, 2.0)
"""Where the paper's Figure 4 starts, (r, theta)."""


def surface(point: Tensor, *, k: float = 4.0, a: float = 1.0, w: float = 2.0) -> Tensor:
    """`psi(r, theta) = r^2 + k (r - theta + a sin(w r))^2` of points [..., 2] (Eq. 53).

    A winding, steep-walled valley `theta = r + a sin(w r)` with a gentle floor r^2 and its only
    minimum, 0, at the origin. The paper gives no constants; these make the valley wind twice.
    """
    r, theta = point.unbind(-1)
    return r.square() + k * (r - theta + a * torch.sin(w * r)).square()


@dataclass(frozen=True, kw_only=True)
class OrthogonalTasks:
    """Regressions on inputs from orthogonal subspaces, learned one after another (Eq. 45).

    Task i draws x from its own `width` directions of an orthonormal basis and y = T x + noise, so
    `L_i = E |W x - y|^2` has gradients in directions no other task uses: whatever a rule forgets of
    earlier tasks, it forgets by itself, not because the tasks disagree.
    """

    tasks: int = 4
    width: int = 4
    outputs: int = 4
    noise: float = 0.1
    seed: int = 0

    @property
    def inputs(self) -> int:
        """The dimension of x: all subspaces together."""
        return self.tasks * self.width

    def truth(self) -> tuple[Tensor, Tensor]:
        """The basis [inputs, inputs], one block of columns per task, and T [outputs, inputs]."""
        generator = torch.Generator().manual_seed(self.seed)
        square = torch.randn(self.inputs, self.inputs, generator=generator)
        target = torch.randn(self.outputs, self.inputs, generator=generator)
        return torch.linalg.qr(square).Q, target

    def sample(self, task: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`rows` pairs of a task: x [rows, inputs] and y [rows, outputs]."""
        basis, target = self.truth()
        z = torch.randn(rows, self.width, generator=generator)
        x = z @ basis[:, task * self.width : (task + 1) * self.width].mT
        noise = self.noise * torch.randn(rows, self.outputs, generator=generator)
        return x, x @ target.mT + noise

    def loss(self, weight: Tensor, task: int) -> Tensor:
        """`L_i = E |W x - y|^2`, exactly, without the noise's own share (Eq. 45)."""
        basis, target = self.truth()
        block = basis[:, task * self.width : (task + 1) * self.width]
        return ((weight - target) @ block).square().sum()
