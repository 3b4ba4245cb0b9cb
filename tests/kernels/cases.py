"""Self-modifying scans to compare kernels on, and how close they must come to the naive form."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from nestling.norm import unit
from nestling.scan.self_modifying.naive import self_modifying_naive
from nestling.scan.self_modifying.rule import Inputs, SelfRule, Weights

ALL = os.environ.get("NESTLING_KERNELS") == "all"
"""Whether every width and chunk is tried: NESTLING_KERNELS=all pytest tests/kernels"""

SHAPES = [(d, c) for d in (16, 32, 64, 128) for c in (16, 32, 64)]
CLOSE = 1e-5


def close(found: Tensor | None, expected: Tensor | None, name: str) -> None:
    """Within `CLOSE` of the largest value, or of 1 where all are smaller: sums that cancel."""
    if expected is None:
        assert found is None or not found.any(), name
        return
    assert found is not None, name
    error = (found.double() - expected.double()).abs().max()
    assert error <= CLOSE * expected.abs().max().clamp_min(1.0), f"{name}: off by {float(error)}"


def self_case(
    rule: SelfRule,
    tokens: int,
    d: int,
    *,
    batch: int = 1,
    residual: bool = True,
    adding: bool = False,
    counts: tuple[int, ...] | None = None,
    equal_keys: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Inputs, Weights, Weights]:
    """Random inputs; `counts`: real tokens of each item, behind which there is padding."""
    made = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(batch, *shape, generator=made)).to(dtype)

    first = draw(len(rule.names), d, d, scale=0.5 * d**-0.5)
    given = {
        name: 0.999 * unit(draw(tokens, d)) if residual or name not in rule.adaptive else None
        for name in ("k", "v", "q")
    }  # (shorter than what is clipped, when rounded too)
    x = unit(draw(tokens, d)) if residual else draw(tokens, d)
    if equal_keys:
        x = x[:, :1].expand_as(x).clone()
        given = {n: None if g is None else g[:, :1].expand_as(g).clone() for n, g in given.items()}
    valid = None
    if counts is not None:
        valid = torch.arange(tokens) < torch.tensor(counts)[:, None]
    inputs = Inputs(
        x,
        draw(2, d, scale=0.5),
        draw(2) + torch.tensor([0.0, 2.0]).to(dtype),
        **given,
        gates=draw(tokens, 2) if residual else None,
        erase=torch.linspace(0, 1, batch).to(dtype) if adding else None,
        valid=valid,
        initial=Weights(draw(len(rule.names), d, d, scale=d**-0.5)) if residual else None,
    )
    start = Weights(first + draw(*first.shape[1:], scale=0.1 * d**-0.5))
    return inputs, Weights(first), start


def outcome(
    scan: Any, rule: SelfRule, case: tuple[Inputs, Weights, Weights], position: int | Tensor
) -> dict[str, Tensor | None]:
    """Reads, both weights, and the gradients of a random function of them by name."""
    inputs, weights, start = case
    leaves = {n: getattr(inputs, n) for n in ("x", "readout", "bias", "k", "v", "q", "gates")}
    leaves |= {"first": weights.first, "start": start.first}
    leaves["initial"] = None if inputs.initial is None else inputs.initial.first
    leaves = {n: leaf.detach().requires_grad_() for n, leaf in leaves.items() if leaf is not None}
    inputs = inputs._replace(**{n: leaves[n] for n in Inputs._fields if n in leaves})
    if inputs.initial is not None:
        inputs = inputs._replace(initial=Weights(leaves["initial"]))
    y, after, begun = scan(
        rule, inputs, Weights(leaves["first"]), Weights(leaves["start"]), position
    )
    if inputs.valid is not None:
        y = y * inputs.valid.unsqueeze(-1)
    found = {"reads": y, "after": after.first, "begun": begun.first}
    made = torch.Generator().manual_seed(7)
    loss = sum((o * torch.randn(o.shape, generator=made).to(o)).sum() for o in found.values())
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)  # type: ignore[arg-type]
    return {n: o.detach() for n, o in found.items()} | {
        f"gradient of {n}": grad for n, grad in zip(leaves, grads, strict=True)
    }


def reference(
    rule: SelfRule, case: tuple[Inputs, Weights, Weights], position: int
) -> dict[str, Tensor | None]:
    """The naive form in float64."""
    inputs, weights, start = case
    wide: dict[str, Any] = {}
    for name, part in inputs._asdict().items():
        if isinstance(part, Weights):
            wide[name] = Weights(part.first.double())
        elif part is not None and part.is_floating_point():
            wide[name] = part.double()
    case = (
        inputs._replace(**wide),
        Weights(weights.first.double()),
        Weights(start.first.double()),
    )
    where = torch.full((inputs.x.shape[0],), position)
    return outcome(self_modifying_naive, rule, case, where)
