"""Loss against the length of the context (Fig. 10): the language models of `lm` read books to 64K.

    python -m studies context        run what is missing, write docs/results/context.md

Nothing is trained: the models that the study `lm` kept (runs/lm/models) read streams of books they
never saw. The loss is that of the last bytes before each length, so that every context is judged on
texts of the same kind. Attention reads as far as its cost allows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nestling.report import Line, lines
from studies import lm
from studies.harness.models import kept_model, parameters
from studies.harness.page import Page, Section, table
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, by_protocol, cells
from studies.harness.tables import unfinished
from studies.harness.verdict import ENOUGH, interval, show, verdict
from studies.tasks import text
from studies.tasks.reading import bare, short

K = 1 << 10


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    lengths: tuple[int, ...] = (256, 512, 1 * K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K)
    attention: int = 16 * K  # how far attention reads
    streams: int = 8
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    analysis: str = (
        "bytes of held-out books; the loss of the second half of every length; a model gains from"
        " context where the longest length is better than the trained one (2,048), paired by seed"
    )


QUICK = Protocol(lengths=(64, 128), streams=2, seeds=(0,))


@torch.no_grad()
def losses(model: Any, ids: Tensor, lengths: Sequence[int], piece: int = 512) -> dict[str, float]:
    """The mean loss of the bytes in the second half of each length, reading in constant memory."""
    cache, each = model.make_cache(), []
    for start in range(0, max(lengths), piece):
        stop = min(start + piece, max(lengths))
        read = model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True)
        wanted = ids[:, start + 1 : stop + 1]
        loss = cross_entropy(read.logits.transpose(1, 2), wanted, reduction="none")
        each.append(loss.mean(0))
    found = torch.cat(each)
    return {str(length): found[length // 2 : length].mean().item() for length in lengths}


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Let a kept model read."""
    folder = _models(context) / f"{job.task}-{job.arm}-{job.seed}"
    model = kept_model(folder)
    if model is None and protocol is QUICK:  # which only shows that it runs
        model = bare(lm.MODELS[job.arm], lm.SIZES[job.task]).eval()
    if model is None:
        raise ValueError(f"{folder}: no such model; run python -m studies lm first")
    attends = "attention" in (model.config.mixer, *_names(model.config.mixer))
    lengths = [n for n in protocol.lengths if not attends or n <= protocol.attention]
    ids = text.windows(text.books(context.data), protocol.streams, max(lengths), seed=9)
    begin = time.process_time()
    found = losses(model, ids, lengths)
    seconds = time.process_time() - begin
    return {"losses": found, "parameters": parameters(model), "seconds": seconds}


def _names(mixer: Any) -> tuple[str, ...]:
    return tuple(mixer) if isinstance(mixer, list | tuple) else (mixer,)


def _models(context: Context) -> Path:
    """Beside the models of this study lie those of `lm`."""
    return context.models.parent.parent / "lm" / "models"


LIMITS = (
    "Byte models of 300,000 parameters, trained in windows of 2,048 bytes; what is further away"
    " than that was never in one training window.",
    "The paper's Fig. 10 has no numbers in its text, so that no curve of it is drawn here.",
)


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Findings, the picture of Fig. 10, a table."""
    found = cells(runs)
    drawn, rows, said = [], [], []
    trained = lm.Protocol().length
    for arm, title in study.arms.items():
        cell = found.get((study.tasks[0], arm))
        if cell is None:
            continue
        each = [run["losses"] for run in cell.runs.values()]
        lengths = sorted(map(int, each[0]))
        means = [interval([losses[str(n)] for losses in each]) for n in lengths]
        drawn.append(Line(title, lengths, [m.mean for m in means]))
        rows.append((title, *(show([losses[str(n)] for losses in each]) for n in lengths)))
        if len(each) >= ENOUGH and trained in lengths:
            gap = interval([losses[str(lengths[-1])] - losses[str(trained)] for losses in each])
            word = verdict(gap, higher=False, words=("gains", "loses", "neither gains nor loses"))
            said.append(
                f"{title} {word} from {short(trained)} to {short(lengths[-1])}:"
                f" {gap.mean:+.4f} ± {gap.half:.4f} nats per byte."
            )
    wide = max((len(row) for row in rows), default=1)
    rows = [(*row, *("-",) * (wide - len(row))) for row in rows]
    head = ["", *map(short, study.protocol.lengths)]
    return Page(
        title="Loss against the length of the context",
        command="python -m studies context",
        findings=said or [f"Nothing is claimed: no arm has {ENOUGH} seeds."],
        limits=[*unfinished(study, found), *LIMITS],
        protocol=study.protocol,
        picture=lines(drawn, x="bytes of context", y="loss (nats per byte)", log_x=True),
        caption="Loss against the length of the context",
        sections=[Section(title="Loss, mean and 95% interval", body=table(head, rows))],
    )


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it, on the models of `lm --quick`."""
    protocol = QUICK if quick else Protocol()
    arms = lm.study(quick).arms
    return by_protocol(
        protocol,
        {arm: lm.MODELS[arm].title for arm in arms},
        make,
        name="context",
        tasks=("0.3M",),
        judged="seconds",
        page=page,
        page_name="context",
        needs=("seconds", "losses"),
    )
