"""One chunk of several two-layer memories that share inputs and gates, by hand (Eq. 83-93).

The N memories of an item stand along the batch of `chunk`'s passes; all of them are written, the
first one is read. Tables of the gates and the first layer's products are made once per item.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestling.activations import silu
from nestling.scan.deep import chunk as two


def learn_chunk(
    w1: Tensor, w2: Tensor, k: Tensor, q: Tensor, targets: Tensor, rate: Tensor, retain: Tensor, *,
    squared: bool, erase: bool, clip: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Reads of the first memory before each token [b, C, D], and all weights after the chunk.

    w1 [b, N, D, H], w2 [b, N, H, D], k and q [b, C, D], targets [b, N, C, D], gates [b, C]. The
    chunk starts at these weights; the nonlinearity is silu, inputs of layer 1 are bounded.
    """
    how = two.Variant(squared, erase, clip, True, silu)
    return _Chunk.apply(how, w1, w2, k, q, targets, *two.tables(rate, retain))


def _spread(part: Tensor | None, many: int) -> Any:
    """[b, ...] -> [b N, ...]: the same for all memories of an item."""
    return None if part is None else part.repeat_interleave(many, 0)


Stacked = tuple[two.TwoLayers, two.Chunk, two.ChunkGates, two.FirstLayer]


def _stacks(
    w1: Tensor, w2: Tensor, k: Tensor, q: Tensor, targets: Tensor, gates: two.ChunkGates,
    layer: two.FirstLayer,
) -> tuple[Stacked, Stacked]:  # fmt: skip
    """The arguments of `chunk`'s passes: of all memories, to write; of the first one, to read."""
    many = w1.shape[1]
    everyone = (
        two.TwoLayers(w1.flatten(0, 1), w2.flatten(0, 1)),
        two.Chunk(_spread(k, many), targets.flatten(0, 1), None),
        two.ChunkGates(*(_spread(part, many) for part in gates)),
        two.FirstLayer(*(_spread(part, many) for part in layer)),
    )
    main = (two.TwoLayers(w1[:, 0], w2[:, 0]), two.Chunk(k, targets[:, 0], q), gates, layer)
    return everyone, main


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: two.Variant, w1: Tensor, w2: Tensor, k: Tensor, q: Tensor, targets: Tensor,
        g: Tensor, rated: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        n, gates = w1.shape[1], two.gates(g, rated, False)
        layer = two.first_layer(k, q, gates.Lb, how.erase)
        everyone, main = _stacks(w1, w2, k, q, targets, gates, layer)
        after, writing, hidden = two.write(*everyone, how=how)
        read = (writing.e1[::n], writing.e2[::n], hidden[::n])
        y, reading = two.read(*main, *read, how=how)
        ctx.how = how
        ctx.save_for_backward(w1, w2, k, q, targets, g, rated, *layer, hidden, *reading, *writing)
        return y, after.s1.view_as(w1), after.s2.view_as(w2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d1: Tensor, d2: Tensor) -> tuple[Tensor | None, ...]:
        w1, w2, k, q, targets, g, rated, *rest = ctx.saved_tensors
        layer, hidden, reading = two.FirstLayer(*rest[:3]), rest[3], two.SavedRead(*rest[4:8])
        writing, how, n = two.SavedWrite(*rest[8:]), ctx.how, w1.shape[1]
        everyone, main = _stacks(w1, w2, k, q, targets, two.gates(g, rated, False), layer)
        some, near = two.read_backward(
            dy, *main, reading, writing.e1[::n], writing.e2[::n], hidden[::n], how
        )

        def among(grad: Tensor) -> Tensor:
            """The first memory's gradient among all memories'."""
            room = grad.new_zeros(grad.shape[0] * n, *grad.shape[1:])
            room[::n] = grad
            return room

        def total(grad: Tensor) -> Tensor:
            return grad.unflatten(0, (-1, n)).sum(1)

        add = two.Adjoint(
            two.TwoLayers(*(among(part) for part in near.weights)),
            among(near.k),
            among(near.e1),
            among(near.e2),
            among(near.x),
        )
        ends = two.TwoLayers(d1.flatten(0, 1), d2.flatten(0, 1))
        more = two.write_backward(ends, add, *everyone, writing, hidden, how)
        dg, drated = torch.zeros_like(g), torch.zeros_like(rated)
        into = two.gates(dg, drated, False)
        into.Rb.add_(some.Rb)
        into.r.add_(some.r)
        into.cb.add_(total(more.cb))
        into.gC.add_(total(more.gC))
        if more.Lb is not None and more.gp is not None:
            into.Lb.add_(total(more.Lb))
            into.gp.add_(total(more.gp))
        dw1, dw2 = more.weights.s1.view_as(w1), more.weights.s2.view_as(w2)
        return None, dw1, dw2, total(more.x), some.q, more.v.view_as(targets), dg, drated
