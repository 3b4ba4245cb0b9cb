"""M3 at real length (Fig. 11): CIFAR-10 with a small ViT and a language model, whole epochs.

    python -m studies optimizers        run what is missing, write docs/results/optimizers.md

Arms share weights, batches, schedule, clipping and weight decay for a seed, and have the same
number of rates. `equal steps` gives every arm the same steps; in `equal time` an arm takes as many
steps as fit into AdamW's time, by the processor time of a few steps of both before it starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from nestling.optim import M3, AdaMuon, Muon
from studies.harness.loop import cosine, train
from studies.harness.models import parameters
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, by_rate
from studies.harness.tables import Measure, table_page
from studies.optim.networks import LanguageModel, ViT, cross_entropy
from studies.optim.study import Maker, adamw, orthogonal
from studies.optim.tasks import Batch, cifar
from studies.tasks import text

ARMS: dict[str, tuple[str, Maker]] = {
    "m3": ("M3", orthogonal(M3)),
    "m3_fast": ("M3 without its slow momentum", orthogonal(M3, slow_weight=0.0)),
    "m3_literal": ("M3 as printed", orthogonal(M3, literal=True)),
    "muon": ("Muon", orthogonal(Muon)),
    "adamuon": ("AdaMuon", orthogonal(AdaMuon)),
    "adamw": ("AdamW", adamw),
}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    image_epochs: float = 10.0
    image_rows: int = 64
    text_tokens: int = 5_000_000
    text_rows: int = 16
    length: int = 128
    trial_share: float = 0.2
    rates: tuple[float, ...] = (4e-3, 8e-3, 16e-3)
    adamw_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    literal_rates: tuple[float, ...] = (1e-5, 3e-5, 1e-4)
    timed: int = 8
    valid_windows: int = 128
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    tuning_seed: int = 100
    analysis: str = "test loss at the end; paired by seed, 95%, five seeds; steps are in the runs"


QUICK = Protocol(
    image_epochs=0.001,
    text_tokens=256,
    image_rows=8,
    text_rows=2,
    length=32,
    trial_share=1.0,
    rates=(8e-3,),
    adamw_rates=(2e-3,),
    literal_rates=(3e-5,),
    timed=1,
    valid_windows=4,
    seeds=(0,),
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A network, batches by their number, batches to test on, and how many steps."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]  # seed, step
    test: Callable[[], list[Batch]]
    steps: int


def images(data: Path, protocol: Protocol) -> Task:
    """CIFAR-10, mirrored at random, epoch after epoch."""
    rows = protocol.image_rows

    def batch(seed: int, step: int) -> Batch:
        pictures, labels = cifar(data, "train_10000")
        epoch, place = divmod(step * rows, len(labels) - rows)
        flow = torch.Generator().manual_seed(1_000_003 * (seed + 1) + epoch)
        chosen = torch.randperm(len(labels), generator=flow)[place : place + rows]
        flip = torch.rand(len(chosen), generator=flow) < 0.5
        shown = pictures[chosen]
        return torch.where(flip[:, None, None, None], shown.flip(-1), shown), labels[chosen]

    def test() -> list[Batch]:
        pictures, labels = cifar(data, "test_2000")
        return list(zip(pictures.split(500), labels.split(500), strict=True))

    return Task(
        model=lambda: ViT(width=64, heads=4, depth=4, size=32, patch=4, channels=3),
        batch=batch,
        test=test,
        steps=max(2, round(protocol.image_epochs * 10_000 / rows)),
    )


def words(data: Path, protocol: Protocol) -> Task:
    """Bytes of books and articles."""
    length, rows = protocol.length, protocol.text_rows

    def batch(seed: int, step: int) -> Batch:
        place = 1_000_003 * (seed + 1) + step
        ids = text.windows(text.corpus(data).train, rows, length, place)
        return ids[:, :-1], ids[:, 1:]

    def test() -> list[Batch]:
        ids = text.windows(text.corpus(data).valid, protocol.valid_windows, length, seed=7)
        return [(part[:, :-1], part[:, 1:]) for part in ids.split(32)]

    return Task(
        model=lambda: LanguageModel(256, length),
        batch=batch,
        test=test,
        steps=max(2, protocol.text_tokens // (rows * length)),
    )


TASKS = {
    "ViT, equal steps": images,
    "ViT, equal time": images,
    "language model, equal steps": words,
    "language model, equal time": words,
}


def slower(task: Task, make: Maker, rate: float, count: int) -> float:
    """How many times AdamW's time a step of this optimizer takes, the two in turn."""
    spent = []
    for maker in (adamw, make):
        model = task.model()
        optimizer = maker(model, rate)
        begin = 0.0
        for step in range(count + 1):
            begin = time.process_time() if step == 1 else begin  # the first one warms up
            optimizer.zero_grad()
            inputs, targets = task.batch(0, step)
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        spent.append(time.process_time() - begin)
    return max(1.0, spent[1] / max(spent[0], 1e-9))


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Train once; the same seed gives every optimizer the same weights and the same batches."""
    task = TASKS[job.task](context.data, protocol)
    maker, rate = ARMS[job.arm][1], job.setting["rate"]
    steps = max(2, round(task.steps * (protocol.trial_share if job.trial else 1.0)))
    if job.task.endswith("equal time") and job.arm != "adamw":
        steps = max(2, round(steps / slower(task, maker, rate, protocol.timed)))
    torch.manual_seed(job.seed)
    model = task.model()
    done = train(
        [model],
        lambda step: _loss(model, *task.batch(job.seed, step)),
        maker(model, rate),
        steps=steps,
        schedule=cosine(),
        save=context.scratch,
    )
    return {
        "train": done.last(0.05),
        **tested(model, task),
        "steps": len(done.losses[0]),
        "parameters": parameters(model),
        "seconds": done.seconds,
        "optimizer seconds": done.stepping,
    }


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs), targets)


@torch.no_grad()
def tested(model: nn.Module, task: Task) -> dict[str, float]:
    """Loss and accuracy on what is held out."""
    model.eval()
    found = [(model(inputs), targets) for inputs, targets in task.test()]
    losses = [cross_entropy(logits, targets).item() for logits, targets in found]
    right = [(logits.argmax(-1) == targets).double().mean().item() for logits, targets in found]
    return {"test": sum(losses) / len(losses), "right": sum(right) / len(right)}


LIMITS = (
    "A fifth of CIFAR-10 and networks of at most a million parameters on one core: the optimizer's"
    " share of a step is larger than it would be on a GPU.",
    "One schedule and one weight decay for all; the slow momentum's chunk and weight are M3's"
    " defaults.",
)


MEASURES = (
    Measure(name="test", title="test loss", higher=False),
    Measure(name="right", title="test accuracy, %", higher=True, share=True),
    Measure(name="steps", title="steps", higher=True),
)


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    grids = {"adamw": protocol.adamw_rates, "m3_literal": protocol.literal_rates}
    arms = ("m3", "adamw") if quick else tuple(ARMS)
    return by_rate(
        protocol,
        {arm: ARMS[arm][0] for arm in arms},
        make,
        name="optimizers",
        tasks=tuple(TASKS)[::3] if quick else tuple(TASKS),
        tuned_on={name: name.replace("equal time", "equal steps") for name in TASKS},
        settings={arm: [{"rate": rate} for rate in grids.get(arm, protocol.rates)] for arm in arms},
        judged="train",
        page=partial(
            table_page,
            title="Optimizers at real length (Fig. 11)",
            measures=MEASURES,
            limits=LIMITS,
            hero="m3",
        ),
        page_name="optimizers",
        needs=("seconds", "parameters", "test"),
    )
