"""Ablations of Hope (Table 6): language models at half the bytes, one thing changed at a time.

    python -m studies ablations         run what is missing, write docs/results/ablations.md

Training is that of `studies.lm`; every ablation takes the rate that was best for Hope, so that a
row differs from the first in one thing only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from studies import default, lm
from studies.harness.page import Page
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study
from studies.harness.tables import Measure, table_page

ARMS = {name: default.ARMS[name] for name in ("hope", "hope_printed")} | default.ABLATIONS


@dataclass(frozen=True, kw_only=True)
class Protocol(lm.Protocol):
    """The settings that were fixed before the first run."""

    tokens_per_parameter: float = 5.0
    trial_share: float = 0.2
    seeds: tuple[int, ...] = (0, 1)
    analysis: str = "validation loss; two seeds, so an interval is wide and three would be needed"


QUICK = Protocol(
    tokens_per_parameter=0.0, length=64, rows=2, rates=(6e-3, 12e-3), seeds=(0,), valid_windows=4
)
LIMITS = (
    "Two seeds: differences are shown, and nothing is claimed from fewer than three.",
    "All rows take Hope's learning rate; an ablation that wants another one is not given it.",
)


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Findings and tables."""
    loss = Measure(name="valid", title="validation loss, nats per byte", higher=False)
    title = "Ablations of Hope (Table 6)"
    return table_page(study, runs, title=title, measures=(loss,), limits=LIMITS)


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    arms = list(ARMS)[:3] if quick else list(ARMS)

    def make(job: Job, context: Context) -> Run:
        model, run = lm.trained(job, context, protocol, ARMS[job.arm], lm.SIZES["0.3M"])
        return run | {"valid": lm.validated(model, context, protocol)}

    return Study(
        name="ablations",
        protocol=protocol,
        tasks=("0.3M",),
        arms={arm: ARMS[arm].title for arm in arms},
        seeds=protocol.seeds,
        tuning_seed=protocol.tuning_seed,
        settings={"hope": [{"rate": rate} for rate in protocol.rates]},
        borrowed={arm: "hope" for arm in arms if arm != "hope"},
        make=make,
        judged="valid",
        lower=True,
        page=page,
        page_name="ablations",
        needs=("seconds", "valid", "parameters"),
    )
