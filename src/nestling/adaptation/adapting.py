"""`adapt`: a pretrained model whose MLPs become the levels of a continuum memory (section 7.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from nestling import rules
from nestling.adaptation.drift import Alarm, Limits
from nestling.adaptation.learner import UNDO, Learner
from nestling.adaptation.memory_files import read_meta
from nestling.adaptation.slots import assign_levels, check_model
from nestling.checks import one_of
from nestling.continuum import Continuum, MemoryLevel, Slot
from nestling.continuum.engine import TRANSFERS
from nestling.continuum.fast import weight_of
from nestling.files import BrokenFileError
from nestling.rules import Rule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


RULES: dict[str, Callable[[], Rule]] = {
    "natural": lambda: rules.identity,
    "gd": lambda: rules.identity,
    "momentum": lambda: rules.momentum(0.9),
    "adam": rules.adam,
    "signsgd": lambda: rules.signsgd,
    "dgd": lambda: rules.dgd(erase=0.0),  # a pretrained weight is not to be erased
    "muon": rules.muon,
    "m3": rules.multiscale,
}
"""Rules by name; any other is given as a `Rule`."""

CHUNKS = (64, 512)
BUDGET = 4e-5
"""The cost of one natural step of rate 1 on the model's own text, in nats per token."""

SHARE, MOST = 0.02, 32
"""A memory takes at most this share of the base model's bytes, and this rank, unless asked to."""

FACTORS = 0.9
"""Share of that for the factors; the rest is for samples of texts, history and descriptions."""


def adapt(
    model: PreTrainedModel | nn.Module,
    chunks: int | Sequence[int | float] | None = None,
    *,
    rule: str | Rule | Sequence[str | Rule] | None = None,
    rate: float | Sequence[float] | None = None,
    retain: float | Sequence[float] = 1.0,
    rank: int | str | None = "auto",
    layers: Any = "auto",
    matrices: str = "auto",
    assign: str = "share",
    transfer: str | None = "auto",
    transfer_rate: float | None = None,
    context: int | None = None,
    tokenizer: Any = None,
    limits: Limits | None = None,
    snapshots: int = 3,
    on_alarm: Callable[[Alarm], None] | None = None,
) -> Learner:
    """Turn the MLPs of a pretrained decoder into a memory that learns what it reads (Eq. 70-74).

        learner = nestling.adapt(model, tokenizer=tokenizer)
        print(learner.learn(diary))
        print(learner.generate("The landlady is called"))
        learner.save("memory")

    The model is shared, not copied and not changed; with rate 0 the learner equals it to the bit.
    Without further arguments a memory takes natural steps (`nestling.adaptation.metric`) in the
    closing matrices of the last third of the MLPs, in factors of low rank: at most 2% of the
    model's bytes. That teaches the facts of a short text within a few passes.

    chunks: tokens between two updates, one entry per level, fastest first; one number is one level.
    rule: "natural", gd, momentum, adam, signsgd, dgd, muon, m3, or any `nestling.rules` rule; for
        all levels or one per level. None: natural steps, or gradient descent where a rate is given.
    rate: for all levels or one per level. 1 is the usual natural step; other rules need a rate.
    retain: below 1 a level drifts back to the pretrained weights with every update.
    rank: differences as factors of at most this rank (natural and gd only); None: full matrices.
        "auto": what fits into 2% of the model for natural steps, full matrices otherwise.
    layers: which decoder layers learn: None (all), numbers, a slice, "last half", "first 4", ...
        "auto": the last third for natural steps, all otherwise.
    matrices: "closing": those that close an MLP; "all". "auto": closing for natural steps.
    assign: "share": every level changes every MLP; "split": the levels divide the hidden units;
        "layers": they divide the layers; "own": the levels of our own models' chains.
    transfer: how what a faster level learned reaches the next slower one when that is due. None;
        "move": a share of it (`transfer_rate`, by default all) moves there; "reptile",
        "first_order", "second_order": the faster level returns to an initial state the slower one
        learns (Eq. 72). "auto": natural steps move, others do not.
    context: the model's own cache begins anew every so many tokens.
    limits, on_alarm: how far the levels may go, and whom to tell when a text is refused.
    snapshots: how many states are kept to return to.
    """
    check_model(model)
    chunks = _chunks(chunks)
    if rule is None:
        rule = "natural" if rate is None else "gd"
    natural = _is_natural(rule)
    if transfer == "auto":
        transfer = "move" if natural and assign == "share" and len(chunks) > 1 else None
    one_of("transfer", transfer, (None, "move", *TRANSFERS))
    one_of("matrices", matrices, ("auto", "closing", "all"))
    layers = ("last third" if natural else None) if layers == "auto" else layers
    closing = matrices == "closing" or (matrices == "auto" and natural)
    count = len(chunks)
    slots = assign_levels(model, count, layers=layers, assign=assign, closing=closing)
    if rank == "auto":
        rank = _affordable(model, slots, count) if natural else None
    elif isinstance(rank, str):
        raise ValueError(f"rank must be 'auto', None or a whole number; got {rank!r}")
    named = [_named(each) for each in _each(rule, count, "rule", (str, Rule))]
    if rate is None:
        rate = _usual_rates(chunks, [name for name, _ in named], moves=transfer == "move")
    levels = [
        MemoryLevel(name=name, chunk=chunk, rule=made[1], rate=eta, retain=alpha, rank=rank)
        for name, chunk, made, eta, alpha in zip(
            _level_names(count),
            chunks,
            named,
            _each(rate, count, "rate", (int, float)),
            _each(retain, count, "retain", (int, float)),
            strict=True,
        )
    ]
    moves, share = transfer == "move", 1.0 if transfer_rate is None else float(transfer_rate)
    if moves and not 0.0 < share <= 1.0:
        raise ValueError(
            f"transfer_rate: with transfer='move' a share in (0, 1]; got {transfer_rate!r}"
        )
    continuum = Continuum(
        model,
        levels,
        slots,
        transfer=None if moves else transfer,
        transfer_rate=None if moves else transfer_rate,
        context=context,
    )
    settings = {
        "chunks": ["inf" if chunk == math.inf else chunk for chunk in chunks],
        "rate": [level.rate for level in levels],
        "rule": [name for name, _ in named],
        "retain": [level.retain for level in levels],
        "rank": rank,
        "layers": _plain_layers(layers),
        "matrices": "closing" if closing else "all",
        "assign": assign,
        "transfer": transfer,
        "transfer_rate": transfer_rate,
        "context": context,
    }
    return Learner(
        continuum,
        settings=settings,
        tokenizer=tokenizer,
        limits=limits,
        snapshots=snapshots,
        move_share=share if moves else None,
        on_alarm=on_alarm,
        budget=BUDGET if natural else None,
    )


