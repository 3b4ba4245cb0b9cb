"""`adapt`: a pretrained model whose MLPs become the levels of a continuum memory (section 7.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nestling import rules
from nestling.adaptation.learner import Learner
from nestling.adaptation.memory_files import read_meta
from nestling.adaptation.slots import assign_levels
from nestling.adaptation.watch import Alarm, Limits
from nestling.continuum import Continuum, MemoryLevel
from nestling.continuum.engine import TRANSFERS
from nestling.files import BrokenFileError
from nestling.rules import Rule

__all__ = ["RULES", "adapt", "load_learner"]

RULES: dict[str, Callable[[], Rule]] = {
    "gd": lambda: rules.identity,
    "momentum": lambda: rules.momentum(0.9),
    "adam": rules.adam,
    "signsgd": lambda: rules.signsgd,
    "dgd": lambda: rules.dgd(erase=0.0),  # a pretrained weight is not to be erased
    "muon": rules.muon,
    "m3": rules.multiscale,
}
"""Rules by name; any other is given as a `Rule`."""

RATE_PER_TOKEN = 1 / 3200
"""The default rate over the fastest chunk: what a token moves is then the same in any chunks."""


def adapt(
    model: Any,
    chunks: Sequence[int | float] = (256, 1024, 4096),
    *,
    rate: float | Sequence[float] | None = None,
    rule: str | Rule | Sequence[str | Rule] = "gd",
    retain: float | Sequence[float] = 1.0,
    rank: int | None = None,
    layers: Any = None,
    assign: str = "share",
    transfer: str | None = None,
    transfer_rate: float | None = None,
    context: int | None = None,
    tokenizer: Any = None,
    limits: Limits | None = None,
    snapshots: int = 3,
    on_alarm: Callable[[Alarm], None] | None = None,
) -> Learner:
    """Turn the MLPs of a pretrained decoder into a memory that learns what it reads (Eq. 70-74).

        learner = nestling.adapt(model, chunks=[256, 1024, 4096], tokenizer=tokenizer)
        learner.learn(book)
        print(learner.generate("Call me"))
        learner.save("memory")

    The model is shared, not copied and not changed; with rate 0 the learner equals it to the bit.

    chunks: tokens between two updates, one entry per level, fastest first. Larger ones are read
        quicker, and at a rate that grows with them a text is learned about as well.
    rate, rule, retain: one for all levels or one per level. A rate of None is `RATE_PER_TOKEN`
        times the fastest chunk, for gradient descent. `rule` is a name (gd, momentum, adam,
        signsgd, dgd, muon, m3) or any `nestling.rules` rule. `retain` below 1 lets a level drift
        back to the pretrained weights with every update.
    rank: keep differences as factors of at most this rank (gd only): small memories, many users.
    layers: which decoder layers learn: None (all), numbers, a slice, "last half", "first 4", ...
    assign: "share": every level changes every MLP; "split": the levels divide the hidden units;
        "layers": they divide the layers; "own": the levels of our own models' chains.
    transfer: how what a faster level learned reaches the next slower one when that is due. None;
        "move": a share of it (`transfer_rate`, by default all) moves there; "reptile",
        "first_order", "second_order": the faster level returns to an initial state the slower one
        learns (Eq. 72).
    context: the model's own cache begins anew every so many tokens.
    limits, on_alarm: when a level has drifted too far; the memory then rolls back by itself.
    snapshots: how many states are kept to return to.
    """
    if getattr(model, "training", False):
        raise ValueError("model: in training mode, where dropout is random; call model.eval()")
    chunks = list(chunks)
    if not chunks:
        raise ValueError("chunks: at least one level; got none")
    if transfer not in (None, "move", *TRANSFERS):
        known = ", ".join(repr(name) for name in (None, "move", *TRANSFERS))
        raise ValueError(f"transfer must be one of {known}; got {transfer!r}")
    count = len(chunks)
    named = [_named(each) for each in _each(rule, count, "rule", (str, Rule))]
    rate = _usual(chunks, [name for name, _ in named]) if rate is None else rate
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
    moves = transfer == "move"
    continuum = Continuum(
        model,
        levels,
        assign_levels(model, count, layers=layers, assign=assign),
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
        move_share=_share(transfer_rate) if moves else None,
        on_alarm=on_alarm,
    )


def load_learner(
    model: Any, folder: str | Path, *, tokenizer: Any = None, **changed: Any
) -> Learner:
    """A learner made as a saved memory says, with what it has learned; `changed` overrides."""
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


def _usual(chunks: list[int | float], names: list[str]) -> float:
    """The rate of gradient descent in chunks of this size."""
    if others := sorted({name for name in names if name != "gd"}):
        raise ValueError(f"rate: None is for gradient descent; rule {others[0]!r} needs a number")
    return RATE_PER_TOKEN * min((chunk for chunk in chunks if chunk != math.inf), default=0.0)


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
    if rule not in RULES:
        raise ValueError(f"rule must be a Rule or one of {', '.join(RULES)}; got {rule!r}")
    return rule, RULES[rule]()


def _share(rate: float | None) -> float:
    share = 1.0 if rate is None else float(rate)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"transfer_rate: with transfer='move' a share in (0, 1]; got {rate!r}")
    return share


def _plain_layers(layers: Any) -> Any:
    if isinstance(layers, slice):
        return {"slice": [layers.start, layers.stop, layers.step]}
    return layers if layers is None or isinstance(layers, (str, int)) else list(layers)
