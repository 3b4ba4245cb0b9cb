"""One token of a steered memory in few operations: its weights are put together beforehand.

While a model writes, an operation costs more than its work, and a token of a small layer is little
else than operations. What is linear in a row is therefore one product: all projections, the small
memory's own within those that feed it (`project @ inward`), the norms' weights within the products
that read what they norm. Results that nobody keeps have places of their own (`core.Room`), and so
have their views. The rest is `nestling.memories.steered`, for other rounding.

Shapes: B sequences, D width, H heads of d channels; the small memory's n heads of s channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import silu, softshrink

from nestling.memories.core import Room, advance
from nestling.norm import EPS
from nestling.scan.self_modifying.rule import RETAIN_MIN, SelfRule

if TYPE_CHECKING:
    from nestling.memories.steered import Small, Steered, SteeredState


class SteeredToken:
    """`Steered.run` of one token a sequence, as `nestling.memories.core.TokenReader` says."""

    def __init__(self, memory: Steered) -> None:
        config, shell, small = memory.config, memory.shell, memory.small
        width, heads, self.erase = config.width, config.heads, config.erase
        project = shell.project.weight.detach()
        k, v, q, *gate = project.split(width)
        self.taps = None if shell.conv is None else shell.conv.weight.detach()
        self.main = _Vectors(heads, width // heads, config.clip, project)
        self.small = None if small is None else _SmallToken(memory)
        self.like, self.scale = project, _Gates.scale(memory.rule) * config.clip
        gates = [(memory.gates.weight.detach(), memory.gates.bias.detach())]
        if small is not None:
            gates.append(_own_gates(small))
        weights, biases = zip(*gates, strict=True)
        self.gates = _Gates(memory.rule, [len(each) // 2 for each in biases], project)
        rows = [self.main.rows(k, q, v), self.gates.rows(weights), *gate]
        bias = [project.new_zeros(3 * width), self.gates.rows(biases)]
        bias += [project.new_zeros(width) for _ in gate]
        self.ends = [sum(map(len, rows[:count])) for count in (1, 2, len(rows))]
        outward = [_scaled_columns(shell.out.weight, shell.norm, math.sqrt(width // heads))]
        if self.small is not None:
            rows.append(self.small.inward)
            bias.append(self.small.bias)
            outward.append(self.small.beside)
        self.inward, self.bias = torch.cat(rows).mT.contiguous(), torch.cat(bias)  # [D, R], [R]
        self.outward = torch.cat(outward, 1).mT.contiguous()  # [D + n s, D]
        self.gated = bool(gate)
        self.room = Room(lambda batch: _Places(self, batch), project.device)

    def __call__(self, x: Tensor, onto: Tensor, state: SteeredState) -> tuple[Tensor, SteeredState]:
        """See `nestling.memories.core.TokenReader`."""
        position = advance(state.position, x, None)
        tail, learned, at = state.tail, state.small, self.room.of(len(x))
        if self.taps is not None:
            longer = torch.cat([tail, x], 1)
            x, tail = (longer * self.taps).sum(1), longer[:, 1:]
        else:
            x = x.squeeze(1)
        torch.addmm(self.bias, x, self.inward, out=at.row)
        memory, small = state.weight, self.small
        if small is not None and learned is not None:
            small.vectors.take(at.small)
            torch.bmm(learned.view(-1, small.size, small.size), at.small.asked, out=at.small.read)
            _over_length(at.small, small.eps, at.beside)
            if small.outward is not None:
                at.moved.addmm_(at.first, small.outward)
        self.main.take(at.main)
        self.gates(at)
        v, found = at.main.v, at.main.found
        torch.bmm(memory.view(-1, *memory.shape[2:]), at.main.asked, out=at.main.read)
        if self.erase:
            v.sub_(found, alpha=self.main.per_value)
        weight = (memory * at.retain).addcmul_(v.mul_(at.rate), at.main.k, value=self.scale)
        if small is not None and learned is not None:
            write = at.small.v.mul_(at.small_rate)
            learned = (learned * at.small_retain).addcmul_(write, at.small.k, value=small.scale)
        _over_length(at.main, self.main.eps, at.heads)
        if self.gated:
            at.y.mul_(silu(at.gate, inplace=True))
        onto.addmm_(at.said, self.outward)
        return onto, type(state)(position, tail, weight, learned)


class _Places:
    """Where the results of a token stand: a row of all projections, and what is made of it."""

    def __init__(self, reader: SteeredToken, batch: int) -> None:
        small, main, like = reader.small, reader.main, reader.like
        width = main.heads * main.size
        self.row = like.new_empty(batch, len(reader.bias))
        vectors, gates, gated = reader.ends
        self.moved, self.raw = self.row[:, :gates], self.row[:, vectors:gates]
        self.gate = self.row[:, gates:gated]
        self.main = _Parts(main, self.row[:, :vectors])
        many = [main.heads, *([] if small is None else [small.vectors.heads])]
        self.opened = like.new_empty(batch, 2 * sum(many))
        self.write, self.keep = self.opened.split(sum(many), 1)
        rate, retain = like.new_empty(2, batch, sum(many), 1, 1).unbind()
        self.every_rate, self.every_retain = rate[..., 0, 0], retain[..., 0, 0]
        self.rate, *small_rate = rate.split(many, 1)
        self.retain, *small_retain = retain.split(many, 1)
        self.said = like.new_empty(batch, len(reader.outward))
        self.y, beside = self.said.split([width, len(reader.outward) - width], 1)
        self.heads = self.y.unflatten(1, (main.heads, main.size))
        if small is not None:
            self.small = _Parts(small.vectors, self.row[:, gated:])
            self.beside = beside.unflatten(1, (small.vectors.heads, small.size))
            self.first = beside[:, : small.size]
            (self.small_rate,), (self.small_retain,) = small_rate, small_retain


class _Parts:
    """Keys, queries and values of a memory's heads, and what it answers."""

    def __init__(self, vectors: _Vectors, row: Tensor) -> None:
        batch, heads, size = len(row), vectors.heads, vectors.size
        self.given = row.unflatten(1, (heads, 3, size))
        self.length = row.new_empty(batch, heads, 3, 1)
        self.scaled = row.new_empty(batch, heads, 3, size)
        self.k, self.v = self.scaled[:, :, :1], self.scaled[:, :, 2:].mT  # [B, H, 1, d], [.. d, 1]
        self.asked = self.scaled.view(-1, 3, size)[:, :2].mT  # [B H, d, 2]
        self.read = row.new_empty(batch * heads, size, 2)
        found, y = self.read.view(batch, heads, size, 2).split(1, -1)
        self.found, self.y = found, y[..., 0]
        self.long = row.new_empty(batch, heads, 1)


