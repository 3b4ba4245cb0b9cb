"""A function of trees of tensors whose activations are computed again in the backward pass.

Torch's own checkpointing cannot hold a function that takes gradients inside, as a segment does
whose levels learn: here the first run keeps its inputs only, and the backward pass runs it once
more, with a graph, and differentiates that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.tree import tree_leaves, tree_map


def again(function: Callable[[Any], Any], tree: Any, others: Sequence[Tensor]) -> Any:
    """`function(tree)`, a tree; gradients reach the tensors of `tree` and `others`.

    others: the leaves (parameters) the function reads besides its argument. It must give the same
    when called twice, and nobody may differentiate its gradient once more.
    """
    made: list[Any] = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        given = iter(leaves)
        made[:] = [function(tree_map(lambda _: next(given), tree))]
        return [leaf for _, leaf in tree_leaves(made[0])]

    inputs = [leaf for _, leaf in tree_leaves(tree)]
    outputs = iter(_Again.apply(flat, len(inputs), *inputs, *others))
    return tree_map(lambda _: next(outputs), made[0])


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().requires_grad_(each.requires_grad) for each in tensors]


class _Again(torch.autograd.Function):
    """See `again`; the first `count` tensors are the function's arguments."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., list[Tensor]], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.function, ctx.count = function, count
        ctx.save_for_backward(*tensors)
        with torch.enable_grad():
            found = function(*_leaves(tensors[:count]))
        outputs = tuple(each.detach() for each in found)
        fixed = [o for o, f in zip(outputs, found, strict=True) if not f.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        with torch.enable_grad():
            leaves = _leaves(tensors[: ctx.count])
            found = ctx.function(*leaves)
        inputs = [*leaves, *tensors[ctx.count :]]
        pairs = [
            (f, g) for f, g in zip(found, grads, strict=True) if f.requires_grad and g is not None
        ]
        wanted = [each for each in inputs if each.requires_grad]
        outputs, above = [f for f, _ in pairs], [g for _, g in pairs]
        slopes = iter(torch.autograd.grad(outputs, wanted, above, allow_unused=True))
        return (None, None, *(next(slopes) if each.requires_grad else None for each in inputs))
