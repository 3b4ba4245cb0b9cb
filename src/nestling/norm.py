"""Normalisation of the last dimension, to unit length or by its RMS, quick on CPUs too."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

EPS = 1e-6
"""Added to squares in norms."""

FEW = 8192
"""Numbers below which what counts is how many calls there are: torch's norm is one."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension."""
    if one_token(x) and x.dtype == weight.dtype:
        return rms_norm_of_one(x, weight, eps)
    few = x.numel() < FEW and not torch.is_grad_enabled()
    if few or not _by_hand(x) or x.dtype != weight.dtype:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return (
        _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _forward(x, weight, eps)[0]
    )


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(|x|^2 + eps)` along the last dimension: never longer than one, zero stays zero."""
    if _by_hand(x):
        return _Unit.apply(x, eps) if torch.is_grad_enabled() else _unit(x, eps)[0]
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def one_token(x: Tensor) -> bool:
    """Whether x [..., T, D] is one token that is only read on CPU: then an operation costs more
    than its work, and the functions ending in `of_one` take fewer, for other rounding."""
    if type(x) is not Tensor or torch.is_grad_enabled() or x.dim() < 2 or x.shape[-2] != 1:
        return False
    return _by_hand(x)


def rms_norm_of_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in four operations."""
    n = x.shape[-1]
    y = torch.addcmul(constant(0.0, x.dtype), x, weight, value=math.sqrt(n))
    return y.div_(_length(x).hypot_(constant(math.sqrt(n * eps), x.dtype)))


def over_length(x: Tensor, eps: Tensor) -> Tensor:
    """`x / sqrt(|x|^2 + eps^2)` along the last dimension: RMS norm but for channels' factors."""
    return x / _length(x).hypot_(eps)


@functools.cache
def constant(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor on CPU: an operation with a Python number makes one every time."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


def _length(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length


def _by_hand(x: Tensor) -> bool:
    """Torch has no fused kernels for these on CPU; compilers make better ones of plain code, and
    `torch.func` can look into plain code only."""
    wide = x.dtype in (torch.float32, torch.float64)
    plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return wide and x.device.type == "cpu" and not plain


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed input and its scale [..., 1], in fewer passes than torch's on CPU."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight), scale


class _RMSNorm(torch.autograd.Function):
    """RMS norm through layer norm's fused backward.

    Torch has no fused backward of RMS norm on CPU. Layer norm's, given the mean 0 and our scale r,
    returns `r (g - mean(g) - xhat mean(g xhat))` with g the gradient times the weight; RMS norm
    does not subtract `mean(g)`, so it is added back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates the gradient: plain operations
            return *_backward(grad, x, weight, ctx.eps), None
        grad = grad.contiguous()
        zero = torch.zeros_like(scale)
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, zero, scale, weight, None, [True, True, False]
        )
        back = (grad @ (weight / weight.numel())).unsqueeze(-1) * scale  # [..., 1]
        return dx.add_(back), dw, None


def _backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of RMS norm by plain operations."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed, inner = x * scale, grad * weight
    dx = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return dx, (grad * normed).flatten(0, -2).sum(0)


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The vectors, contiguous whatever the layout of `x`, and their scale [..., 1]."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()
    return torch.mul(x, scale, out=x.new_empty(x.shape)), scale


class _Unit(torch.autograd.Function):
    """`unit` in as few passes as there can be.

    The result is contiguous and the gradient laid out as the input is, so that heads taken out of
    a projection are copied neither on their way in nor back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        y, scale = _unit(x, eps)
        ctx.save_for_backward(x, scale)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # as above
            scale = torch.rsqrt(x.square().sum(-1, keepdim=True) + ctx.eps)
            return scale * grad - scale**3 * x * (x * grad).sum(-1, keepdim=True), None
        along = (x * grad).sum(-1, keepdim=True).mul_(scale).mul_(scale)
        dx = torch.addcmul(grad, x, along, value=-1, out=torch.empty_like(x))
        return dx.mul_(scale), None


class RMSNorm(nn.Module):
    """RMS norm with a learned scale per channel."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
