"""Wrong input stops at once, with a message that names the argument and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nestling.scan import MatrixAndVelocity, scan, scan_naive
from tests.scan.scan_cases import case

GOOD = {k: v.detach() for k, v in case((2,), 6, 4, 3, dtype=torch.float32).tensors.items()}
NAN = float("nan")

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rate": -GOOD["rate"]}, ValueError, "rate must be at least 0; got values from -"),
    ({"rate": GOOD["rate"] * NAN}, ValueError, "rate must be at least 0; got values from nan"),
    ({"retain": GOOD["retain"] + 1}, ValueError, r"retain must be in \[0, 1\]"),
    ({"retain": GOOD["retain"] - 1}, ValueError, r"retain must be in \[0, 1\]"),
    ({"rate": 0.5}, TypeError, r"rate must be a tensor of shape \[..., T\]; got float"),
    ({"x": GOOD["x"].long()}, TypeError, "x must be a floating tensor.*int64"),
    ({"x": GOOD["x"][0]}, ValueError, r"state must have shape .* got \[2, 3, 4\]"),
    ({"x": GOOD["x"][0, 0]}, ValueError, "x must have at least 2 dimensions"),
    ({"u": GOOD["u"][:, :5]}, ValueError, r"u must have shape .*\[2, 6, 3\].*got \[2, 5, 3\]"),
    ({"u": GOOD["x"]}, ValueError, r"u must have shape \[..., T, Do\]"),
    ({"retain": GOOD["retain"][:1]}, ValueError, "retain must have shape.*nothing is broadcast"),
    ({"queries": GOOD["u"]}, ValueError, r"queries must have shape \[..., T, Di\]"),
    ({"state": GOOD["state"][:1]}, ValueError, "state must have shape"),
    ({"state": [1.0]}, TypeError, "state must be a tensor; got list"),
    ({"erase": "dgd"}, TypeError, r"erase must be True \(.*\) or False; got 'dgd'"),
    ({"read": "during"}, ValueError, "read must be one of after, before; got 'during'"),
    ({"chunk": 0}, ValueError, "chunk must be at least 1; got 0"),
    ({"chunk": 2.0}, TypeError, "chunk must be a whole number"),
    ({"momentum": GOOD["rate"]}, TypeError, "state must be a MatrixAndVelocity"),
    ({"state": MatrixAndVelocity(GOOD["state"], GOOD["state"])}, TypeError, "momentum None"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG)
@pytest.mark.parametrize("function", [scan, scan_naive])
def test_wrong_input(function: Any, wrong: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function(**(GOOD | wrong))


def test_wrong_momentum() -> None:
    state = MatrixAndVelocity(GOOD["state"], GOOD["state"])
    given = GOOD | {"state": state, "momentum": GOOD["rate"] + 1}
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\]"):
        scan(**given)
    with pytest.raises(ValueError, match=r"state.velocity must have shape"):
        scan(**(given | {"state": MatrixAndVelocity(GOOD["state"], GOOD["state"][:1])}))


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend must be one of auto, naive, chunk"):
        scan(**GOOD, backend="cuda")


def test_values_can_go_unchecked() -> None:
    given = GOOD | {"retain": GOOD["retain"] + 1}
    assert scan(**given, check=False)[1].isfinite().all()


@pytest.mark.parametrize("recompute", [False, True])
def test_compiles_as_one_graph(recompute: bool) -> None:
    """The kernel is one operator to torch.compile, backward included."""
    drawn = case((2,), 20, 4, 3, chunk=8, recompute=recompute)

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        reads, end = scan(*leaves, chunk=8, recompute=recompute)
        return reads.square().sum() + end.square().sum()

    leaves = [drawn.tensors[k] for k in ("state", "x", "u", "rate", "retain", "queries")]
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), expected)


def test_the_operator_is_well_formed() -> None:
    """Schema, fake implementation and autograd registration, by torch's own checker."""
    drawn = case((2,), 10, 4, 3)
    leaves = [drawn.tensors[k] for k in ("state", "x", "u", "rate", "retain", "queries")]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    like = {"dtype": leaves[0].dtype}
    own = [*leaves[:2], torch.randn(2, 10, 4, **like, requires_grad=True), *leaves[3:]]
    home, share = torch.randn(2, 3, 4, **like, requires_grad=True), torch.tensor([0.0, 1.0], **like)
    for given, erase in (
        ((*leaves, None, None), True),
        ((*leaves, None, None), False),
        ((*own, home, share), True),
    ):
        torch.library.opcheck(
            torch.ops.nestling.scan.default, (*given, erase, True, 4, False), test_utils=checks
        )
