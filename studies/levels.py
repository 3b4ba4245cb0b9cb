"""Levels that learn while the model reads, trained for that (Eq. 71, 73): long text.

    python -m studies levels            run what is missing, write docs/results/levels.md
    python -m studies levels --costs    measure what a training step of every arm costs

Models trained plain are those of `studies.lm` (kept there, or trained anew where they are missing),
and so is the default Hope on as many bytes (a gated DeltaNet whose MLP learns in training is its
control); the others have as much *training compute*: `Protocol.costs` are processor seconds of a
training step against that of the Hope trained plain (of the Hope-Attention trained plain for the
other one), measured by `--costs` before the first run; an arm whose steps cost more takes fewer of
them. All Hopes train at the rate that trials of `studies.lm` chose for the one trained plain. Arms
over few books read these several times; there text is what is scarce, so all take as many steps.
All are asked on novels they have not read, in streams up to 16 times the trained length. Models
that were trained plain are asked with frozen levels and with levels switched on: at the best of
four multiples of the rates, in the last layer or in all, on books that are neither trained on nor
in a table; so are the rivals, whose MLPs are one level. `1M` are two arms of a million parameters
and five bytes each. The models are kept for `studies.kept`.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.models import MemoryCache, NestlingForCausalLM
from nestling.report import Line, lines
from studies import default, lm
from studies.harness.command import run_study
from studies.harness.models import keep_model, kept_model, loss_of, parameters
from studies.harness.page import Page, Section, table
from studies.harness.store import Run
from studies.harness.study import Cell, Context, Job, Study, cells
from studies.harness.tables import Measure, table_page
from studies.harness.verdict import interval, judged, paired, show
from studies.tasks import text

SIZE = lm.SIZES["0.3M"]
LARGE = "1M"
"""The task of larger models, of the size of this name in `studies.lm`."""
FROM_LM = {
    "plain": "hope_plain",
    "hope_bytes": "hope",
    "transformer": "transformer",
    "gated_delta": "gated_delta",
}
"""Arms that are models of `studies.lm`, by their names there."""
FEW = ", few books"
ARMS = {
    **default.LEVELS,
    "hope_few": default.ARMS["hope"],
    **{f"{name}_few": default.LEVELS[name] for name in ("plain", "transformer")},
}


@dataclass(frozen=True, kw_only=True)
class Protocol(lm.Protocol):
    """The settings that were fixed before the first run."""

    costs: dict[str, float] = field(
        default_factory=lambda: {
            "hope": 1.17,
            "one": 1.12,
            "by_rate": 1.15,
            "every": 2.0,
            "attention": 1.09,
        }
    )
    hope_rate: float = 12e-3
    attention_rate: float = 3e-3
    rival_rate: float = 6e-3  # where a model of `studies.lm` has to be trained anew
    large_rate: float = 8e-3
    large_cost: float = 1.08  # of the default Hope's step
    large_tokens_per_parameter: float = 5.0
    few_bytes: int = 250_000
    epochs: int = 4
    switched_on: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    development: tuple[str, ...] = text.DEVELOPMENT
    held_out: tuple[str, ...] = text.HELD_OUT
    effect_times: int = 4
    analysis: str = (
        "mean loss of positions beyond the trained length, held-out books; paired by seed, 95% by"
        " Student's t; goals: 0.10 ahead of plain frozen, 0.03 ahead of plain switched on"
    )

    def large_steps(self, arm: str) -> int:
        """Steps of training of a larger model: as much compute for both."""
        tokens = self.large_tokens_per_parameter * lm.SIZES[LARGE].parameters
        cost = self.large_cost if arm == "hope" else 1.0
        return max(2, round(tokens / (self.rows * self.length) / cost))

    def rate_of(self, arm: str) -> float:
        """The rate at which an arm is trained."""
        if ARMS[arm].model == "hope":
            return self.hope_rate
        return self.attention_rate if ARMS[arm].model == "hope_attention" else self.rival_rate

    def steps_of(self, arm: str, *, trial: bool) -> int:
        """Steps of training: as much compute as the plain Hope's; over few books, of data."""
        if arm.endswith("_few"):
            return max(2, round(self.few_bytes * self.epochs / (self.rows * self.length)))
        return max(2, round(self.steps(SIZE, trial=trial) / self.costs.get(arm, 1.0)))


QUICK = Protocol(
    tokens_per_parameter=0.0,
    large_tokens_per_parameter=0.0,
    length=160,
    few_bytes=320,
    epochs=1,
    rates=(6e-3, 12e-3),
    switched_on=(0.1, 0.4),
    valid_windows=4,
    streams=2,
    times=2,
    effect_times=1,
    seeds=(0,),
)


