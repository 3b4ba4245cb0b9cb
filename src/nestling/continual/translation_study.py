"""CTNL (Fig. 8): learn to translate one language, then another; what is left of the first?

Hope-k is a language model whose continuum memory has k levels: the MLPs of its chains are grouped
into k levels with a clock each (Eq. 71, across steps); all other weights learn with the fastest
level. In-context learning sees pairs in its prompt and changes nothing. Every learner's rate is
chosen on other languages (enciphered) or on held-out sentences (real), from the same rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nestling.continual.base import Base, load_base
from nestling.continual.study import TUNING_SEED, Store
from nestling.continual.translation import (
    Language,
    cipher,
    indonesian,
    kalamang,
    manchu,
    word_tokenizer,
)
from nestling.continual.translator import Translator
from nestling.models import NestlingForCausalLM, presets

__all__ = ["LEARNERS", "Problem", "run_translation"]

LEARNERS = ("hope-1", "hope-2", "hope-3", "icl")
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Two languages to learn one after the other, from a base model."""

    name: str
    base: Base
    languages: tuple[Language, Language]
    epochs: int
    rows: int
    rates: tuple[float, ...]
    shots: int = 8


def run_translation(
    data: Path,
    cache: Path,
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
        makers.append(partial(_real, data, cache, manchu))
    for make in makers:
        tuned = make(TUNING_SEED)
        rates = {learner: _tune(tuned, learner, store, say) for learner in LEARNERS}
        for seed in range(first, first + seeds):
            problem = make(seed)
            for learner in LEARNERS:
                say(f"{problem.name}: {learner}, seed {seed}")
                _stored(problem, learner, rates[learner], seed, store, f"seed{seed}")


def _tune(problem: Problem, learner: str, store: Store, say: Say) -> float:
    """The rate with the best mean chrF over both languages at the end."""
    if learner == "icl" or len(problem.rates) == 1:
        return problem.rates[0]

    def outcome(rate: float) -> float:
        say(f"{problem.name}: {learner}, tuning, rate {rate:g}")
        stored = _stored(problem, learner, rate, TUNING_SEED, store, "tuning")
        return float(stored["first at the end"] + stored["second at the end"])

    return max(problem.rates, key=outcome)


def _stored(
    problem: Problem, learner: str, rate: float, seed: int, store: Store, name: str
) -> dict[str, Any]:
    first, second = problem.languages
    facts = {
        "kind": "translation",
        "problem": problem.name,
        "base": problem.base.name,
        "learner": learner,
        "order": f"{first.name} then {second.name}",
        "sizes": [len(first.train), len(first.test)],
        "epochs": problem.epochs,
        "rows": problem.rows,
        "rate": rate,
        "seed": seed,
    }
    where = ("translation", problem.name, learner, name)
    return store.get(where, partial(_learn_both, problem, learner, rate, seed), facts)


def _learn_both(problem: Problem, learner: str, rate: float, seed: int) -> dict[str, float]:
    """chrF of both languages alone and in sequence."""
    first, second = problem.languages
    if learner == "icl":
        frozen = Translator(problem.base, 1, lr=0.0)
        one, two = first.train[: problem.shots], second.train[: problem.shots]
        return {
            "first alone": frozen.score(first, one),
            "second alone": frozen.score(second, two),
            "first at the end": frozen.score(first, (*one, *two)),
            "second at the end": frozen.score(second, (*one, *two)),
        }
    levels = int(learner[-1])
    made = Translator(problem.base, levels, lr=rate, rows=problem.rows)
    made.learn(first.train, problem.epochs, seed)
    out = {"first alone": made.score(first)}
    made.learn(second.train, problem.epochs, seed)
    out |= {"first at the end": made.score(first), "second at the end": made.score(second)}
    if seed == TUNING_SEED:
        return out
    other = Translator(problem.base, levels, lr=rate, rows=problem.rows)
    other.learn(second.train, problem.epochs, seed)
    return out | {"second alone": other.score(second)}


def _enciphered(seed: int, *, quick: bool) -> Problem:
    """Two invented languages; the base has learned a third, so it knows English and the task."""
    size = {"train": 24, "test": 4} if quick else {"train": 600, "test": 60}
    known, first, second = (
        cipher(name, 3 * seed + i, **size) for i, name in enumerate(("cipher 0", "A", "B"))
    )
    torch.manual_seed(seed)
    tokenizer = word_tokenizer()
    fields = {"hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 96}
    config = presets.tiny("hope_attention", vocab_size=len(tokenizer), **fields)
    base = Base(name="words", model=NestlingForCausalLM(config).eval(), tokenizer=tokenizer)
    epochs = 1 if quick else 20
    teacher = Translator(base, 1, lr=2e-3, rows=16)
    teacher.learn(known.train, epochs, seed)
    return Problem(
        name="enciphered, quick" if quick else "enciphered",
        base=replace(base, model=teacher.model),
        languages=(first, second),
        epochs=epochs,
        rows=16,
        rates=(1e-3,) if quick else (1e-3, 2e-3),
    )


def _real(data: Path, cache: Path, folder: Path | None, seed: int) -> Problem:
    valid, size = seed == TUNING_SEED, {"train": 400, "test": 30}
    if folder is None:
        second = indonesian(data, seed=seed + 1, valid=valid, **size)
    else:
        second = manchu(folder)
    return Problem(
        name="real",
        base=load_base("hope", data, cache),
        languages=(kalamang(data, seed=seed, valid=valid, **size), second),
        epochs=4,
        rows=16,
        rates=(1e-3, 2e-3),
    )


def translations(store: Store, *, quick: bool = False) -> Iterator[dict[str, Any]]:
    """The stored final runs of this study."""
    for run in store.read("seed"):
        facts = run["facts"]
        if facts.get("kind") == "translation" and facts["problem"].endswith("quick") == quick:
            yield run
