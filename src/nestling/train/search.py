"""A search over the settings of a recipe: which keys, which values next, what came out.

    space = read_space(["optim.lr=1e-3..1e-2", "level.fast.rate=0.1..2", "data.length=128|256"])
    point = halton(space, 0)                       # {"optim.lr": 0.00316..., ...}
    recipe = at_point(recipe, point)

A space is a list of axes; a point gives every key a value. `halton` covers a space evenly and
depends on nothing but the number of the trial, so that a search can be stopped, resumed and spread
over processes; `tpe` asks Optuna (an optional extra) with all finished trials.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nestling.train.recipe import Recipe, changed

LEVEL = "level"
"""The prefix of a level's keys: level.NAME.rate, level.NAME.chunk, level.NAME.retain."""

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One key and what it may be: choices, or numbers between two ends.

    Numbers are taken on a logarithmic scale where the ends are positive and at least three times
    apart; with whole ends they are whole.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    @property
    def logarithmic(self) -> bool:
        return self.low > 0 and self.high >= 3 * self.low

    def at(self, share: float) -> str:
        """The value at a share in [0, 1) of the axis, as the command line would have it."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        if self.whole:
            share = min(share, 1 - 1e-12)
            low, high = self.low - 0.5, self.high + 0.5
            value = low * (high / low) ** share if self.logarithmic else low + share * (high - low)
            return self.text(min(max(round(value), self.low), self.high))
        if self.logarithmic:
            return self.text(self.low * (self.high / self.low) ** share)
        return self.text(self.low + share * (self.high - self.low))

    def text(self, value: float) -> str:
        """A number as the command line would have it."""
        return str(int(value)) if self.whole else f"{value:.4g}"


def is_axis(setting: str) -> bool:
    """Whether `key=value` names several values: a range `low..high` or choices `a|b`."""
    value = setting.partition("=")[2]
    return ".." in value or "|" in value


def read_space(settings: Sequence[str]) -> list[Axis]:
    """Axes from `key=low..high` and `key=a|b|c`; a ValueError says what is wrong with one."""
    axes: list[Axis] = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not is_axis(setting):
            raise ValueError(f"expected key=low..high or key=a|b, got {setting!r}")
        if key in (axis.key for axis in axes):
            raise ValueError(f"{key} is given twice")
        axes.append(_axis(key, text, setting))
    if not axes:
        raise ValueError("nothing to search: give a range, as in optim.lr=1e-3..1e-2")
    if len(axes) > len(_PRIMES):
        raise ValueError(f"at most {len(_PRIMES)} keys can be searched; got {len(axes)}")
    return axes


def _axis(key: str, text: str, setting: str) -> Axis:
    if "|" in text:
        choices = tuple(text.split("|"))
        if len(set(choices)) < len(choices) or not all(choices):
            raise ValueError(f"choices must be different and not empty; got {setting!r}")
        return Axis(key=key, choices=choices)
    first, _, last = text.partition("..")
    try:
        low, high = float(first), float(last)
    except ValueError:
        raise ValueError(f"the ends of a range must be numbers; got {setting!r}") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"a range must go from a lower number to a higher one; got {setting!r}")
    whole = first.lstrip("+-").isdigit() and last.lstrip("+-").isdigit()
    return Axis(key=key, low=low, high=high, whole=whole)


def at_point(
    recipe: Recipe, point: Mapping[str, str], levels: Sequence[Mapping[str, Any]]
) -> Recipe:
    """The recipe at a point; `levels` are those of its model, for keys that begin with `level`."""
    recipe = changed(recipe, [f"{k}={v}" for k, v in point.items() if not k.startswith("level.")])
    own = {key: value for key, value in point.items() if key.startswith(f"{LEVEL}.")}
    if not own:
        return recipe
    new = [dict(level) for level in levels]
    names = [level["name"] for level in new]
    for key, value in own.items():
        parts = key.split(".")
        if len(parts) != 3 or parts[1] not in names or parts[2] not in ("rate", "chunk", "retain"):
            raise ValueError(
                f"{key}: expected level.NAME.rate, .chunk or .retain, with NAME one of"
                f" {', '.join(names)}"
            )
        number = float(value)
        new[names.index(parts[1])][parts[2]] = int(number) if parts[2] == "chunk" else number
    fields = {**recipe.model.fields, "levels": new}
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, fields=fields))


def halton(space: Sequence[Axis], number: int) -> dict[str, str]:
    """Point `number` of a Halton sequence: every axis evenly covered, whatever the number."""
    return {
        axis.key: axis.at(_radical(number + 1, prime))
        for axis, prime in zip(space, _PRIMES, strict=False)
    }


def _radical(number: int, base: int) -> float:
    """The digits of a number in a base, mirrored behind the point."""
    share, scale = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        share, scale = share + digit * scale, scale / base
    return share


def tpe(
    space: Sequence[Axis], number: int, done: Sequence[tuple[Mapping[str, str], float]]
) -> dict[str, str]:
    """The next point by Optuna's tree-structured Parzen estimator, from all finished trials."""
    try:
        import optuna
    except ImportError as error:
        raise ValueError("--sampler tpe needs Optuna: pip install 'nestling[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds = {axis.key: _distribution(axis, optuna.distributions) for axis in space}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=number))
    for point, loss in done:
        if math.isfinite(loss):
            values = {axis.key: _number(axis, point[axis.key]) for axis in space}
            made = optuna.trial.create_trial(params=values, distributions=kinds, value=loss)
            study.add_trial(made)
    asked = study.ask(kinds).params
    return {
        axis.key: asked[axis.key] if axis.choices else axis.text(asked[axis.key]) for axis in space
    }


def _number(axis: Axis, text: str) -> Any:
    if axis.choices:
        return text
    value = min(max(float(text), axis.low), axis.high)  # (four digits may round over an end)
    return int(value) if axis.whole else value


def _distribution(axis: Axis, kinds: Any) -> Any:
    if axis.choices:
        return kinds.CategoricalDistribution(axis.choices)
    if axis.whole:
        return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.logarithmic)
    return kinds.FloatDistribution(axis.low, axis.high, log=axis.logarithmic)
