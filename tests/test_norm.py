"""RMS norm with its borrowed backward equals torch's, to the second derivative."""

from __future__ import annotations

import pytest
import torch

from nestling.norm import RMSNorm, rms_norm


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
