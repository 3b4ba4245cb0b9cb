"""Random scans, and what it takes for two back ends to agree on one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.scan import MatrixAndVelocity, scan

DOUBLE = torch.float64


class Case(NamedTuple):
    """Arguments of one scan; tensors are leaves that require gradients."""

    tensors: dict[str, Tensor]
    options: dict[str, Any]

    def run(self, **changes: Any) -> tuple[Tensor | None, Any]:
        given = dict(self.tensors)
        state = given.pop("state")
        if "velocity" in given:
            state = MatrixAndVelocity(state, given.pop("velocity"))
        return scan(state, **given, **(self.options | changes))

    def gradients(self, *, seed: int = 7, **changes: Any) -> dict[str, Tensor]:
        """Outputs and the gradients of a random function of all outputs, by name."""
        reads, state = self.run(**changes)
        outputs = (
            {"end": state.weight, "moving": state.velocity}
            if isinstance(state, MatrixAndVelocity)
            else {"end": state}
        )
        if reads is not None:
            outputs["reads"] = reads
        made = torch.Generator().manual_seed(seed)
        loss = torch.zeros((), dtype=DOUBLE)
        for value in outputs.values():
            weight = torch.randn(value.shape, generator=made, dtype=DOUBLE)
            loss = loss + (value.double() * weight).sum()
        found = torch.autograd.grad(loss, list(self.tensors.values()), allow_unused=True)
        outputs = {name: value.detach() for name, value in outputs.items()}
        for (name, leaf), grad in zip(self.tensors.items(), found, strict=True):
            outputs["d" + name] = torch.zeros_like(leaf) if grad is None else grad
        return outputs

    def to(self, dtype: torch.dtype) -> Case:
        tensors = {k: v.detach().to(dtype).requires_grad_() for k, v in self.tensors.items()}
        return Case(tensors, self.options)


def case(
    lead: tuple[int, ...] = (2,),
    tokens: int = 13,
    inner: int = 5,
    outer: int = 3,
    *,
    dtype: torch.dtype = DOUBLE,
    seed: int = 0,
    queries: bool = True,
    momentum: bool = False,
    zeros: bool = False,
    **options: Any,
) -> Case:
    """Keys of norm about 1, rates up to 1.5, retain in (0, 1); `zeros`: some gates are 0 or 1."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=made, dtype=DOUBLE)

    def gate(highest: float) -> Tensor:
        value = torch.rand(*lead, tokens, generator=made, dtype=DOUBLE) * highest
        if zeros:
            kind = torch.randint(0, 4, (*lead, tokens), generator=made)
            value = value.masked_fill(kind == 0, 0.0).masked_fill(kind == 1, min(highest, 1.0))
        return value

    tensors = {"state": normal(outer, inner), "x": normal(tokens, inner) / inner**0.5}
    tensors |= {"u": normal(tokens, outer), "rate": gate(1.5), "retain": gate(1.0)}
    if queries:
        tensors["queries"] = normal(tokens, inner)
    if momentum:
        tensors |= {"momentum": gate(1.0), "velocity": normal(outer, inner)}
    leaves = {name: value.to(dtype).requires_grad_() for name, value in tensors.items()}
    return Case(leaves, options)


def worst(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, together: bool = False
) -> float:
    """Largest error over all outputs and gradients, each relative to its own largest entry.

    `together`: relative to the largest entry of all, for a lone number may cancel to almost 0.
    """
    assert found.keys() == expected.keys()
    errors = [0.0]
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        assert bool(value.isfinite().all()), f"{name} is not finite"
        group = expected.values() if together else [expected[name]]
        if value.numel():
            scale = max([float(v.abs().max()) for v in group if v.numel()], default=0.0)
            errors.append(
                float((value.double() - expected[name].double()).abs().max()) / max(scale, 1e-30)
            )
    return max(errors)
