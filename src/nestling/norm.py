"""Root-mean-square normalisation that is quick on CPU, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RMSNorm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension."""
    eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    wide = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
    if eager and wide and x.device.type == "cpu":
        return _RMSNorm.apply(x, weight, eps)
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """RMS norm through layer norm's fused backward.

    Torch has no fused backward of RMS norm on CPU. Layer norm's, given the mean 0 and our scale r,
    returns `r (g - mean(g) - xhat mean(g xhat))` with g the gradient times the weight; RMS norm
    does not subtract `mean(g)`, so it is added back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
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
