"""CTNL (Fig. 8): learn to translate one language, then another; what is left of the first?

Hope-k is a language model whose weights learn at k levels, each with a clock (Eq. 71, across
steps). Controls: no level learns but the embeddings (hope-0), and levels that differ in rate
instead of frequency (rates-3). In-context learning sees pairs in its prompt and changes nothing.
Every learner gets as many trials, on other languages (enciphered) or held-out sentences (real).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from nestling.models import NestlingForCausalLM, presets
from studies.continual.base import Base, load_base
from studies.continual.study import TUNING_SEED, Store
from studies.continual.translation import (
    Language,
    cipher,
    indonesian,
    kalamang,
    manchu,
    word_tokenizer,
)
from studies.continual.translator import Translator

__all__ = ["LEARNERS", "Problem", "packed", "run_translation", "translations"]

LEARNERS = ("hope-0", "hope-1", "hope-2", "hope-3", "rates-3", "icl")
CLOCKS = {
    "hope-0": ("1/never",),
    "hope-1": ("1",),
    "hope-2": ("1/8", "1/32"),
    "hope-3": ("1/4/16", "1/16/64"),
    "rates-3": ("1/4/16", "1/16/64"),
}
"""Steps between the updates of the levels, fastest first: what tuning may choose from."""
ROOM = 512
"""Tokens of a prompt."""
Say = Callable[[str], None]
Setting = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Two languages to learn one after the other, from a base model.

    base: its name, and what makes it once a run needs it.
    rates: for learners with one clock; those with a choice of two try the upper half with each.
    shots: pairs in a prompt, as far as they fit.
    """

    name: str
    base: tuple[str, Callable[[], Base]]
    languages: tuple[Language, Language]
    epochs: int
    rows: int
    rates: tuple[float, ...]
    shots: tuple[int, ...]
    learners: tuple[str, ...] = LEARNERS

    def trials(self, learner: str) -> list[Setting]:
        """The settings tuning may choose from, as many for every learner."""
        if learner == "icl":
            return [{"shots": shots} for shots in self.shots]
        clocks = CLOCKS[learner]
        rates = self.rates[len(self.rates) - max(1, len(self.rates) // len(clocks)) :]
        made = [{"rate": rate, "clock": clock} for rate in rates for clock in clocks]
        return made[: len(self.rates)]


def run_translation(
    data: Path,
    models: Path,
    store: Store,
    *,
    seeds: int = 3,
    first: int = 10,
    manchu: Path | None = None,
    quick: bool = False,
    say: Say = print,
) -> None:
    """Run what is missing: the enciphered analogue, and real languages with the base 'hope'."""
    makers: list[Callable[[int], Problem]] = [partial(_enciphered, quick=quick)]
    if not quick:
        makers.append(partial(_real, data, models, manchu))
    for make in makers:
        tuned = make(TUNING_SEED)
        settings = {learner: _tune(tuned, learner, store, say) for learner in tuned.learners}
        for seed in range(first, first + seeds):
            problem = make(seed)
            for learner in problem.learners:
                say(f"{problem.name}: {learner}, seed {seed}")
                _stored(problem, learner, settings[learner], seed, store, f"seed{seed}")


def _tune(problem: Problem, learner: str, store: Store, say: Say) -> Setting:
    """The setting with the best mean chrF over both languages at the end."""
    trials = problem.trials(learner)

    def outcome(setting: Setting) -> float:
        say(f"{problem.name}: {learner}, tuning, {setting}")
        stored = _stored(problem, learner, setting, TUNING_SEED, store, "tuning")
        return float(stored["first at the end"] + stored["second at the end"])

    return trials[0] if len(trials) == 1 else max(trials, key=outcome)


def _stored(
    problem: Problem, learner: str, setting: Setting, seed: int, store: Store, name: str
) -> dict[str, Any]:
    first, second = problem.languages
    facts = {
        "kind": "translation",
        "problem": problem.name,
        "base": problem.base[0],
        "learner": learner,
        "order": f"{first.name} then {second.name}",
        "sizes": [len(first.train), len(first.test)],
        "epochs": problem.epochs,
        "rows": problem.rows,
        "setting": setting,
        "seed": seed,
    }
    where = ("translation", problem.name, learner, name)
    run = _prompted if learner == "icl" else _taught
    return store.get(where, partial(run, problem, learner, setting, seed), facts)


def _taught(problem: Problem, learner: str, setting: Setting, seed: int) -> dict[str, float]:
    """chrF of both languages alone and in sequence; a trial leaves out the second alone."""
    first, second = problem.languages
    clock = [math.inf if c == "never" else int(c) for c in setting["clock"].split("/")]
    make = partial(
        Translator,
        problem.base[1](),
        clock,
        lr=setting["rate"],
        rows=problem.rows,
        by_rate=learner.startswith("rates"),
    )
    made = make()
    made.learn(first.train, problem.epochs, seed)
    out = {"first alone": made.score(first)}
    made.learn(second.train, problem.epochs, seed)
    out |= {"first at the end": made.score(first), "second at the end": made.score(second)}
    if seed == TUNING_SEED:
        return out
    other = make()
    other.learn(second.train, problem.epochs, seed)
    return out | {"second alone": other.score(second), "first untaught": other.score(first)}


def _prompted(problem: Problem, learner: str, setting: Setting, seed: int) -> dict[str, float]:
    """The pairs that fit into a prompt; at the end those of both languages share it."""
    first, second = problem.languages
    frozen = Translator(problem.base[1](), lr=0.0)
    pairs = [language.train[: setting["shots"]] for language in problem.languages]
    one, two = (frozen.fitting(some, ROOM) for some in pairs)
    both = [pair for some in pairs for pair in frozen.fitting(some, ROOM // 2)]
    out = {"first at the end": frozen.score(first, both)}
    out["second at the end"] = frozen.score(second, both)
    if seed == TUNING_SEED:
        return out
    out |= {"first alone": frozen.score(first, one), "second alone": frozen.score(second, two)}
    return out | {"first untaught": frozen.score(first, two)}


def _enciphered(seed: int, *, quick: bool) -> Problem:
    """Two invented languages; the base has learned a third, so it knows English and the task."""
    size = {"train": 24, "test": 4} if quick else {"train": 600, "test": 60}
    known, first, second = (
        cipher(name, 3 * seed + i, **size) for i, name in enumerate(("cipher 0", "A", "B"))
    )
    return Problem(
        name="enciphered, quick" if quick else "enciphered",
        base=("words", cache(partial(_words, known, seed, 1 if quick else 20))),
        languages=(first, second),
        epochs=1 if quick else 8,
        rows=16,
        rates=(1e-3,) if quick else (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
        shots=(2,) if quick else (1, 2, 4, 8, 16, 32),
    )


def _words(known: Language, seed: int, epochs: int) -> Base:
    """A Hope of whole words, taught one language."""
    torch.manual_seed(seed)
    tokenizer = word_tokenizer()
    fields = {"hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 96}
    config = presets.tiny("hope_attention", vocab_size=len(tokenizer), **fields)
    base = Base(name="words", model=NestlingForCausalLM(config).eval(), tokenizer=tokenizer)
    teacher = Translator(base, lr=2e-3, rows=16)
    teacher.learn(known.train, epochs, seed)
    return replace(base, model=teacher.model)


def _real(data: Path, models: Path, folder: Path | None, seed: int) -> Problem:
    """Real languages; without the controls, which need a model that can learn to translate."""
    valid, size = seed == TUNING_SEED, {"train": 400, "test": 50}
    if folder is None:
        second = indonesian(data, seed=seed + 1, valid=valid, **size)
    else:
        second = manchu(folder)
    return Problem(
        name="real",
        base=("hope", cache(partial(load_base, "hope", data, models))),
        languages=(kalamang(data, seed=seed, valid=valid, **size), second),
        epochs=2,
        rows=16,
        rates=(1e-3, 2e-3),
        shots=(4, 32),
        learners=("hope-1", "hope-2", "hope-3", "icl"),
    )


def translations(store: Store, *, quick: bool = False) -> Iterator[dict[str, Any]]:
    """The stored final runs of this study."""
    return (run for run in store.read("seed") if _ours(run, quick))


def packed(run: dict[str, Any]) -> dict[str, Any] | None:
    """What the copy of the runs keeps: all of this study's, trials too."""
    return run if _ours(run, False) else None


def _ours(run: dict[str, Any], quick: bool) -> bool:
    facts = run["facts"]
    return facts.get("kind") == "translation" and facts["problem"].endswith("quick") == quick
