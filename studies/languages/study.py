"""CTNL (Fig. 8): learn to translate one language, then another; what is left of the first?

    python -m studies languages      run what is missing, write docs/results/languages.md

Hope-k is a language model whose weights learn at k levels, each with a clock (Eq. 71, across
steps). Controls: no level learns but the embeddings (hope-0), and levels that differ in rate
instead of frequency (rates-3). In-context learning sees pairs in its prompt and changes nothing.
Every learner gets as many trials, on other languages (enciphered) or held-out sentences (real).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from nestling.files import write_atomic
from nestling.models import NestlingForCausalLM, presets
from studies.harness.command import common, ready
from studies.harness.page import table
from studies.harness.store import Run, Store, key_of
from studies.harness.tuning import best
from studies.harness.verdict import ENOUGH, interval, paired, show, verdict
from studies.languages.base import Base, load_base, recipe
from studies.languages.translation import (
    Language,
    cipher,
    indonesian,
    kalamang,
    manchu,
    word_tokenizer,
)
from studies.languages.translator import Translator

__all__ = ["LEARNERS", "Problem", "main", "packed", "run_all", "tables", "write_page"]

TUNING_SEED = 1000
"""The languages that settings are chosen on; never one of the reported seeds."""

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


def run_all(
    data: Path,
    models: Path,
    store: Store,
    *,
    seeds: int = 3,
    first: int = 10,
    manchu_folder: Path | None = None,
    quick: bool = False,
    say: Say = print,
) -> None:
    """Run what is missing: the enciphered analogue, and real languages with the base 'hope'."""
    makers: list[Callable[[int], Problem]] = [partial(_enciphered, quick=quick)]
    if not quick:
        makers.append(partial(_real, data, models, manchu_folder))
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

    def outcome(setting: Setting) -> float:
        say(f"{problem.name}: {learner}, tuning, {setting}")
        stored = _stored(problem, learner, setting, TUNING_SEED, store, "tuning")
        return float(stored["first at the end"] + stored["second at the end"])

    return best(problem.trials(learner), outcome)


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
    where = key_of("translation", problem.name, learner, name)
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
        base=("hope", cache(lambda: load_base(recipe(data, models), models / "bases" / "hope"))),
        languages=(kalamang(data, seed=seed, valid=valid, **size), second),
        epochs=2,
        rows=16,
        rates=(1e-3, 2e-3),
        shots=(4, 32),
        learners=("hope-1", "hope-2", "hope-3", "icl"),
    )


def packed(run: Run) -> Run | None:
    """The run if the copy keeps it: all runs of this study, trials too."""
    return run if _ours(run, False) else None


def _ours(run: Run, quick: bool) -> bool:
    facts = run["facts"]
    return facts.get("kind") == "translation" and facts["problem"].endswith("quick") == quick


COLUMNS = (
    "first alone",
    "first at the end",
    "first untaught",
    "second alone",
    "second at the end",
)

HEAD = """# New languages, one after another (CTNL): what was measured

Generated by `python -m studies languages` from its stored runs (a copy lies beside this
page).
chrF (0 to 100, by sacrebleu) of two languages into English. *alone*: right after that language was
learned from the base model. *at the end*: after the first, then the second, in the same way.
*untaught*: the first language by a learner that was taught only the second, so what general
English is worth.