class _Vectors:
    """Keys and queries of unit length, values of length `most` at most, and then over `most`.

    `x / max(hypot(|x|, e), m)` is `unit(x)` for (e, m) = (sqrt(EPS), 0), and `clip(most x, most)`
    over `most` for (0, 1): the rows of values are over `most`, what is written is times it.
    """

    def __init__(self, heads: int, size: int, most: float, like: Tensor) -> None:
        self.heads, self.size, self.most = heads, size, most
        self.per_value = 1 / most
        unit, none = like.new_full((2, 1), math.sqrt(EPS)), like.new_zeros(1, 1)
        self.small = torch.cat([unit, none])
        self.least = torch.cat([like.new_zeros(2, 1), like.new_ones(1, 1)])
        self.eps = like.new_full((), math.sqrt(size * EPS))

    def rows(self, k: Tensor, q: Tensor, v: Tensor) -> Tensor:
        """Rows of three projections [H d, .] -> rows head by head [H 3 d, .]."""
        parts = (k, q, v / self.most)
        return torch.stack([part.unflatten(0, (self.heads, -1)) for part in parts], 1).flatten(0, 2)

    def take(self, at: _Parts) -> None:
        """Scale the vectors of a row."""
        length = vector_norm(at.given, dim=-1, keepdim=True, out=at.length)
        length.hypot_(self.small).clamp_min_(self.least)
        torch.div(at.given, length, out=at.scaled)


def _over_length(at: _Parts, eps: Tensor, out: Tensor) -> None:
    """What was read, as `nestling.norm.over_length`: [B, H, d]."""
    long = vector_norm(at.y, dim=-1, keepdim=True, out=at.long)
    torch.div(at.y, long.hypot_(eps), out=out)


