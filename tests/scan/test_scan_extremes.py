"""No NaN, and the loop's result, where a careless kernel would overflow, underflow or divide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nestling.scan import scan
from tests.scan.scan_cases import DOUBLE, Case, case, worst

BOTH = pytest.mark.parametrize("erase", [True, False])


def changed(drawn: Case, **values: Tensor) -> Case:
    leaves = {k: v.detach().requires_grad_() for k, v in (drawn.tensors | values).items()}
    return Case(leaves, drawn.options)


def agrees(drawn: Case, tolerance: float = 1e-10) -> None:
    assert worst(drawn.gradients(backend="chunk"), drawn.gradients(backend="naive")) < tolerance


@BOTH
@pytest.mark.parametrize("momentum", [False, True])
def test_zero_keys_and_repeated_keys(erase: bool, momentum: bool) -> None:
    drawn = case((2,), 20, 4, 3, erase=erase, chunk=8, momentum=momentum)
    zero = torch.zeros_like(drawn.tensors["x"])
    agrees(changed(drawn, x=zero))
    agrees(changed(drawn, x=drawn.tensors["x"][:, :1].expand(2, 20, 4).clone()))


@BOTH
@pytest.mark.parametrize("value", [0.0, 1e-300, 1e-30, 1e-4, 1.0])
def test_constant_retain(erase: bool, value: float) -> None:
    drawn = case((2,), 40, 4, 3, erase=erase, chunk=16)
    agrees(changed(drawn, retain=torch.full_like(drawn.tensors["retain"], value)))


def test_retain_gradients_are_exact_in_float32_when_retain_is_tiny() -> None:
    """Dividing a difference of sums by retain would lose all digits here."""
    drawn = case((2,), 40, 4, 3, chunk=16)
    tiny = torch.where(torch.arange(40) % 3 == 0, 1e-6, 0.97).expand(2, 40).to(DOUBLE)
    drawn = changed(drawn, retain=tiny)
    expected = drawn.to(torch.float32).to(DOUBLE).gradients(backend="naive")
    assert worst(drawn.to(torch.float32).gradients(backend="chunk"), expected) < 1e-5


def test_forgetting_almost_all_for_4096_tokens() -> None:
    drawn = case((1,), 4096, 4, 4, dtype=torch.float32, chunk=64)
    low = torch.full((1, 4096), 1e-4)
    drawn = changed(drawn, retain=low)
    found = drawn.gradients(backend="chunk")
    expected = drawn.gradients(backend="chunk", chunk=5)
    assert worst(found, expected) < 1e-5
    assert worst(drawn.to(DOUBLE).gradients(backend="chunk"), expected) < 1e-5


@BOTH
@pytest.mark.parametrize("size", [1e-18, 1e-6, 1e6, 1e12])
def test_extreme_magnitudes(erase: bool, size: float) -> None:
    drawn = case((2,), 20, 4, 3, erase=erase, chunk=8)
    agrees(changed(drawn, u=drawn.tensors["u"] * size, state=drawn.tensors["state"] * size), 1e-9)
    small = {"x": drawn.tensors["x"] * size**0.5, "rate": drawn.tensors["rate"] / size}
    agrees(changed(drawn, **small), 1e-9)


def test_a_huge_rate_diverges_as_the_loop_does() -> None:
    """rate |x|^2 of about 30: the memory grows tenfold per token, equally in both."""
    drawn = case((2,), 16, 4, 3, chunk=8)
    agrees(changed(drawn, rate=drawn.tensors["rate"] * 20), 1e-8)


def test_contiguity_does_not_matter() -> None:
    """Heads split from a projection and expanded gates, as models pass them."""
    flat = torch.randn(2, 20, 3 * 4, dtype=DOUBLE)
    x = flat.unflatten(-1, (3, 4)).transpose(1, 2)
    rate = torch.full((), 0.5, dtype=DOUBLE).expand(2, 3, 20)
    state = torch.zeros(4, 4, dtype=DOUBLE).expand(2, 3, 4, 4)
    found = scan(state, x, x, rate, rate, x, chunk=8)
    for left, right in zip(found, scan(state, x, x, rate, rate, x, backend="naive"), strict=True):
        torch.testing.assert_close(left, right)
