"""A differentiable function as one node of a compiled model's graph.

torch.compile would unroll the loops of a scan, or break the graph where it cannot. Wrapped here, a
function of tensors runs eagerly inside one operator; its backward pass runs the function again and
asks autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Sequence[Any], Sequence[Tensor | None]], Sequence[Tensor]]
"""Plain values and tensors in, tensors out."""


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Autograd inside an operator, where torch has switched it off for this thread."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def opaque(
    name: str, plain: Sequence[str], tensors: Sequence[str], function: Function, fake: Function
) -> Callable[..., list[Tensor]]:
    """The operator `nestling::name` of plain values (`"int position"`) and optional tensors.

    It returns what `function(plain, tensors)` returns; `fake` makes empty tensors like these.
    Gradients reach every tensor that requires them, once.
    """
    many = len(plain)
    signature = ", ".join([*plain, *(f"Tensor? {tensor}" for tensor in tensors)])

    @torch.library.custom_op(
        f"nestling::{name}", mutates_args=(), schema=f"({signature}) -> Tensor[]"
    )
    def forward(*arguments: Any) -> list[Tensor]:
        with torch.no_grad():
            return _apart(function(arguments[:many], arguments[many:]), arguments[many:])

    @torch.library.custom_op(
        f"nestling::{name}_backward",
        mutates_args=(),
        schema=f"({signature}, Tensor[] grads) -> Tensor[]",
    )
    def backward(*arguments: Any) -> list[Tensor]:
        values, given, grads = arguments[:many], arguments[many:-1], arguments[-1]
        with _autograd():
            leaves = [_leaf(part) for part in given]
            made = function(values, leaves)
            pairs = [(m, g) for m, g in zip(made, grads, strict=True) if m.requires_grad]
            wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            found = torch.autograd.grad(
                [m for m, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )
        by = iter(found)
        some = [next(by) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
        return [_whole(grad, part, grads[0]) for grad, part in zip(some, given, strict=True)]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.plain = inputs[:many]
        ctx.save_for_backward(*inputs[many:])
        ctx.shapes = [(part.shape, part.dtype) for part in output]

    def through(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
        given = ctx.saved_tensors
        like = next(part for part in given if part is not None)
        full = [
            like.new_zeros(shape, dtype=dtype) if grad is None else grad
            for grad, (shape, dtype) in zip(grads, ctx.shapes, strict=True)
        ]
        found = backward(*ctx.plain, *given, full)
        needed = only_needed(found, ctx.needs_input_grad[many:])
        return (*(None for _ in range(many)), *needed)

    forward.register_fake(lambda *arguments: list(fake(arguments[:many], arguments[many:])))
    backward.register_fake(
        lambda *arguments: [_whole(None, part, arguments[-1][0]) for part in arguments[many:-1]]
    )
    differentiate_once(
        forward, backward, setup, through,
        f"nestling::{name} is differentiable once when compiled; second derivatives need an"
        " eager model inside nestling.scan.any_order()",
    )  # fmt: skip
    return forward


def differentiate_once(
    forward: Any, backward: Any, setup: Callable, through: Callable, refusal: str
) -> None:
    """Give an operator its gradient: `through` calls `backward`, an operator that has none.

    Whoever differentiates a second time gets a NotImplementedError that says `refusal`.
    """

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(refusal)

    forward.register_autograd(through, setup_context=setup)
    backward.register_autograd(refuse)


def only_needed(grads: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the inputs that need one; None for the others."""
    return [grad if need else None for grad, need in zip(grads, needed, strict=True)]


def _apart(made: Sequence[Tensor], given: Sequence[Tensor | None]) -> list[Tensor]:
    """Copies of what shares memory with an input or another output: operators may not."""
    taken = {part.untyped_storage().data_ptr() for part in given if part is not None}
    result = []
    for part in made:
        part = part.clone() if part.untyped_storage().data_ptr() in taken else part
        taken.add(part.untyped_storage().data_ptr())
        result.append(part)
    return result


def _leaf(part: Tensor | None) -> Tensor | None:
    if part is None or not part.is_floating_point():
        return part
    return part.detach().requires_grad_()


def _whole(grad: Tensor | None, part: Tensor | None, like: Tensor) -> Tensor:
    """A gradient, zeros where there is none, nothing where none can be."""
    if part is None or not part.is_floating_point():
        return like.new_empty(0)
    return torch.zeros_like(part) if grad is None else grad.contiguous()
