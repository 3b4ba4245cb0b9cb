"""One token of a steered memory in few operations: its weights are put together beforehand.

While a model writes, an operation costs more than its work, and a token of a small layer is little
else than operations. What is linear in a row is therefore one product: all projections, the small
memory's own within those that feed it (`project @ inward`), the norms' weights within the products
that read what they norm. The rest is `nestling.memories.steered`, for other rounding.

Shapes: B sequences, D width, H heads of d channels; the small memory's n heads of s channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import silu, softshrink

from nestling.memories.core import advance
from nestling.norm import EPS, over_length
from nestling.scan.self_modifying.rule import RETAIN_MIN, SelfRule

if TYPE_CHECKING:
    from nestling.memories.steered import Steered, SteeredState


class SteeredToken:
    """`Steered.run` of one token a sequence, as `nestling.memories.core.TokenReader` says."""

    def __init__(self, memory: Steered) -> None:
        config, shell, small = memory.config, memory.shell, memory.small
        width, heads = config.width, config.heads
        size, project = width // heads, shell.project.weight.detach()
        k, v, q, *gate = project.split(width)
        self.parts = 3 * width  # of key, query and value, head by head
        self.ends = [self.parts, self.parts + 2 * heads]
        self.shape, self.erase = (-1, 3, size), config.erase
        self.taps = None if shell.conv is None else shell.conv.weight.detach()
        self.scaled = _Scaled(config.clip, project)
        self.gates = _Gates(memory.rule, heads, project)
        rows = [_by_head([k, q, v], heads), self.gates.rows(memory.gates.weight), *gate]
        bias = [project.new_zeros(self.parts), self.gates.rows(memory.gates.bias)]
        bias += [project.new_zeros(width) for _ in gate]
        self.gate = slice(self.ends[1], self.ends[1] + width) if gate else None
        self.small = None
        if small is not None:
            self.small = _SmallToken(memory, sum(map(len, rows)))
            rows.append(self.small.rows)
            bias.append(self.small.bias)
        self.inward, self.bias = torch.cat(rows).mT, torch.cat(bias)  # [D, R], [R]
        self.eps = project.new_tensor(math.sqrt(size * EPS))
        self.outward = _scaled_columns(shell.out.weight, shell.norm, math.sqrt(size)).mT

    def __call__(self, x: Tensor, onto: Tensor, state: SteeredState) -> tuple[Tensor, SteeredState]:
        """See `nestling.memories.core.TokenReader`."""
        position = advance(state.position, x.unsqueeze(1), None)
        tail, learned, said = state.tail, state.small, None
        if self.taps is not None:
            longer = torch.cat([tail, x.unsqueeze(1)], 1)
            x, tail = (longer * self.taps).sum(1), longer[:, 1:]
        row = torch.addmm(self.bias, x, self.inward)  # [B, R]
        if self.small is not None and learned is not None:
            said, learned = self.small.read_and_write(row, learned)
            if self.small.outward is not None:
                first = said[:, : self.small.size]
                row[:, : self.ends[1]].addmm_(first, self.small.outward)
        both, v = self.scaled(row[:, : self.parts].view(len(row), *self.shape))
        rate, retain = self.gates(row[:, self.ends[0] : self.ends[1]])
        memory = state.weight.view(-1, *state.weight.shape[2:])  # [B H, d, d]
        found, y = torch.bmm(both, memory.mT).split_with_sizes([1, 1], 1)
        write = (v - found if self.erase else v) * rate
        x = both.narrow(1, 0, 1)
        weight = torch.addcmul(memory * retain, write.mT, x, value=self.gates.scale)
        y = over_length(y, self.eps).view(len(row), -1)
        if self.gate is not None:
            y = y * silu(row[:, self.gate])
        out = torch.addmm(onto, y, self.outward)
        if self.small is not None and said is not None:
            out.addmm_(said, self.small.beside)
        return out, type(state)(position, tail, weight.view_as(state.weight), learned)


class _SmallToken:
    """The small memory's part: where its rows stand, and what its reads go into."""

    def __init__(self, memory: Steered, start: int) -> None:
        config, small = memory.config, memory.small
        if small is None:
            raise ValueError("the memory has no small one")
        many, self.size = len(config.pace), config.steering
        each = small.inward.weight.detach().unflatten(0, (many, -1)).double()  # [n, s + 2, D]
        bias = small.inward.bias.detach().unflatten(0, (many, -1)).double().unsqueeze(-1)
        project = small.project.detach().double()  # [n, 3 s, s], to k, v, q
        like = small.project.detach()
        self.gates = _Gates(small.rule, many, like)
        self.scaled = _Scaled(config.clip, like)
        self.rows, self.bias = (self._rows(project, given).to(like.dtype) for given in (each, bias))
        self.bias = self.bias.flatten()
        ends = start + 3 * many * self.size
        self.parts, self.raw = slice(start, ends), slice(ends, ends + 2 * many)
        self.shape = (-1, 3, self.size)
        scale = math.sqrt(self.size)
        self.beside = _scaled_columns(small.beside.weight, small.norm, scale).mT
        self.eps = like.new_tensor(math.sqrt(self.size * EPS))
        self.outward = None
        if small.outward is not None:
            given = _scaled_columns(small.outward.weight, small.norm, scale)
            self.outward = self._added(memory, given.unflatten(0, (config.heads, -1))).mT

    def read_and_write(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The reads [B, n s], normalised but for the norm's weight, and the memory afterwards."""
        both, v = self.scaled(row[:, self.parts].view(len(row), *self.shape))
        rate, retain = self.gates(row[:, self.raw])
        memory = state.view(-1, *state.shape[2:])  # [B n, s, s]
        x, q = both.split_with_sizes([1, 1], 1)
        y = torch.bmm(q, memory.mT)
        write = (v * rate).mT
        after = torch.addcmul(memory * retain, write, x, value=self.gates.scale)
        return over_length(y, self.eps).view(len(row), -1), after.view_as(state)

    def _rows(self, project: Tensor, given: Tensor) -> Tensor:
        """Rows of k, q, v of each head, then of its gates: from `inward`'s [n, s + 2, .]."""
        inner, gates = given.split([self.size, 2], 1)
        k, v, q = (project @ inner).split(self.size, 1)
        vectors = torch.stack([k, q, v], 1).flatten(0, 2)
        return torch.cat([vectors, self.gates.rows(gates.flatten(0, 1))])

    def _added(self, memory: Steered, given: Tensor) -> Tensor:
        """What reads add to the main memory's rows, [3 D + 2 H, s], from [H, sizes, s]."""
        small, heads = memory.small, memory.config.heads
        sizes = {} if small is None else small.sizes
        parts = dict(zip(sizes, given.split(list(sizes.values()), 1), strict=True))
        none = given.new_zeros(heads, memory.width // heads, self.size)
        vectors = [parts.get(name, none).flatten(0, 1) for name in ("k", "q", "v")]
        gates = parts.get("gates")
        if gates is None:
            none = given.new_zeros(heads, 1, self.size)
            gates = torch.cat([parts.get(name, none) for name in ("eta", "alpha")], 1)
        main = _Gates(memory.rule, heads, given)
        return torch.cat([_by_head(vectors, heads), main.rows(gates.flatten(0, 1))])


class _Scaled:
    """Keys and queries of unit length, values of length `most` at most, in five operations.

    `x c / max(hypot(|x|, e), m)` is `unit(x)` for (c, e, m) = (1, sqrt(EPS), 0) and
    `clip(x, most)` for (most, 0, most).
    """

    def __init__(self, most: float, like: Tensor) -> None:
        eps = math.sqrt(EPS)
        self.small = like.new_tensor([[eps], [eps], [0.0]])
        self.least = like.new_tensor([[0.0], [0.0], [most]])
        self.length = like.new_tensor([[1.0], [1.0], [most]])

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Key and query [b, 2, d] and value [b, 1, d], from [B, H, 3, d]."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.small)
        scaled = x * (self.length / length.clamp_min_(self.least))
        return scaled.view(-1, *x.shape[2:]).split_with_sizes([2, 1], 1)


class _Gates:
    """`SelfRule.rate_and_retain` of rows that stand as `rows` puts them, in fewer operations.

    What a tied retention loses is `1 - sigmoid(z) = sigmoid(-z)`, so its rows are negative. The
    rate comes without its constant `scale`, which belongs to the write.
    """

    def __init__(self, rule: SelfRule, heads: int, like: Tensor) -> None:
        self.heads, self.tied, self.shut = heads, rule.tied, rule.shut
        opened, span = 1 / (1 - rule.shut), rule.retain_max - RETAIN_MIN
        self.scale = rule.rate_max * opened
        self.span = span * opened if rule.tied else span
        least = (1 - rule.retain_max) * opened if rule.tied else RETAIN_MIN
        self.least, self.one = like.new_tensor(least), like.new_tensor(1.0)

    def rows(self, given: Tensor) -> Tensor:
        """Rows of eta and alpha by turns -> all of eta, then all of alpha."""
        eta, alpha = given.detach().unflatten(0, (self.heads, 2)).unbind(1)
        return torch.cat([eta, -alpha if self.tied else alpha])

    def __call__(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Rate over `scale`, and retention, [b, 1, 1] each, from read-outs [B, 2 H]."""
        write, keep = torch.sigmoid(raw).split_with_sizes([self.heads, self.heads], -1)
        if self.shut:
            write = softshrink(write, self.shut)  # for numbers above 0 it is relu(write - shut)
        retain = torch.add(self.least, keep, alpha=self.span)
        if self.tied:
            retain = torch.addcmul(self.one, write, retain, value=-1)
        return (retain * write).view(-1, 1, 1), retain.view(-1, 1, 1)


def _by_head(parts: Sequence[Tensor], heads: int) -> Tensor:
    """Rows of several projections [H d, .] -> rows head by head [H parts d, .]."""
    return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 2)


def _scaled_columns(weight: Tensor, norm: Tensor, scale: float) -> Tensor:
    """A product's weight that takes over the weight of the norm before it, repeated over heads."""
    factor = norm.detach().double().repeat(weight.shape[1] // len(norm)) * scale
    return (weight.detach() * factor).to(weight.dtype)
