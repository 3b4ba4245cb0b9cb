"""RMS norm and unit length equal plain torch, to the second derivative."""

from __future__ import annotations

import pytest
import torch

from nestling.norm import (
    RMSNorm,
    constant,
    one_token,
    over_length,
    rms_norm,
    rms_norm_of_one,
    unit,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_gradients_equal_torch(dtype):
    x = torch.randn(3, 5, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(16, dtype=dtype, requires_grad=True)
    grad = torch.randn(5, 3, 16, dtype=dtype).transpose(0, 1)
    ours, theirs = rms_norm(x, weight, 1e-6), torch.rms_norm(x, (16,), weight, 1e-6)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(
        torch.autograd.grad(ours, (x, weight), grad),
        torch.autograd.grad(theirs, (x, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_gradients_of_gradients():
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: rms_norm(x, w, 1e-6), (x, weight))


def test_zero_stays_zero_and_other_dtypes_work():
    norm = RMSNorm(4)
    assert norm(torch.zeros(2, 4)).eq(0).all()
    assert norm.bfloat16()(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    x = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.isfinite().all()


def _plain(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_and_its_gradient_in_any_layout(dtype):
    x = torch.randn(2, 5, 3, 8, dtype=dtype).transpose(1, 2).requires_grad_()  # heads, taken out
    grad = torch.randn(3, 2, 5, 8, dtype=dtype).transpose(0, 1)
    ours, theirs = unit(x), _plain(x)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert torch.equal(unit(x), ours)
    one, other = (torch.autograd.grad(y, x, grad)[0] for y in (ours, theirs))
    torch.testing.assert_close(one, other)


def test_unit_to_the_second_derivative():
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(unit, (x,))
    assert torch.autograd.gradgradcheck(unit, (x,))


def test_unit_of_zero_is_zero_with_a_finite_gradient():
    x = torch.zeros(2, 4, requires_grad=True)
    unit(x).sum().backward()
    assert unit(x).eq(0).all()
    torch.testing.assert_close(x.grad, torch.full((2, 4), 1e3))
    half = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    assert unit(half).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_token_in_fewer_operations(dtype):
    x = torch.randn(2, 3, 1, 16, dtype=dtype)
    x[0, 0] = 0
    weight = torch.randn(16, dtype=dtype)
    torch.testing.assert_close(
        rms_norm_of_one(x, weight, 1e-2), torch.rms_norm(x, (16,), weight, 1e-2)
    )
    eps = torch.tensor(0.1, dtype=dtype)
    torch.testing.assert_close(over_length(x, eps), x * (x.square().sum(-1, True) + 0.01).rsqrt())


def test_what_one_token_is():
    x = torch.randn(2, 1, 4)
    assert not one_token(x)  # gradients may be wanted
    with torch.no_grad():
        assert one_token(x)
        others = (x.expand(2, 2, 4), x[0, 0], x.bfloat16(), x.to("meta"), torch.nn.Parameter(x))
        assert not any(map(one_token, others))
    with torch.inference_mode():
        made = constant(0.123, torch.float32)  # kept for calls that want gradients
    assert not made.is_inference()
