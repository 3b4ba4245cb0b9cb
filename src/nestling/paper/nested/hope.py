"""A Hope block as a nested system (Eq. 94-97): self-modifying memories inside, a continuum outside.

Level by level, fastest first: five memories that learn with every token (and the convolution's last
tokens, which are merely kept), the block's own weights with every sequence, and each level of the
continuum memory at its own pace. Everything that is not an update is the block's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.continuum.layers import Block
from nestling.memories.self_modifying import SelfModifying
from nestling.objectives import Matrix, dot
from nestling.paper.nested.problem import Problem, View
from nestling.paper.nested.sequences import Token
from nestling.paper.nested.solve import keep_context
from nestling.paper.nested.training import KeyValue
from nestling.paper.nested.transfer import Parameters, Start, backpropagation, direct, reset
from nestling.rules import Gates
from nestling.scan.self_modifying.naive import answer, errors, gates, project
from nestling.scan.self_modifying.rule import Inputs, Weights

OUTER, TAIL = "block", "convolution"


class BlockSeen(NamedTuple):
    """The slow problems' view of one token: it, the fast state, each other's weights."""

    token: Token
    tail: Tensor
    memory: Tensor
    slow: dict[str, Parameters]


class Pieces(nn.Module):
    """The block's own code, piece by piece, with weights given from outside."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, piece: str, *arguments: Any) -> Any:
        """Run one of the pieces below."""
        return getattr(self, piece)(*arguments)

    def normed(self, x: Tensor) -> Tensor:
        """The mixer's input: [B, D]."""
        return self.block.norm(x)

    def inputs(self, x: Tensor, tail: Tensor) -> Inputs:
        """The memories' inputs from one token: [B, D] -> [B H, d] each."""
        mixer: Any = self.block.mixer
        opened = mixer.shell.open(self.block.norm(x)[:, None], tail, None)
        found = mixer._inputs(opened, None)
        one = {n: v[:, 0] for n in ("x", "k", "v", "q") if (v := getattr(found, n)) is not None}
        return found._replace(**one)

    def output(self, x: Tensor, tail: Tensor, memory: Tensor) -> Tensor:
        """The block's output for one token, reading this memory: [B, D]."""
        mixer: Any = self.block.mixer
        opened = mixer.shell.open(self.block.norm(x)[:, None], tail, None)
        token = self.inputs(x, tail)
        query = project(mixer.rule, Weights(memory[:, None]), "q", token)
        y = answer(Weights(memory[:, None]), 0, query).unflatten(0, (x.shape[0], -1))
        y = mixer.shell.close(y[:, :, None], opened.gate)[:, 0]
        return self.block.channel(x[:, None] + y[:, None])[0][:, 0]


