"""M3, multi-scale momentum Muon: Adam + Muon + a continuum of two momenta (Eq. 75, Algorithm 1).

    fast   M1 <- M1 + beta1 g                each step
    slow   M2 <- M2 + beta3 sum_chunk g      every `chunk` steps
           V  <- V + beta2 g^2               each step
           W  <- W - eta (NS(M1) + a NS(M2)) / (sqrt(V) + eps)

As printed nothing decays: V only grows, and the step depends on the gradient's scale (gradients /
1000 give steps x 1000). `multiscale_literal` is Algorithm 1 to the letter. `multiscale` is the form
to use (deviation 10): M1, M2 and V are decaying averages, and Adam's part is scale-free in one of
two ways, named by `second`:

- "gradient" (default): V averages g^2, and the update is divided by `sqrt(V)` relative to its mean;
- "update": V averages the square of the orthogonalised update, as in AdaMuon.

`floor` bounds the division: where gradients have always been tiny, the orthogonalised update is
not, so `sqrt(V) / mean` counts as at least about `floor`. In pilots (a small language model and a
small ViT, two seeds each) "gradient" was ahead of "update", and both ahead of Muon.

The update then gets a fixed root mean square, so that a rate means what it means for AdamW. Scaling
all gradients by a constant changes nothing.

A weight of fewer than two dimensions has nothing to orthogonalise and is stepped by Adam: M3
without Muon and without the slow level. Stacked vectors look like matrices, so a caller that stacks
parameters must choose `adam` for them itself.

NS(M2) changes only when M2 does: it is kept in the state, so a step costs one Newton-Schulz, one
more every `chunk` steps. The chunk's gradients are one running sum. The clock is `gates.step`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.checks import one_of
from nestling.levels import Level, due
from nestling.rules import size
from nestling.rules.adam import adam, mean_square
from nestling.rules.core import Gates, Rule, State, Write, factory
from nestling.rules.momentum import accumulate
from nestling.rules.newton_schulz import QUINTIC, Coefficients, newton_schulz

SECONDS = ("update", "gradient", "none")


class MultiScaleState(NamedTuple):
    """M3's memories, each of the weight's shape."""

    fast: Tensor  # M1
    slow: Tensor  # M2
    total: Tensor  # sum of the gradients since M2 last changed
    slow_out: Tensor  # NS(M2)
    second: Tensor  # V


@factory
def multiscale_literal(
    *,
    beta1: float = 0.95,
    beta2: float = 0.95,
    beta3: float = 0.9,
    slow_weight: float = 0.1,
    chunk: int = 100,
    steps: int = 5,
    coefficients: Coefficients = QUINTIC,
    precision: torch.dtype | None = None,
    eps: float = 1e-8,
) -> Rule:
    """Algorithm 1 as printed (Eq. 75): nothing decays, the step depends on the gradient's scale."""
    Level(name="M3 slow momentum", chunk=chunk)

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        grad = write.grad
        fast = state.fast + beta1 * grad
        second = state.second + beta2 * grad.square()
        out = newton_schulz(fast, steps, coefficients, precision) + slow_weight * state.slow_out
        slow, total, slow_out = state.slow, state.total + grad, state.slow_out
        if due(gates.step, chunk):
            slow, total = slow + beta3 * total, torch.zeros_like(total)
            slow_out = newton_schulz(slow, steps, coefficients, precision)
        new = MultiScaleState(fast, slow, total, slow_out, second)
        return write._replace(grad=out / (second.sqrt() + eps)), new

    return Rule(_init, step)


@factory
def multiscale(
    *,
    beta1: float = 0.95,
    beta2: float = 0.99,
    beta3: float = 0.8,
    slow_weight: float = 0.1,
    chunk: int = 16,
    second: str = "gradient",
    floor: float = 0.1,
    nesterov: bool = True,
    steps: int = 5,
    coefficients: Coefficients = QUINTIC,
    precision: torch.dtype | None = None,
    eps: float = 1e-8,
    rms: float = 0.2,
) -> Rule:
    """M3 with decaying averages and a step that does not depend on the gradient's scale (Eq. 75).

    See the module's docstring; `slow_weight` is Algorithm 1's alpha, `chunk` its f, `eps` that of
    Adam on vectors.
    """
    Level(name="M3 slow momentum", chunk=chunk)
    one_of("second", second, SECONDS)
    vectors = adam(beta1, beta2, eps=eps)

    def init(weight: Tensor) -> State:
        return _init(weight) if weight.ndim > 1 else vectors.init(weight)

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        if weight.ndim < 2:
            return vectors.step(write, state, weight, gates)
        grad = write.grad
        fast = accumulate(state.fast, grad, retain=beta1, rate=1.0 - beta1)
        ahead = torch.lerp(grad, fast, beta1) if nesterov else fast
        out = newton_schulz(ahead, steps, coefficients, precision)
        out = torch.add(out, state.slow_out, alpha=slow_weight, out=_place(out))
        slow, total, slow_out = state.slow, state.total + grad, state.slow_out
        if due(gates.step, chunk):
            slow = accumulate(slow, total, retain=beta3, rate=(1.0 - beta3) / chunk)
            total = torch.zeros_like(total)
            slow_out = newton_schulz(slow, steps, coefficients, precision)
        new_second = state.second
        if second != "none":
            source = out if second == "update" else grad
            new_second = mean_square(state.second, source, beta2)
            root = new_second.sqrt()  # its scale, bias correction too, goes with the fixed size
            mean = root.mean((-2, -1), keepdim=True).clamp(min=size.TINY)
            bounded = torch.add(root, floor * mean, out=_place(root))
            out = torch.div(out, bounded, out=_place(out))
        out = torch.mul(out, rms / size.rms(out), out=_place(out))
        return write._replace(grad=out), MultiScaleState(fast, slow, total, slow_out, new_second)

    return Rule(init, step)


def _place(made: Tensor) -> Tensor | None:
    """`made` itself where nobody looks at it any more: what follows needs no memory of its own."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    return None if torch._C._are_functorch_transforms_active() else made


def _init(weight: Tensor) -> MultiScaleState:
    return MultiScaleState(*(torch.zeros_like(weight) for _ in range(5)))