def load_learner(
    model: PreTrainedModel | nn.Module,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    **changed: Any,
) -> Learner:
    """The learner a saved memory belongs to, with what it has learned: the inverse of `save`.

        learner = nestling.load_learner(model, "memory", tokenizer=tokenizer)

    model: the same base model; another one is refused. changed: arguments of `adapt` that differ
    from the saved ones (limits, on_alarm, a rule of one's own).
    """
    try:
        return _load_learner(model, folder, tokenizer, changed)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise BrokenFileError(f"{folder}: not a memory's settings: {error!r}") from error


def _load_learner(
    model: Any, folder: str | Path, tokenizer: Any, changed: dict[str, Any]
) -> Learner:
    settings = {**read_meta(Path(folder))["settings"], **changed}
    if isinstance(settings["rule"], list) and "custom" in settings["rule"]:
        raise ValueError(
            f"{folder}: its rule is not one of {', '.join(RULES)}; give it as rule=..."
        )
    chunks = [math.inf if chunk == "inf" else chunk for chunk in settings.pop("chunks")]
    layers = settings.pop("layers")
    layers = slice(*layers["slice"]) if isinstance(layers, dict) else layers
    learner = adapt(model, chunks, layers=layers, tokenizer=tokenizer, **settings)
    learner.load(folder)
    return learner


def _chunks(chunks: int | Sequence[int | float] | None) -> list[int | float]:
    """The levels' chunks, fastest first."""
    if chunks is None:
        return list(CHUNKS)
    if isinstance(chunks, (int, float)) and not isinstance(chunks, bool):
        return [chunks]
    if isinstance(chunks, (str, bytes)) or not isinstance(chunks, Iterable):
        raise ValueError(
            f"chunks: tokens between two updates, one number per level, such as [64, 512]; got"
            f" {chunks!r}"
        )
    found = list(chunks)
    if not found:
        raise ValueError("chunks: at least one level; got none")
    if all(isinstance(chunk, (int, float)) for chunk in found) and found != sorted(found):
        raise ValueError(
            f"chunks: the fastest level first, so in rising order; got {found}: write"
            f" {sorted(found)}, and rates, rules and retention in the same order"
        )
    return found


def _is_natural(rule: str | Rule | Sequence[str | Rule]) -> bool:
    """Whether all levels take natural steps; a mixture is refused."""
    given = [rule] if isinstance(rule, (str, Rule)) else list(rule)
    natural = [each == "natural" for each in given if isinstance(each, str) or each]
    if any(natural) and not all(natural):
        raise ValueError(f"rule: 'natural' is for all levels or for none; got {given!r}")
    return bool(natural) and all(natural)


def _affordable(model: Any, slots: Sequence[Slot], levels: int) -> int:
    """The rank whose factors, and what is kept to undo texts, take `SHARE` of the model's bytes."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    sides = sum(sum(weight_of(model, slot.name)[0].shape) for slot in slots)
    copies = levels * (1 + UNDO / 2)  # float32, and half precision
    return max(min(int(FACTORS * SHARE * size / (4 * sides * copies)), MOST), 1)


def _usual_rates(chunks: list[int | float], names: list[str], *, moves: bool) -> list[float]:
    """Natural steps of rate 1; where differences move to slower levels, these only receive."""
    if others := sorted({name for name in names if name != "natural"}):
        raise ValueError(
            f"rate: rule {others[0]!r} needs a number; only natural steps have a usual rate"
        )
    return [1.0 if number == 0 or not moves else 0.0 for number in range(len(chunks))]


def _level_names(count: int) -> list[str]:
    if count == 1:
        return ["fast"]
    names = {2: ["fast", "slow"], 3: ["fast", "middle", "slow"]}.get(count)
    return names or [f"level{number}" for number in range(1, count + 1)]


def _each(value: Any, count: int, name: str, single: tuple[type, ...]) -> list[Any]:
    if isinstance(value, single):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise ValueError(f"{name}: one for all levels or {count}, one per level; got {values!r}")
    return values


def _named(rule: str | Rule) -> tuple[str, Rule]:
    if isinstance(rule, Rule):
        return ("gd" if rule is rules.identity else "custom"), rule
    one_of("rule", rule, RULES)
    return rule, RULES[rule]()


def _plain_layers(layers: Any) -> Any:
    if isinstance(layers, slice):
        return {"slice": [layers.start, layers.stop, layers.step]}
    return layers if layers is None or isinstance(layers, (str, int)) else list(layers)
