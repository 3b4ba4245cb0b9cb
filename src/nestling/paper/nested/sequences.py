"""Sequence models as nested systems: memories of the context inside, what training learns outside.

Each item is one token of a batch of sequences, `Token(x [B, D], target)`. The faster problems learn
within a sequence; the slow one learns from whole sequences, through the faster ones' updates.

A Transformer block and an AdaTransformer block are such systems, too (Eq. 21-23, 69).

Shapes: B sequences, D inputs, K keys and queries, V values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.continuum.supervised import Loss
from nestling.objectives import Matrix, Objective, dot
from nestling.paper.nested.problem import ONE, Problem, View
from nestling.paper.nested.solve import keep_context
from nestling.paper.nested.training import KeyValue
from nestling.paper.nested.transfer import Parameters, Start, backpropagation, reset
from nestling.rules import Gates


class Token(NamedTuple):
    """One position of a batch of sequences: input [B, D], and what to predict there."""

    x: Tensor
    target: Tensor


class Seen(NamedTuple):
    """The slow problem's view of one token: the token, and the faster problems' state."""

    token: Token
    state: dict[str, Parameters]


def projected(parameters: Parameters, x: Tensor, *names: str) -> tuple[Tensor, ...]:
    """`k = W_k x` and its like, for the named matrices."""
    return tuple(x @ parameters[name].mT for name in names)


def read_matrix(memory: Tensor, query: Tensor) -> Tensor:
    """`y = M q` for a batch of memories [B, V, K] and queries [B, K]."""
    return (memory @ query[..., None])[..., 0]


def attend(state: Parameters, query: Tensor) -> Tensor:
    """Softmax attention of queries [B, K] to everything a non-parametric box remembers (Eq. 27)."""
    scores = (state["keys"] @ query[..., None])[..., 0] / query.shape[-1] ** 0.5
    return (scores.softmax(-1)[..., None, :] @ state["values"])[..., 0, :]


def memory(
    name: str,
    weight: Tensor,
    pairs: Callable[[View], tuple[Tensor, Tensor]],
    *,
    source: str,
    start: Start,
    objective: Objective = dot,
    gates: Gates | Callable[[View], Gates] = ONE,
    also: tuple[str, ...] = (),
) -> Problem:
    """An associative memory [B, V, K] of a sequence's keys and values, one write a token (Eq. 20).

    With the dot product and rate 1 it is linear attention, with `l2` DeltaNet. `pairs` makes the
    key and the value from what `source` (and `also` other problems) have learned.
    """

    def context(view: View) -> KeyValue:
        key, value = pairs(view)
        return KeyValue(key[..., None, :], value[..., None, :])

    return Problem(
        name=name,
        parameters={"M": weight},
        context=context,
        objective=lambda own, pair: objective.loss(Matrix(own["M"]), *pair).sum(),
        gates=gates,
        reads=tuple(backpropagation(other) for other in (source, *also)),
        start=start,
        context_text="keys and values of the sequence",
        objective_text="-<M k, v>" if objective is dot else "|M k - v|^2 / 2",
    )


def attention_problem(
    name: str,
    batch: int,
    sizes: tuple[int, int],
    pairs: Callable[[View], tuple[Tensor, Tensor]],
    *,
    source: str,
    every: int,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Softmax attention as a box without parameters: it keeps its context (Eq. 21, 27)."""

    empty = {
        what: torch.zeros(batch, 0, size, dtype=dtype)
        for what, size in zip(("keys", "values"), sizes, strict=True)
    }

    def context(view: View) -> dict[str, Tensor]:
        key, value = pairs(view)
        return {"keys": key[..., None, :], "values": value[..., None, :]}

    return Problem(
        name=name,
        parameters=empty,
        context=context,
        solver=keep_context(window=window),
        reads=(backpropagation(source),),
        start=reset(every=every, to=empty),
        context_text="keys and values of the sequence",
        objective_text="Nadaraya-Watson, non-parametric",
    )