*enciphered* is an analogue that a small model can learn: two invented languages, 600 sentences
each, 8 passes, over a base (0.26M parameters) that has learned a third; it says how learners
forget, not how well anyone translates. *real* is Kalamang, then Indonesian from the same dictionary
(or the user's Manchu set), 400 sentences each, 2 passes, by the 1M-parameter Hope base.

Hope-k learns at k levels, each with its own clock (Eq. 71; *clock*: steps between updates). With
more than one level the embeddings are in the fastest, the MLPs of every chain follow by their
place, and mixers and norms are in the slowest; this was settled on the tuning languages. Hope-1
changes all weights at every step. Controls, for the enciphered languages: Hope-0 changes the
embeddings alone; rates-3 has the groups of Hope-3, all changed at every step, with the rate divided
by the clock. In-context learning (icl) reads as many pairs as tuning prefers of those that fit into
512 tokens. Every learner had the same number of trials (6 enciphered, 2 real), on invented
languages that no seed uses or on held-out sentences.

"±" is a 95% interval over seeds (Student's t); differences are paired by seed and in chrF. *shown*
/ *refuted* mean that the interval excludes zero; anything else is *inconclusive*; a claim with
fewer than 3 seeds is *unfinished*.
"""


def _both(run: Run) -> float:
    return float(run["first at the end"] + run["second at the end"]) / 2


def _kept(run: Run) -> float:
    return float(run["first at the end"])


def _recovered(run: Run) -> float:
    """Both languages at the end, beyond nine tenths of both alone."""
    return _both(run) - 0.9 * (run["first alone"] + run["second alone"]) / 2


def _retained(run: Run) -> float:
    """How far the gain of the first course exceeds nine tenths of itself at the end."""
    floor = run["first untaught"]
    return float(run["first at the end"] - floor - 0.9 * (run["first alone"] - floor))


CLAIMS: tuple[tuple[str, Callable[[Run], float], str, str | None], ...] = (
    ("Hope-3 keeps more of the first language than Hope-1", _kept, "hope-3", "hope-1"),
    ("Hope-2 keeps more of the first language than Hope-1", _kept, "hope-2", "hope-1"),
    ("Hope-3 keeps more of the first language than Hope-2", _kept, "hope-3", "hope-2"),
    ("Hope-3 is ahead of Hope-1 on both languages at the end", _both, "hope-3", "hope-1"),
    ("Hope-3 nearly recovers learning alone (over 90%)", _recovered, "hope-3", None),
    ("Hope-1 nearly recovers learning alone (over 90%)", _recovered, "hope-1", None),
    ("Hope-3 keeps over 90% of what the first course gained", _retained, "hope-3", None),
    ("Hope-1 keeps over 90% of what the first course gained", _retained, "hope-1", None),
    ("Hope-3 is ahead of embeddings alone (Hope-0) at the end", _both, "hope-3", "hope-0"),
    ("frequencies are ahead of rates at the end", _both, "hope-3", "rates-3"),
    ("Hope-3 is ahead of in-context learning at the end", _both, "hope-3", "icl"),
)


def write_page(store: Store, folder: Path, *, quick: bool = False) -> Path | None:
    """Write languages.md from what is stored; None where there is nothing.

    Quick runs are a page of their own.
    """
    part = tables(store, quick=quick)
    if not part:
        return None
    note = folder / "languages_note.md"
    if quick:
        part.insert(1, "**Quick runs**: they show that everything runs, not what is better.\n")
    elif note.is_file():
        part += ["", note.read_text(encoding="utf-8")]
    path = folder / ("languages_quick.md" if quick else "languages.md")
    write_atomic(path, ("\n".join(part).rstrip() + "\n").encode())
    return path


def tables(store: Store, *, quick: bool = False) -> list[str]:
    """Tables and verdicts from the stored runs; nothing where there are none."""
    found: dict[str, dict[str, dict[int, Run]]] = {}
    for run in (run for run in store.named("seed") if _ours(run, quick)):
        facts = run["facts"]
        key = f"{facts['problem']}: {facts['order']}"
        found.setdefault(key, {}).setdefault(facts["learner"], {})[facts["seed"]] = run
    if not found:
        return []
    rows, claims = [], list[tuple[str, ...]]()
    for problem, learners in sorted(found.items()):
        for name in (each for each in LEARNERS if each in learners):
            runs = learners[name]
            cells = [show([run[column] for run in runs.values()], 1) for column in COLUMNS]
            chosen = next(iter(runs.values()))["facts"]["setting"]
            setting = ", ".join(f"{key} {value}" for key, value in chosen.items())
            rows.append((problem, name, *cells, setting, len(runs)))
    for claim, measure, ours, theirs in CLAIMS:
        for problem, learners in sorted(found.items()):
            mine, other = (
                {seed: measure(run) for seed, run in learners.get(name or "", {}).items()}
                for name in (ours, theirs)
            )
            gaps = list(mine.values()) if theirs is None else paired(mine, other)
            if not gaps:
                continue
            gap = interval(gaps)
            said = f"**{verdict(gap)}**", f"{gap.mean:+.1f} ± {gap.half:.1f}"
            if len(gaps) < ENOUGH:
                said = f"unfinished: {len(gaps)} of {ENOUGH} seeds", ""
            claims.append((claim, problem, *said))
    head = ["problem", "learner", *COLUMNS, "setting", "seeds"]
    verdicts = table(["claim", "problem", "verdict", "difference"], claims)
    return [HEAD, *table(head, rows), "", *verdicts]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and write the page."""
    parser = common("languages", (__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many pairs of languages")
    parser.add_argument("--manchu", type=Path, help="a folder with the Manchu set")
    given = parser.parse_args(arguments)
    if given.seeds < 1:
        raise ValueError(f"--seeds must be at least 1; got {given.seeds}")
    ready("languages", given)
    copy = None if given.quick else given.out / "languages.json"
    store = Store(given.runs / "languages", study="languages", copy=copy, needs=("facts",))
    if not given.report:
        run_all(
            given.data,
            given.runs,
            store,
            seeds=1 if given.quick else given.seeds,
            manchu_folder=given.manchu,
            quick=given.quick,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    given.out.mkdir(parents=True, exist_ok=True)
    path = write_page(store, given.out, quick=given.quick)
    if path is None:
        raise ValueError(f"{given.runs}: no finished runs yet, so there is no page")
    if copy is not None:
        store.gather(packed)
    print(path)
    return 0