class Books(NamedTuple):
    """Bytes [N] of each kind."""

    train: Tensor
    development: Tensor
    held_out: Tensor


def books(context: Context, protocol: Protocol, arm: str = "") -> Books:
    """The training texts (over few books the beginnings of novels), and the novels that ask."""
    found = text.novels(context.data)
    kept = (*protocol.development, *protocol.held_out)
    if arm.endswith("_few"):
        seen = text.joined(book for name, book in found.items() if name not in kept)
        seen = seen[: protocol.few_bytes]
    else:
        seen = text.corpus(context.data).train
    kinds = protocol.development, protocol.held_out
    return Books(seen, *(text.joined(found[name] for name in names) for names in kinds))


def trained(job: Job, context: Context, protocol: Protocol) -> tuple[Any, Run]:
    """Train one arm; the model, and its numbers."""
    data = books(context, protocol, job.arm).train
    size, steps = SIZE, protocol.steps_of(job.arm, trial=job.trial)
    if job.task == LARGE:
        size, steps = lm.SIZES[LARGE], protocol.large_steps(job.arm)
        job = job._replace(setting={"rate": protocol.large_rate})
    return lm.trained(job, context, protocol, ARMS[job.arm], size, steps=steps, data=data)


def from_lm(job: Job, context: Context, protocol: Protocol) -> tuple[Any, Run]:
    """A model that `studies.lm` trained and kept, and its numbers; without it, one trained now."""
    name = f"0.3M-{FROM_LM[job.arm]}-{job.seed}"
    model = kept_model(context.models.parent.parent / "lm" / "models" / name)
    if model is None:
        return trained(job, context, protocol)
    steps = protocol.steps_of(job.arm, trial=False)
    tokens = steps * protocol.rows * protocol.length
    run = {"steps": steps, "tokens": tokens, "parameters": parameters(model), "seconds": 0.0}
    return model, run


def obtained(arm: str, seed: int, rate: float, context: Context, protocol: Protocol) -> Any:
    """The trained model of a run, as it was kept, or trained now and kept."""
    folder = context.models / f"{arm}-{seed}"
    model = kept_model(folder)
    if model is None:
        job = Job("books", arm, {"rate": rate}, seed)
        model, _ = (from_lm if arm in FROM_LM else trained)(job, context, protocol)
        keep_model(model, folder, {"study": "levels", "arm": arm, "seed": seed})
    return model


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Train an arm, read held-out books with it, and keep it."""
    kept = job.arm in FROM_LM and job.task != LARGE
    model, run = (from_lm if kept else trained)(job, context, protocol)
    data = books(context, protocol)
    plain = not model.config.learns_in_training
    asked = default.switched(model, 0.0) if plain else model
    size = {"streams": protocol.streams, "length": protocol.length}
    run["development"] = text.by_position(asked, data.development, **size, times=1, seed=9)[0]
    if job.trial:
        return run
    facts = {"study": "levels", "arm": job.arm, "seed": job.seed}
    name = f"{job.arm}-{job.seed}"
    name = name if job.task != LARGE else f"{LARGE}-{name}"
    keep_model(model, context.models / name, facts)
    size["times"] = protocol.times
    run["positions"] = text.by_position(asked, data.held_out, **size)
    run["beyond"] = statistics.fmean(run["positions"][1:])
    return run | (_switched_on if plain else _levels)(model, data, protocol)


def _levels(model: Any, data: Books, protocol: Protocol) -> Run:
    """What the levels are worth: all of them, each alone, and how far each one went."""
    size = {"streams": protocol.streams, "length": protocol.length, "times": protocol.effect_times}
    frozen = text.by_position(model, data.held_out, **size, learn=False)
    together = text.by_position(model, data.held_out, **size)
    names = [level.name for level in model.config.memory_levels if level.active]
    worth = {}
    for name in names:
        some = [each for each in names if each != name]
        without = text.by_position(model, data.held_out, **size, learn=some or False)
        worth[name] = statistics.fmean(without) - statistics.fmean(together)
    ids = text.windows(data.held_out, 1, protocol.effect_times * protocol.length, seed=8)
    with torch.no_grad():
        updates = model(ids, use_cache=False, measure=True).updates or ()
    far = {update.level: float(update.distance.mean()) for update in updates}
    return {
        "learning": statistics.fmean(frozen) - statistics.fmean(together),
        "worth": worth,
        "distance": far,
        "memory": _memory(model, ids),
    }


def _memory(model: Any, ids: Tensor) -> float:
    """Numbers a sequence's fast weights hold, in thousands."""
    cache = MemoryCache(model.config.num_hidden_layers)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    levels = [level for state in cache.learned.states for level in state.levels]
    return sum(part.numel() for lv in levels for part in lv.fast if part is not None) / 1e3


