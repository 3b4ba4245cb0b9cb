"""Every method by name: how it is built from settings, and the settings its tuning may try.

All gradient methods change the same weights of the same base model, see the same examples in the
same order, and get the same number of trials: nine of (loss, rate), then three of the knob that is
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nestling.continual.base import Base
from nestling.continual.baselines import (
    Dynamic,
    Elastic,
    LowRank,
    NearestMean,
    Replay,
    SharedCovariance,
)
from nestling.continual.features import Features
from nestling.continual.learner import LOSSES, Gradient, Method, Training
from nestling.continual.prompting import InContext, Proposals
from nestling.continual.retaining import Retaining
from nestling.continual.top import Top, make_top
from nestling.levels import Level
from nestling.optim import NestedOptimizer, capture

__all__ = ["CHUNKS", "METHODS", "Arm", "Setting", "Setup", "build"]

Setting = Mapping[str, Any]
CHUNKS = {1: (1,), 2: (1, 8), 3: (1, 4, 16), 4: (1, 4, 16, 64)}
"""Steps between the updates of k levels, fastest first."""
JOINT_EPOCHS = 5


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every method of a run is given."""

    base: Base
    features: Features
    classes: tuple[str, ...]
    readout: str = "head"
    epochs: int = 1
    rows: int = 16
    seed: int = 0

    def top(self, levels: int = 1) -> Top:
        """A fresh copy of the adapted part."""
        torch.manual_seed(self.seed)
        return make_top(self.base, self.features.labels, levels=levels, readout=self.readout)

    def training(self, setting: Setting) -> Training:
        """The loop's settings."""
        loss = setting.get("loss", "present")
        return Training(loss=loss, epochs=self.epochs, rows=self.rows, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A method: `make` builds it; tuning tries `first`, then `second` on top of the best."""

    title: str
    make: Callable[[Setup, Setting], Method]
    default: Setting
    first: tuple[Setting, ...] = ()
    second: tuple[Setting, ...] = ()
    group: str = "baseline"


def _grid(rates: Sequence[float]) -> tuple[Setting, ...]:
    return tuple({"loss": loss, "lr": rate} for loss in LOSSES for rate in rates)


def _knob(name: str, values: Sequence[Any]) -> tuple[Setting, ...]:
    return tuple({name: value} for value in values)


def _optimizer(weights: Sequence[Any], s: Setting) -> torch.optim.Optimizer:
    """Gradient descent, or Adam where a setting names its rate."""
    if s["adam"]:
        return torch.optim.Adam(weights, lr=s["adam"])
    return torch.optim.SGD(weights, lr=s["lr"])


def _plain(setup: Setup, s: Setting, *, joint: bool = False) -> Method:
    top = setup.top()
    training = setup.training(s)
    if joint:  # an upper bound is not held to the budget
        training = replace(training, epochs=JOINT_EPOCHS * training.epochs)
    return Gradient(top, _optimizer(top.adapted(), s), training, joint=joint)


def _ewc(setup: Setup, s: Setting) -> Method:
    top, training = setup.top(), setup.training(s)
    optimizer = torch.optim.SGD(top.adapted(), lr=s["lr"])
    extra = Elastic(top, s["strength"], loss=training.loss)
    return Gradient(top, optimizer, training, extra=extra)


def _replay(setup: Setup, s: Setting) -> Method:
    top = setup.top()
    extra = Replay(s["per_class"], setup.seed)
    return Gradient(top, _optimizer(top.adapted(), s), setup.training(s), extra=extra)


def _lora(setup: Setup, s: Setting) -> Method:
    network = LowRank(setup.top(), s["rank"], setup.seed)
    weights = [p for p in network.parameters() if p.requires_grad]
    return Gradient(network, torch.optim.SGD(weights, lr=s["lr"]), setup.training(s))


def _dynamic(setup: Setup, s: Setting) -> Method:
    top = setup.top()
    optimizer = Dynamic(top.adapted(), s["lr"], decay=s["decay"])
    return Gradient(top, optimizer, setup.training(s))


def _levels_sgd(setup: Setup, s: Setting, k: int = 4) -> Method:
    """Eq. 71 with plain gradient descent: level l steps every C(l) steps."""
    top = setup.top(k)
    parts = [
        (
            Level(name=f"level {i}", chunk=chunk),
            weights,
            lambda p, chunk=chunk: torch.optim.SGD(p, lr=s["lr"] * chunk ** s["power"]),
        )
        for i, (chunk, weights) in enumerate(zip(CHUNKS[k], top.levels(), strict=True))
    ]
    return Gradient(top, NestedOptimizer(parts), setup.training(s))


def _rates_sgd(setup: Setup, s: Setting, k: int = 4) -> Method:
    """The control: levels that differ in rate, not in frequency."""
    top = setup.top(k)
    groups = [
        {"params": weights, "lr": s["lr"] * chunk ** -s["power"]}
        for chunk, weights in zip(CHUNKS[k], top.levels(), strict=True)
    ]
    return Gradient(top, torch.optim.SGD(groups, lr=s["lr"]), setup.training(s))


def _cms(setup: Setup, s: Setting, k: int, *, frequency: bool = True) -> Method:
    """Continuum memory whose levels retain: the rule of `retaining.py` at k clocks.

    The head, if it learns, is in the fastest level and takes the exact step (rate 1 for a squared
    error). A level's prior grows with its chunk, as its batch does: slow levels are stiff. With
    `frequency=False` all levels change at every step, at rates `1/chunk`.
    """
    top = setup.top(k)
    inputs = capture(top)
    groups = []
    for chunk, layers in zip(CHUNKS[k], top.channel.levels(), strict=True):
        rate = {"chunk": chunk} if frequency else {"chunk": 1}
        weights = [layer.weight for layer in layers]
        lr = s["lr"] if frequency else s["lr"] / chunk
        groups.append({"params": weights, "lr": lr, "keep": s["stiff"] * chunk, **rate})
    if top.head.weight.requires_grad:
        head = 1.0 if s["loss"] == "squared" else s["head"]
        groups.append({"params": [top.head.weight], "lr": head, "keep": s["keep"], "chunk": 1})
    return Gradient(top, Retaining(groups, inputs=inputs), setup.training(s))


def _lda(setup: Setup, s: Setting) -> Method:
    classes, width = setup.features.labels.shape
    return SharedCovariance(classes, width, shrink=s["shrink"])


def _ncm(setup: Setup, s: Setting) -> Method:
    return NearestMean(*setup.features.labels.shape)


def _icl(setup: Setup, s: Setting) -> Method:
    return InContext(setup.base, setup.classes, shots=s["shots"])


def _inca(setup: Setup, s: Setting) -> Method:
    width = setup.features.labels.shape[1]
    proposer = SharedCovariance(len(setup.classes), width, shrink=s["shrink"])
    return Proposals(setup.base, setup.classes, proposer, top=s["top"])


_SGD = _grid((0.01, 0.03, 0.1))
_DEFAULT = {"loss": "present", "lr": 0.03}
_ADAMS = _knob("adam", (3e-4, 1e-3, 3e-3))
_SHRINKS = tuple({"shrink": 10.0 ** (e / 2)} for e in range(-8, 4))
_CMS = _grid((0.01, 0.03, 0.1))
_CMS_DEFAULT = {"loss": "squared", "lr": 0.03, "keep": 1.0, "stiff": 100.0, "head": 10.0}
_KEEPS = _knob("keep", (0.1, 10.0, 100.0))


def _cms_arm(k: int) -> Arm:
    return Arm(
        title=f"CMS, {k} level{'s' if k > 1 else ''}, retaining",
        make=lambda setup, s: _cms(setup, s, k),
        default=_CMS_DEFAULT,
        first=_CMS,
        second=_KEEPS,
        group="cms",
    )


METHODS: dict[str, Arm] = {
    "sequential": Arm(
        title="sequential fine-tuning",
        make=_plain,
        default={**_DEFAULT, "adam": 0.0},
        first=_SGD,
        second=_ADAMS,
    ),
    "ewc": Arm(
        title="EWC",
        make=_ewc,
        default={**_DEFAULT, "strength": 10.0},
        first=_SGD,
        second=_knob("strength", (1.0, 100.0, 1000.0)),
    ),
    "lora": Arm(
        title="LoRA",
        make=_lora,
        default={**_DEFAULT, "rank": 8},
        first=_SGD,
        second=_knob("rank", (2, 4, 16)),
    ),
    "dynamic": Arm(
        title="dynamic evaluation",
        make=_dynamic,
        default={"loss": "present", "lr": 1e-3, "decay": 1e-3},
        first=_grid((1e-4, 1e-3, 1e-2)),
        second=_knob("decay", (0.0, 1e-4, 1e-2)),
    ),
    "cms-sgd-4": Arm(
        title="CMS, 4 levels, plain gradient descent",
        make=_levels_sgd,
        default={**_DEFAULT, "power": 0.5},
        first=_SGD,
        second=_knob("power", (0.0, 0.25, 1.0)),
        group="cms",
    ),
    "rates-sgd-4": Arm(
        title="control: 4 rates instead of frequencies, plain",
        make=_rates_sgd,
        default={**_DEFAULT, "power": 0.5},
        first=_SGD,
        second=_knob("power", (0.0, 0.25, 1.0)),
        group="control",
    ),
    **{f"cms-{k}": _cms_arm(k) for k in (1, 2, 3, 4)},
    "rates-4": Arm(
        title="control: 4 rates instead of frequencies, retaining",
        make=lambda setup, s: _cms(setup, s, 4, frequency=False),
        default=_CMS_DEFAULT,
        first=_CMS,
        second=_KEEPS,
        group="control",
    ),
    "replay": Arm(
        title="experience replay",
        make=_replay,
        default={**_DEFAULT, "adam": 0.0, "per_class": 5},
        first=_SGD,
        second=_ADAMS,
    ),
    "ncm": Arm(title="frozen features, nearest class mean", make=_ncm, default={}),
    "lda": Arm(title="frozen features, LDA", make=_lda, default={"shrink": 1e-2}, first=_SHRINKS),
    "icl": Arm(title="in-context learning", make=_icl, default={"shots": 24}, group="prompt"),
    "inca": Arm(title="InCA", make=_inca, default={"shrink": 1e-2, "top": 3}, group="prompt"),
    "joint": Arm(
        title=f"joint training, {JOINT_EPOCHS}x the epochs (upper bound)",
        make=lambda setup, s: _plain(setup, s, joint=True),
        default={**_DEFAULT, "adam": 0.0},
        first=_SGD,
        second=_ADAMS,
        group="bound",
    ),
}
"""All methods, in the order of the tables."""


def build(name: str, setup: Setup, setting: Setting | None = None) -> Method:
    """A method by name; missing settings take the arm's defaults."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    arm = METHODS[name]
    given = dict(setting or {})
    if unknown := set(given) - set(arm.default):
        raise ValueError(f"{name}: unknown settings {sorted(unknown)}; has {sorted(arm.default)}")
    return arm.make(setup, {**arm.default, **given})