class _SmallToken:
    """The small memory's part: its rows, and what its reads go into."""

    def __init__(self, memory: Steered) -> None:
        config, small = memory.config, memory.small
        if small is None:
            raise ValueError("the memory has no small one")
        many, self.size = len(config.pace), config.steering
        project = small.project.detach().double()  # [n, 3 s, s], to k, v, q
        like = small.project.detach()
        self.vectors = _Vectors(many, self.size, config.clip, like)
        self.eps, self.scale = self.vectors.eps, _Gates.scale(small.rule) * config.clip
        self.inward, bias = (
            self._rows(project, given.detach().double()).to(like.dtype)
            for given in (small.inward.weight, small.inward.bias.unsqueeze(-1))
        )
        self.bias = bias.flatten()
        scale = math.sqrt(self.size)
        self.beside = _scaled_columns(small.beside.weight, small.norm, scale)
        self.outward = None
        if small.outward is not None:
            given = _scaled_columns(small.outward.weight, small.norm, scale)
            self.outward = self._added(memory, given.unflatten(0, (config.heads, -1))).mT

    def _rows(self, project: Tensor, given: Tensor) -> Tensor:
        """Rows of k, q, v of each head, from `inward`'s [n (s + 2), .]."""
        inner = given.unflatten(0, (len(project), -1))[:, : self.size]
        k, v, q = (part.flatten(0, 1) for part in (project @ inner).split(self.size, 1))
        return self.vectors.rows(k, q, v)

    def _added(self, memory: Steered, given: Tensor) -> Tensor:
        """What reads add to the main memory's rows and to all gates, from [H, sizes, s]."""
        small, config, width = memory.small, memory.config, memory.width
        sizes = {} if small is None else small.sizes
        parts = dict(zip(sizes, given.split(list(sizes.values()), 1), strict=True))
        none = given.new_zeros(config.heads, width // config.heads, self.size)
        k, q, v = (parts.get(name, none).flatten(0, 1) for name in ("k", "q", "v"))
        gates = parts.get("gates")
        if gates is None:
            none = given.new_zeros(config.heads, 1, self.size)
            gates = torch.cat([parts.get(name, none) for name in ("eta", "alpha")], 1)
        main = _Vectors(config.heads, width // config.heads, config.clip, given)
        many = [config.heads, len(config.pace)]
        own = given.new_zeros(2 * many[1], self.size)
        every = _Gates(memory.rule, many, given).rows([gates.flatten(0, 1), own])
        return torch.cat([main.rows(k, q, v), every])


class _Gates:
    """`SelfRule.rate_and_retain` of both memories' rows, as `rows` puts them, in fewer operations.

    What a tied retention loses is `1 - sigmoid(z) = sigmoid(-z)`, so its rows are negative. The
    rate comes without its constant `scale`, which belongs to the write.
    """

    def __init__(self, rule: SelfRule, heads: Sequence[int], like: Tensor) -> None:
        self.heads, self.tied, self.shut = heads, rule.tied, rule.shut
        opened, span = 1 / (1 - rule.shut), rule.retain_max - RETAIN_MIN
        self.span = span * opened if rule.tied else span
        least = (1 - rule.retain_max) * opened if rule.tied else RETAIN_MIN
        self.least, self.one = like.new_full((), least), like.new_ones(())

    @staticmethod
    def scale(rule: SelfRule) -> float:
        """What a rate is to be multiplied with: the only difference between the memories."""
        return rule.rate_max / (1 - rule.shut)

    def rows(self, given: Sequence[Tensor]) -> Tensor:
        """Rows of eta and alpha by turns, of each memory -> all of eta, then all of alpha."""
        pairs = [each.unflatten(0, (many, 2)) for each, many in zip(given, self.heads, strict=True)]
        eta, alpha = torch.cat(pairs).unbind(1)
        return torch.cat([eta, -alpha if self.tied else alpha])

    def __call__(self, at: _Places) -> None:
        """Rates over `scale`, and retentions, from their read-outs."""
        torch.sigmoid(at.raw, out=at.opened)
        write = at.write
        if self.shut:
            write = softshrink(write, self.shut)  # for numbers above 0 it is relu(write - shut)
        retain = torch.add(self.least, at.keep, alpha=self.span, out=at.every_retain)
        if self.tied:
            torch.addcmul(self.one, write, retain, value=-1, out=retain)
        torch.mul(retain, write, out=at.every_rate)


def _own_gates(small: Small) -> tuple[Tensor, Tensor]:
    """Rows and biases of the small memory's gates, [2 n, D] and [2 n], eta and alpha by turns."""
    inward, many = small.inward, len(small.config.pace)
    weight, bias = (
        part.detach().unflatten(0, (many, -1))[:, -2:].flatten(0, 1)
        for part in (inward.weight, inward.bias)
    )
    return weight, bias


def _scaled_columns(weight: Tensor, norm: Tensor, scale: float) -> Tensor:
    """A product's weight that takes over the weight of the norm before it, repeated over heads."""
    factor = norm.detach().double().repeat(weight.shape[1] // len(norm)) * scale
    return (weight.detach() * factor).to(weight.dtype)