def _switched_on(model: Any, data: Books, protocol: Protocol) -> Run:
    """A model that was trained plain reads with learning levels: at the best of some factors of
    their rates, in the last layer or in all."""
    size = {"streams": protocol.streams, "length": protocol.length}
    tried = {}
    for factor, every in itertools.product(protocol.switched_on, (False, True)):
        some = {**size, "streams": max(1, protocol.streams // 2), "times": protocol.times // 2}
        asked = default.switched(model, factor, every=every)
        found = text.by_position(asked, data.development, **some, seed=9)
        tried[factor, every] = statistics.fmean(found)
    factor, every = min(tried, key=tried.__getitem__)
    best = default.switched(model, factor, every=every)
    positions = text.by_position(best, data.held_out, **size, times=protocol.times)
    return _levels(best, data, protocol) | {
        "on_rate": factor,
        "on_every": every,
        "on_tried": {
            f"{factor:g}{' in all layers' if every else ''}": loss
            for (factor, every), loss in tried.items()
        },
        "on_positions": positions,
        "on_beyond": statistics.fmean(positions[1:]),
    }


LIMITS = (
    "300,000 parameters, ten bytes of text per parameter for the plain models, English in bytes;"
    " larger or longer trained models may rank otherwise.",
    "Compute is processor time of one thread at this size.",
    "The default Hope (which layers learn, chunks, rates, retention) was chosen on two development"
    " novels with models of seed 900 and ten bytes per parameter (docs/models.md); about ten forms"
    " were trained, one seed each. Its rivals' level was not searched for: it has the fastest"
    " level's chunk and rate.",
    "Earlier forms of Hope stood in this table: levels of all layers, chunks 256, 512 and 1,024,"
    " rate 1 or 4, at 1.44 times the cost of a plain step. Trained so at equal compute they were"
    " 0.024 ± 0.025 (rate 1) and 0.014 ± 0.041 (rate 4) behind plain training with levels switched"
    " on, and on as many bytes 0.033 ± 0.024 ahead; one level was not separable from three.",
    "Few books: 250,000 bytes four times, a third of the steps.",
    "At 1M both arms have one rate, which was not tuned.",
)


class Question(NamedTuple):
    """An arm against another; `on`: asked with levels switched on. goal: the lead aimed at."""

    ours: str
    theirs: str
    goal: float = 0.0
    our_on: bool = False
    their_on: bool = False
    task: str = "books"


QUESTIONS: dict[str, tuple[Question, ...]] = {
    "At equal compute": (
        Question("hope", "plain", goal=0.10),
        Question("hope", "plain", goal=0.03, their_on=True),
        Question("hope", "plain", goal=0.10, task=LARGE),
        Question("hope", "plain", goal=0.03, their_on=True, task=LARGE),
        Question("attention", "attention_plain", goal=0.10),
        Question("attention", "attention_plain", goal=0.03, their_on=True),
    ),
    "On as many bytes": (
        Question("hope_bytes", "plain", goal=0.10),
        Question("hope_bytes", "plain", goal=0.03, their_on=True),
        Question("hope_bytes", "gated_delta_bytes"),
        Question("gated_delta_bytes", "gated_delta", their_on=True),
    ),
    "Over few books, as many steps": (
        Question("hope_few", "plain_few"),
        Question("hope_few", "plain_few", their_on=True),
    ),
    "Several levels, and where": (
        Question("hope", "one"),
        Question("hope", "by_rate"),
        Question("hope", "every"),
    ),
    "Levels that learn while they read, of models trained plain": (
        Question("plain", "plain", our_on=True),
        Question("plain", "gated_delta", our_on=True, their_on=True),
        Question("plain", "transformer", our_on=True, their_on=True),
    ),
}
"""What the page answers, as far as there are runs."""


def findings(study: Study, found: Mapping[tuple[str, str], Cell]) -> list[str]:
    """The questions of the study and what the numbers say, beyond the trained length."""

    def values(task: str, arm: str, on: bool) -> dict[int, float]:
        return found.get((task, arm), Cell({})).values("on_beyond" if on else "beyond")

    def called(arm: str, on: bool) -> str:
        plain = not default.configuration(ARMS[arm], SIZE).learns_in_training
        how = ", learning" if on else ", frozen" if plain else ""
        return study.arms.get(arm, arm) + how

    said = []
    for head, asked in QUESTIONS.items():
        answers = []
        for ask in asked:
            ours = values(ask.task, ask.ours, ask.our_on)
            gaps = paired(ours, values(ask.task, ask.theirs, ask.their_on))
            if gaps:
                aim = f", goal {-ask.goal:g}" if ask.goal else ""
                both = f"{called(ask.ours, ask.our_on)} against {called(ask.theirs, ask.their_on)}"
                both = f"{ask.task}: {both}" if ask.task == LARGE else both
                answers.append(f"{both}: {judged(gaps, higher=False)}{aim}")
        if answers:
            said.append(f"{head} (nats per byte, negative is ahead): {'; '.join(answers)}.")
    return said


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Findings, the loss against position, what levels are worth."""
    found = cells(runs)
    length, drawn, rows, worth, tried = study.protocol.length, [], [], [], []
    for arm, title in study.arms.items():
        cell = found.get(("books", arm))
        if cell is None:
            continue
        some = list(cell.runs.values())
        still = f"{title}, frozen" if "on_positions" in some[0] else title
        for name, what in (("positions", still), ("on_positions", f"{title}, learning")):
            each = list(zip(*(run[name] for run in some if name in run), strict=True))
            if each:
                x = [length * (i + 0.5) for i in range(len(each))]
                drawn.append(Line(what, x, [interval(values).mean for values in each]))
                rows.append((what, *(show(values) for values in each)))
        if "worth" in some[0]:
            together = show([run["learning"] for run in some], sign="+")
            for level in some[0]["worth"]:
                one = show([run["worth"][level] for run in some], 4, sign="+")
                far = show([run["distance"].get(level, 0.0) for run in some], 2)
                worth.append((title, together, level, one, far))
        if "on_tried" in some[0]:
            each_rate = (
                f"{rate}: {show([run['on_tried'][rate] for run in some])}"
                for rate in some[0]["on_tried"]
            )
            tried.append((title, "; ".join(each_rate)))
    ends = [f"to {length * (i + 1):,}" for i in range(len(rows[0]) - 1)] if rows else []
    more = (
        Section(title="Loss against position", body=table(["", *ends], rows)),
        Section(
            title="What the levels are worth (loss without, less loss with), and how far they went",
            body=table(["", "all levels", "level", "this level", "distance"], worth),
        ),
        Section(title="Rates of levels switched on", body=table(["", "development loss"], tried)),
        Section(
            title="Training",
            body=table(
                ["", "steps", "bytes read", "processor s", "cost of a step"],
                [
                    (
                        title,
                        first["steps"],
                        f"{first['tokens']:,}",
                        f"{statistics.fmean(r['seconds'] for r in cell.runs.values()):.0f}",
                        study.protocol.costs.get(arm.removesuffix("_few"), "-"),
                    )
                    for arm, title in study.arms.items()
                    if (cell := found.get(("books", arm))) is not None
                    and (first := next(iter(cell.runs.values())))
                ],
            ),
        ),
    )
    measures = (
        Measure(name="beyond", title="loss beyond the trained length, nats per byte", higher=False),
        Measure(name="on_beyond", title="the same, levels learning", higher=False),
    )
    made = table_page(
        study,
        runs,
        title="Levels that learn, on long text",
        measures=measures,
        limits=LIMITS,
        more=more,
        picture=lines(drawn, x="position (bytes)", y="loss (nats per byte)"),
        caption="Loss against position",
    )
    return Page(**{**made.__dict__, "findings": findings(study, found)})


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    arms = ("hope", "plain", "transformer", "hope_few") if quick else tuple(ARMS)
    return Study(
        name="levels",
        protocol=protocol,
        tasks=("books",),
        more_tasks=(LARGE,),
        arms={a: ARMS[a].title + (FEW if a.endswith("_few") else "") for a in arms},
        seeds=protocol.seeds,
        tuning_seed=protocol.tuning_seed,
        settings={},
        given={arm: {"rate": protocol.rate_of(arm)} for arm in arms},
        make=lambda job, context: make(job, context, protocol),
        judged="development",
        lower=True,
        page=page,
        page_name="levels",
        needs=("seconds", "parameters"),
    )


def costs(protocol: Protocol, repeats: int) -> dict[str, float]:
    """Processor seconds of every arm's training step against the plain Hope's, in turns."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ids = torch.randint(0, 256, (protocol.rows, protocol.length + 1))
    names = [arm for arm in ARMS if not arm.endswith("_few")]
    models = {n: NestlingForCausalLM(default.configuration(ARMS[n], SIZE)).train() for n in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        for name, model in models.items():
            begin = time.process_time()
            loss_of(model, ids).backward()
            model.zero_grad(set_to_none=True)
            if turn:
                seconds[name].append(time.process_time() - begin)
            print(f"{name} {time.process_time() - begin:.2f} s", file=sys.stderr, flush=True)
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    return {name: round(value / middle["plain"], 2) for name, value in middle.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run."""
    given = list(arguments or ())
    if "--costs" in given:
        print(costs(QUICK if "--quick" in given else Protocol(), repeats=3))
        return 0
    return run_study(study, __doc__ or "", arguments)
