"""Ablations of Hope (Table 6): language models at half the bytes, one thing changed at a time.

    python -m studies ablations         run what is missing, write docs/results/ablations.md

Training is that of `studies.lm`; every ablation takes the rate that was best for Hope, so that a
row differs from the first in one thing only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from studies import default, lm
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, by_rate
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


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Train one model, and judge it by its validation loss."""
    model, run = lm.trained(job, context, protocol, ARMS[job.arm], lm.SIZES["0.3M"])
    return run | {"valid": lm.validated(model, context, protocol)}


LOSS = Measure(name="valid", title="validation loss, nats per byte", higher=False)


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    arms = list(ARMS)[:3] if quick else list(ARMS)
    return by_rate(
        protocol,
        {arm: ARMS[arm].title for arm in arms},
        make,
        name="ablations",
        tasks=("0.3M",),
        borrowed={arm: "hope" for arm in arms if arm != "hope"},
        judged="valid",
        page=partial(
            table_page, title="Ablations of Hope (Table 6)", measures=(LOSS,), limits=LIMITS
        ),
        page_name="ablations",
        needs=("seconds", "valid", "parameters"),
    )