def learner(
    name: str,
    parameters: Parameters,
    predict: Callable[[Parameters, Seen], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    rate: float,
    chunk: int | float,
    through: tuple[str, ...],
) -> Problem:
    """The problem that training solves: predict each token with the faster problems' state.

    Its gradient flows back through the updates of the problems named in `through`; `chunk` is the
    number of tokens in a training sequence.
    """

    def context(view: View) -> Seen:
        return Seen(view.item, {other: view[other] for other in through})

    def objective(own: Parameters, seen: Seen) -> Tensor:
        return loss(predict(own, seen), seen.token.target)

    return Problem(
        name=name,
        parameters=parameters,
        context=context,
        objective=objective,
        gates=Gates(rate=rate),
        chunk=chunk,
        reads=tuple(backpropagation(other) for other in through),
        context_text="training sequences",
        objective_text="loss of the prediction",
    )


def linear_attention(
    projections: Parameters,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    batch: int,
    length: int,
    rate: float,
    objective: Objective = dot,
    gates: Gates | Callable[[View], Gates] = ONE,
) -> tuple[Problem, Problem]:
    """Linear attention trained by SGD: a memory per sequence inside, the projections outside.

    `projections` are `key [K, D]`, `value [V, D]` and `query [K, D]`. With `objective=l2` and a
    rate per token it is DeltaNet; only these two values change.
    """
    outer, inside = "projections", "memory"
    weight = projections["key"].new_zeros(
        batch, projections["value"].shape[0], projections["key"].shape[0]
    )

    def pairs(view: View) -> Any:
        return projected(view[outer], view.item.x, "key", "value")

    def predict(own: Parameters, seen: Seen) -> Tensor:
        (query,) = projected(own, seen.token.x, "query")
        return read_matrix(seen.state[inside]["M"], query)

    return (
        memory(
            inside,
            weight,
            pairs,
            source=outer,
            start=reset(every=length),
            objective=objective,
            gates=gates,
        ),
        learner(outer, projections, predict, loss, rate=rate, chunk=length, through=(inside,)),
    )


def transformer_block(
    parameters: Parameters, loss: Loss, *, batch: int, length: int, rate: float
) -> tuple[Problem, Problem]:
    """`y = MLP(attention(x))`: attention beside one level that learns everything else (Eq. 21).

    Parameters: `key`, `value`, `query`, and the MLP's `up` and `down`.
    """

    def predict(own: Parameters, seen: Seen) -> Tensor:
        attended = _attended(own, seen.token.x, seen.state["attention"])
        (hidden,) = projected(own, attended, "up")
        return torch.relu(hidden) @ own["down"].mT

    return (
        _attention_of(parameters, batch, length),
        learner(
            "block", parameters, predict, loss, rate=rate, chunk=length, through=("attention",)
        ),
    )


def ada_transformer_block(
    parameters: Parameters, loss: Loss, *, batch: int, length: int, rate: float
) -> tuple[Problem, Problem, Problem]:
    """The same with the MLP moved one level up: a memory written in context (Eq. 22-23, 69).

    `M_t = M_{t-1} + v_t k_t^T` and `y_t = M_t q_t`, with keys, values and queries from what was
    attended to, starts each sequence at the learned `M_0` (`start`), which takes the MLP's place.
    """

    def attended(view: View) -> Tensor:
        return _attended(view["block"], view.item.x, view["attention"])

    def pairs(view: View) -> Any:
        return projected(view["block"], attended(view), "memory_key", "memory_value")

    def first(view: View) -> Parameters:
        return {"M": view["block"]["start"].expand(batch, -1, -1)}

    def predict(own: Parameters, seen: Seen) -> Tensor:
        seen_now = _attended(own, seen.token.x, seen.state["attention"])
        (query,) = projected(own, seen_now, "memory_query")
        return read_matrix(seen.state["memory"]["M"], query)

    inside = memory(
        "memory",
        parameters["start"].expand(batch, -1, -1),
        pairs,
        source="block",
        also=("attention",),
        start=Start(make=first, every=length, kind="initialisation", source="block"),
    )
    through = ("attention", "memory")
    return (
        _attention_of(parameters, batch, length),
        inside,
        learner("block", parameters, predict, loss, rate=rate, chunk=length, through=through),
    )


def _attended(parameters: Parameters, x: Tensor, state: Parameters) -> Tensor:
    (query,) = projected(parameters, x, "query")
    return attend(state, query)


def _attention_of(parameters: Parameters, batch: int, length: int) -> Problem:
    def pairs(view: View) -> Any:
        return projected(view["block"], view.item.x, "key", "value")

    sizes = (parameters["key"].shape[0], parameters["value"].shape[0])
    return attention_problem(
        "attention",
        batch,
        sizes,
        pairs,
        source="block",
        every=length,
        dtype=parameters["key"].dtype,
    )
