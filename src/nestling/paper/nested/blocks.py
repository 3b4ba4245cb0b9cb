"""A Transformer block and an AdaTransformer block as nested systems (Eq. 21-23, 69)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nestling.paper.nested.problem import Problem, View
from nestling.paper.nested.sequences import (
    Seen,
    attend,
    attention_problem,
    learner,
    memory,
    projected,
    read_matrix,
)
from nestling.paper.nested.transfer import Parameters, Start

Loss = Callable[[Tensor, Tensor], Tensor]


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
