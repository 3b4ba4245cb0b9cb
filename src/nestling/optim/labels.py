"""Which parameters are orthogonalised (M3, Muon, AdaMuon) and which take AdamW.

Orthogonalising makes sense for the hidden matrices of a network. Embeddings and output heads are
tables of vectors, gains and biases are vectors: they take AdamW. An optimizer sees only tensors,
so:

- `param_groups(model)` labels by module: embeddings by type, the head by name or position;
- plain `model.parameters()` are labelled by shape (`is_hidden_matrix`), which finds vectors and
  large
  vocabularies, but cannot tell a small embedding from a hidden matrix;
- a group with `orthogonal=True` or `False` is taken at its word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["LONGEST", "is_hidden_matrix", "param_groups"]

LONGEST = 16
"""A matrix more than this many times longer than wide counts as a table (embedding, head)."""


def is_hidden_matrix(parameter: Tensor) -> bool:
    """By shape: a matrix or kernel (as `[out, -1]`), both sides above 1, and not a long table."""
    if parameter.ndim < 2 or parameter.numel() == 0:
        return False
    rows = parameter.shape[0]
    columns = parameter.numel() // rows
    short, long = sorted((rows, columns))
    return short > 1 and long <= LONGEST * short


def param_groups(model: nn.Module, *, heads: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """A model's trainable parameters as two groups, `orthogonal=True` and `orthogonal=False`.

    The first holds every matrix and convolution kernel but embeddings (`nn.Embedding`,
    `nn.EmbeddingBag`, whatever is tied to them) and heads. `heads` names the output modules
    (`["lm_head"]`; `[]` for none); by default the head is what `model.get_output_embeddings()`
    returns, or else the last `nn.Linear` in order of registration.
    """
    tables = {
        id(parameter)
        for module in [*_embeddings(model), *_heads(model, heads)]
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


def _embeddings(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]


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
