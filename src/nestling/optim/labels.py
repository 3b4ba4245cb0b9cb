"""Which parameters are orthogonalised (M3, Muon, AdaMuon) and which take AdamW.

Orthogonalising makes sense for the hidden matrices of a network. Embeddings and output heads are
tables of vectors, gains and biases are vectors: they take AdamW. How they are told apart:

- `param_groups(model)` knows the model: embeddings by type, what is tied to them, the head by name
  or position. Give this to the optimizer wherever the model is at hand;
- `model.named_parameters()`: by name (`embed`, `wte`, `lm_head`, ...) and shape;
- plain `model.parameters()`: a tensor does not say what it is for, and a small vocabulary looks
  like any other matrix. The first and the last matrix, where embeddings and heads stand, the tables
  that follow the first, and long tables anywhere take AdamW: an embedding that is orthogonalised
  does more harm than a hidden matrix that is not;
- a group with `orthogonal=True` or `False` is taken at its word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

LONGEST = 16
"""A matrix more than this many times longer than wide counts as a table (embedding, head)."""

TABLE = re.compile(
    r"embed|(^|[._])(wte|wpe|tok|token|vocab|lm_head|head|heads|classifier|score)([._]|$)"
)
"""Names of embeddings and output heads."""


def is_hidden_matrix(parameter: Tensor) -> bool:
    """By shape: a matrix or kernel (as `[out, -1]`), both sides above 1, and not a long table."""
    if parameter.ndim < 2 or parameter.numel() == 0:
        return False
    rows = parameter.shape[0]
    columns = parameter.numel() // rows
    short, long = sorted((rows, columns))
    return short > 1 and long <= LONGEST * short


def label(parameters: Sequence[Tensor], names: Sequence[str] | None = None) -> list[bool]:
    """For each parameter of a model, in its order: is it a hidden matrix?

    By name where there are names, otherwise by place (see the module's docstring). A list without
    any vector is a choice of matrices: the first and the last of them are hidden if another one
    reads their output, and one alone is judged by its shape.
    """
    hidden = [is_hidden_matrix(parameter) for parameter in parameters]
    if names is not None:
        return [yes and not TABLE.search(name) for yes, name in zip(hidden, names, strict=True)]
    places = [place for place, parameter in enumerate(parameters) if parameter.ndim >= 2]
    if len(parameters) == 1 or not places:
        return hidden
    inputs = {parameters[place].shape[1:].numel() for place in places}  # what a layer takes in
    read = [parameters[place].shape[0] in inputs for place in places]
    whole = len(places) < len(parameters)
    for order, place in enumerate(places):
        if read[order] and (order or not whole):
            break
        hidden[place] = False  # the first, and tables after it that no layer reads from
    if whole or not read[-1]:
        hidden[places[-1]] = False
    return hidden


def param_groups(model: nn.Module, *, heads: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """A model's trainable parameters as two groups, `orthogonal=True` and `orthogonal=False`.

    The first holds every matrix and convolution kernel but embeddings (`nn.Embedding`,
    `nn.EmbeddingBag`, whatever is tied to them) and heads. `heads` names the output modules
    (`["lm_head"]`; `[]` for none); by default the head is what `model.get_output_embeddings()`
    returns, or else the last `nn.Linear` in order of registration.
    """
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    tables = {
        id(parameter)
        for module in [*embeddings, *_heads(model, heads)]
        for parameter in module.parameters()
    }
    hidden: list[Tensor] = []
    rest: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            table = id(parameter) in tables or parameter.ndim < 2
            (rest if table else hidden).append(parameter)
    groups = [
        {"params": hidden, "orthogonal": True},
        {"params": rest, "orthogonal": False},
    ]
    return [group for group in groups if group["params"]]


def _heads(model: nn.Module, names: Iterable[str] | None) -> list[nn.Module]:
    if names is not None:
        modules = dict(model.named_modules())
        unknown = [name for name in names if name not in modules]
        if unknown:
            raise ValueError(
                f"heads: the model has no module {unknown[0]!r}; it has"
                f" {', '.join(name for name in modules if name)}"
            )
        return [modules[name] for name in names]
    output = getattr(model, "get_output_embeddings", None)
    head = output() if callable(output) else None
    if head is None:
        head = next((m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)), None)
    return [] if head is None else [head]