def hope_block(
    block: Block,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    batch: int,
    length: int,
    rate: float,
    chunks: Sequence[int],
) -> tuple[Problem, ...]:
    """A Hope block, trained by gradient descent on sequences, as its problems (Eq. 94-97).

    `chunks` say after how many sequences each level of the continuum memory changes. The mixer must
    be a self-modifying matrix memory with chunks of one token, without momentum, whose retention is
    towards zero as printed.
    """
    mixer = _checked(block, chunks)
    pieces, rule = Pieces(block), mixer.rule
    owner = {n: _owner(n) for n, _ in block.named_parameters()}
    weights = {n: p.detach().clone() for n, p in block.named_parameters()}
    slow = {OUTER: 1} | {f"continuum.{i}": chunk for i, chunk in enumerate(chunks)}

    def call(given: dict[str, Parameters], piece: str, *arguments: Any) -> Any:
        named = {f"block.{n}": given[owner[n]][n] for n in owner if owner[n] in given}
        return torch.func.functional_call(pieces, named, (piece, *arguments))

    def seen_by(view: View) -> tuple[Inputs, Weights]:
        token = call({OUTER: view[OUTER]}, "inputs", view.item.x, view[TAIL]["x"])
        return token, Weights(torch.stack([view[name]["M"] for name in rule.names], 1))

    def memory(slot: int, name: str) -> Problem:
        def context(view: View) -> KeyValue:
            token, at = seen_by(view)
            k, v = project(rule, at, "k", token), project(rule, at, "v", token)
            ((key, value),) = errors(rule, at, slot, k, v)
            return KeyValue(key[:, None], value[:, None])

        def gates_of(view: View) -> Gates:
            token, at = seen_by(view)
            eta, alpha = gates(rule, at, token)
            return Gates(rate=eta[:, None, None], retain=alpha[:, None, None])

        def first(view: View) -> Parameters:
            start = view[OUTER]["mixer.first"][:, slot]
            return {"M": start.expand(batch, *start.shape).flatten(0, 1)}

        return Problem(
            name=name,
            parameters={"M": weights["mixer.first"][:, slot].repeat(batch, 1, 1)},
            context=context,
            objective=_delta if rule.erase else _hebbian,
            gates=gates_of,
            reads=(
                backpropagation(OUTER),
                backpropagation(TAIL, previous=True),
                *(backpropagation(other, previous=True) for other in rule.names),
            ),
            start=Start(make=first, every=length, kind="initialisation", source=OUTER),
            context_text="keys, and values it generates itself",
            objective_text="-<M k, v> + |M k|^2 / 2",
        )

    def kept(view: View) -> dict[str, Tensor]:
        return {"x": call({OUTER: view[OUTER]}, "normed", view.item.x)[:, None]}

    empty = mixer.shell.init(batch, mixer.first.device, mixer.first.dtype)
    tail = Problem(
        name=TAIL,
        parameters={"x": empty},
        context=kept,
        solver=keep_context(window=empty.shape[1]),
        reads=(backpropagation(OUTER),),
        start=reset(every=length, to={"x": empty}),
        context_text=f"the last {empty.shape[1]} tokens",
        objective_text="none: it keeps them",
    )

    def learner(name: str, chunk: int) -> Problem:
        others = [other for other in slow if other != name]

        def context(view: View) -> BlockSeen:
            told = {other: view[other] for other in others}
            return BlockSeen(view.item, view[TAIL]["x"], view["mem"]["M"], told)

        def objective(own: Parameters, seen: BlockSeen) -> Tensor:
            given = {**seen.slow, name: own}
            y = call(given, "output", seen.token.x, seen.tail, seen.memory)
            return loss(y, seen.token.target)

        return Problem(
            name=name,
            parameters={n: weights[n] for n in owner if owner[n] == name},
            context=context,
            objective=objective,
            gates=Gates(rate=rate),
            chunk=chunk * length,
            reads=(
                backpropagation("mem", previous=True),
                backpropagation(TAIL, previous=True),
                *(direct(other, previous=True) for other in others),
            ),
            context_text="training sequences",
            objective_text="loss of the prediction",
        )

    memories = [memory(slot, name) for slot, name in enumerate(rule.names)]
    return (*memories, tail, *(learner(name, chunk) for name, chunk in slow.items()))


def _delta(own: Parameters, pair: KeyValue) -> Tensor:
    """The objective whose step with retention is Eq. 96: `M (alpha I - eta k k^T) + eta v k^T`."""
    erased = 0.5 * Matrix(own["M"]).read(pair.keys).square().sum()
    return _hebbian(own, pair) + erased


def _hebbian(own: Parameters, pair: KeyValue) -> Tensor:
    return dot.loss(Matrix(own["M"]), *pair).sum()


def _owner(name: str) -> str:
    path = name.split(".")
    return f"continuum.{path[2]}" if path[0] == "channel" else OUTER


def _checked(block: Block, chunks: Sequence[int]) -> SelfModifying:
    mixer = block.mixer
    if not isinstance(mixer, SelfModifying):
        raise TypeError(f"hope_block needs a self-modifying mixer, got {type(mixer).__name__}")
    config, learning = mixer.config, mixer.config.learning
    plain = not (config.expansion or learning.momentum or learning.adding)
    plain = plain and not config.projections.residual
    if not plain or (config.chunk, config.chunk_others) != (1, 1):
        raise ValueError(
            "hope_block: the mixer must have expansion=0, momentum=False, residual=False, adding=0,"
            " chunk=1"
            f" and chunk_others=1; got {config}"
        )
    levels = getattr(block.channel, "levels", ())
    if len(levels) != len(chunks):
        raise ValueError(f"chunks must name {len(levels)} levels, got {list(chunks)}")
    return mixer
