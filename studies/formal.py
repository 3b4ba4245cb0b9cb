"""State tracking (Table 5), and length generalisation on regular tasks.

    python -m studies formal            run what is missing, write docs/results/state_tracking.md

Six formal languages, trained on lengths up to 50 and tested on 51 to 100: a string counts only if
every position is right. Four regular tasks, trained on lengths up to 40 and tested on 41 to 100:
the answer at the end. No positional encoding; the last weights are tested, whatever they are.
Rates are chosen on a seed of their own by training and testing on shorter strings, so nothing is
chosen by the lengths that are reported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from nestling.models import presets
from studies import default
from studies.harness.loop import descend
from studies.harness.models import IGNORE, parameters, predict, weighted
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, by_rate
from studies.harness.tables import Measure, table_page
from studies.tasks.formal import BIN0, BIN1, LANGUAGES, Language, Strings, score, strings
from studies.tasks.regular import LONG, REGULAR, SHORT

NO_POSITION = default.ARMS["transformer_conv"]
ARMS: dict[str, default.Model] = {
    "hope": default.ARMS["hope"],
    "hope_printed": default.ARMS["hope_printed"],
    "transformer_conv": replace(NO_POSITION, mixer={**NO_POSITION.mixer, "rope": 0.0}),
    "titans": default.ARMS["titans"],
    "deltanet": default.ARMS["deltanet"],
    "gated_delta": default.ARMS["gated_delta"],
    "linear": default.ARMS["linear"],
    "lstm": default.ARMS["lstm"],
}
TASKS: dict[str, Language] = LANGUAGES | REGULAR
SIZE = presets.Size(width=32, layers=1, heads=4, vocabulary=16, parameters=24_000)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    strings: int = 10_000
    rows: int = 16
    steps: int = 600
    longer: tuple[str, ...] = ("shuffle-2", *REGULAR)
    longer_steps: int = 2_400
    tested: int = 2_000
    rates: tuple[float, ...] = (3e-3, 1e-2)
    trial_lengths: tuple[tuple[int, int], tuple[int, int]] = ((2, 25), (26, 50))
    weight_decay: float = 0.01
    seeds: tuple[int, ...] = (40, 41, 42, 43, 44)
    tuning_seed: int = 100
    analysis: str = "share right beyond the trained length decides; paired by seed, 95%, five seeds"


QUICK = Protocol(strings=64, rows=4, steps=2, longer_steps=2, tested=16, rates=(1e-2,), seeds=(40,))


def answers(language: Language, found: Strings) -> Strings:
    """Targets are tokens of their own, after the language's symbols."""
    real = found.targets != IGNORE
    return Strings(
        tokens=found.tokens,
        targets=torch.where(real, found.targets + language.symbols, found.targets),
    )


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Train on short strings, test on short and on long ones."""
    language = TASKS[job.task]
    short, long = (SHORT, LONG) if job.task in REGULAR else (BIN0, BIN1)
    if job.trial:
        short, long = protocol.trial_lengths
    torch.manual_seed(job.seed)
    model = default.build(ARMS[job.arm], SIZE)
    data = answers(language, strings(language, protocol.strings, short, seed=1000 + job.seed))

    def loss(step: int) -> Tensor:
        random = torch.Generator().manual_seed(1_000_003 * (job.seed + 1) + step)
        rows = torch.randint(len(data), (protocol.rows,), generator=random)
        targets = data.targets[rows]
        return weighted(model(data.tokens[rows]), targets, (targets != IGNORE).float())

    steps = protocol.longer_steps if job.task in protocol.longer else protocol.steps
    done = descend(model, loss, job, context, steps=steps, decay=protocol.weight_decay, end=0.02)
    run: Run = {"parameters": parameters(model), "loss": done.last(), "seconds": done.seconds}
    for name, window in (("short", short), ("long", long)):
        run[name], run[f"{name} positions"] = tested(model, language, window, job.seed, protocol)
    return run | {"judged": run["short"] + run["long"]}


def tested(
    model: nn.Module, language: Language, window: tuple[int, int], seed: int, protocol: Protocol
) -> tuple[float, float]:
    """The share of strings, and of positions, that are right."""
    test = answers(language, strings(language, protocol.tested, window, seed=50_000 + seed))
    return score(predict(model, test.tokens), test.targets)


LIMITS = (
    "One layer of width 32 and 24,000 parameters; the published training is longer (state tracking"
    " to convergence, regular tasks 10,000 steps of 128).",
    "Of Transformers only the one with short convolutions and no positions is run.",
)


MEASURES = (
    Measure(name="long", title="right beyond the trained length, %", higher=True, share=True),
    Measure(name="short", title="right at trained lengths, %", higher=True, share=True),
)


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    arms = ("hope", "deltanet") if quick else tuple(ARMS)
    return by_rate(
        protocol,
        {arm: ARMS[arm].title for arm in arms},
        make,
        name="formal",
        tasks=("parity", "modular arithmetic") if quick else tuple(TASKS),
        judged="judged",
        lower=False,
        page=partial(
            table_page,
            title="State tracking (Table 5) and length generalisation",
            measures=MEASURES,
            limits=LIMITS,
        ),
        page_name="state_tracking",
        needs=("seconds", "parameters", "long"),
    )
