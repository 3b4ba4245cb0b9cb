"""MAD (Table 4): six small tasks, each as published and one step harder.

    python -m studies mad               run what is missing, write docs/results/mad.md

Token accuracy on held-out sequences. Harder tasks take the rate that was best on the task itself.
Training is far shorter than published; the protocol on the page says by how much.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nestling.models import presets
from studies import default
from studies.harness.loop import descend
from studies.harness.models import parameters
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, by_rate
from studies.harness.tables import Measure, table_page
from studies.tasks.mad import IGNORE, TASKS, Task, accuracy

ARMS = (
    "hope",
    "hope_printed",
    "hope_attention",
    "transformer",
    "transformer_conv",
    "titans",
    "deltanet",
    "gated_delta",
    "linear",
)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    parameters: int = 120_000
    train: int = 12_800
    test: int = 1_280
    rows: int = 32
    steps: int = 2_000
    published: str = "width 128, 20,000 steps of 128 sequences: 40 times as many"
    rates: tuple[float, ...] = (1e-3, 5e-3)
    weight_decay: float = 0.1
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    analysis: str = "token accuracy; paired by seed, 95%, three seeds; no best run is picked"

    def size(self, task: Task) -> presets.Size:
        """The size of all models; embeddings come on top."""
        return presets.Size(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            vocabulary=task.vocabulary,
            parameters=self.parameters + self.width * task.vocabulary,
        )


QUICK = Protocol(
    width=32, parameters=40_000, train=64, test=16, rows=4, steps=2, rates=(1e-3,), seeds=(0,)
)


class Whole(nn.Module):
    """Compression: all tokens from the last hidden state and a sin-cos position, by an MLP."""

    def __init__(self, model: Any, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.model = model
        place = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("place", torch.cat([place.sin(), place.cos()], 1))  # [T, D]
        self.decode = nn.Sequential(
            nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, vocabulary)
        )

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, V]."""
        inner = self.model.model.model
        hidden = inner(input_ids=ids, use_cache=False).last_hidden_state[:, -1:]  # [B, 1, D]
        out: Tensor = self.decode(hidden + self.place)
        return out


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Train on one set of sequences, test on another."""
    task = TASKS[job.task]
    size = protocol.size(task)
    torch.manual_seed(job.seed)
    model: nn.Module = default.build(default.ARMS[job.arm], size)
    if task.whole:
        model = Whole(model, protocol.width, task.length, task.vocabulary)
    data = task.make(protocol.train, 1_000 + job.seed)

    def loss(step: int) -> Tensor:
        random = torch.Generator().manual_seed(1_000_003 * (job.seed + 1) + step)
        rows = torch.randint(len(data.tokens), (protocol.rows,), generator=random)
        logits = model(data.tokens[rows])
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), data.targets[rows].flatten(), ignore_index=IGNORE
        )

    done = descend(model, loss, job, context, steps=protocol.steps, decay=protocol.weight_decay)
    test = task.make(protocol.test, 50_000 + job.seed, test=True)
    with torch.no_grad():
        said = torch.cat([model(part).argmax(-1) for part in test.tokens.split(64)])
    return {
        "loss": done.last(),
        "right": accuracy(said, test.targets),
        "parameters": parameters(model),
        "seconds": done.seconds,
    }


LIMITS = (
    "A fortieth of the published training, at half its width: ranks may change with more of it.",
    "Every seed counts; the published scores are those of the best run of a sweep.",
)


RIGHT = Measure(name="right", title="token accuracy, %", higher=True, share=True)


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    arms = ("hope", "deltanet") if quick else ARMS
    return by_rate(
        protocol,
        {arm: default.ARMS[arm].title for arm in arms},
        make,
        name="mad",
        tasks=tuple(TASKS)[:6] if quick else tuple(TASKS),
        tuned_on={name: name.removesuffix(", harder") for name in TASKS},
        judged="loss",
        page=partial(
            table_page,
            title="MAD (Table 4): six tasks, as published and harder",
            measures=(RIGHT,),
            limits=LIMITS,
        ),
        page_name="mad",
        needs=("seconds", "parameters", "right"),
    )
