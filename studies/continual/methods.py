"""Every method by name: how it is built from settings, and the settings its tuning may try.

All gradient methods change the same weights of the same base model and see the same examples in the
same order. Every arm that is tuned gets ten trials: six, then two around each of the best two.
Arms of gradient descent may take several passes over a task, so that none has less compute than the
continuum memory, which takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nestling.levels import Level
from nestling.optim import NestedOptimizer, Retaining, capture
from nestling.rules import retaining
from studies.continual.base import Base
from studies.continual.baselines import (
    ClosedStart,
    Dynamic,
    Elastic,
    LowRank,
    NearestMean,
    Replay,
    SharedCovariance,
)
from studies.continual.continuum import ContinuumLearner
from studies.continual.discriminant import Discriminant
from studies.continual.features import Features
from studies.continual.learner import Extra, Gradient, Method, Training
from studies.continual.prompting import Adapted, InContext, Proposals
from studies.continual.top import Top, make_top

__all__ = ["CHUNKS", "METHODS", "Arm", "Setting", "Setup", "build"]

Setting = Mapping[str, Any]
CHUNKS = {1: (1,), 2: (1, 8), 3: (1, 4, 16), 4: (1, 4, 16, 64)}
"""Steps between the updates of k levels, fastest first."""
ADAPT_CHUNKS = {1: (64,), 3: (64, 256, 1024)}
"""Tokens between the updates of k levels of `nestling.adapt`."""
PASSES = 3
"""Passes over each task that gradient methods may take."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every method of a run is given."""

    base: Base
    features: Features
    classes: tuple[str, ...]
    readout: str = "head"
    rows: int = 32
    seed: int = 0
    wide: int = 1000

    def top(self, levels: int = 1, *, wide: int | None = None) -> Top:
        """A fresh copy of the adapted part."""
        torch.manual_seed(self.seed)
        units = self.wide if wide is None else wide
        if self.readout == "label":
            units = 0
        return make_top(self.base, self.features, levels=levels, readout=self.readout, wide=units)

    def training(self, setting: Setting, **changes: Any) -> Training:
        """The loop's settings."""
        given = {"loss": setting.get("loss", "present"), "epochs": setting.get("epochs", 1)}
        return Training(**{**given, "rows": self.rows, "seed": self.seed, **changes})


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A method: `make` builds it; tuning tries `first`, then `second` on top of the best.

    `label` stands in for `first` where label texts are read, and other rates are needed.
    """

    title: str
    make: Callable[[Setup, Setting], Method]
    default: Setting
    first: tuple[Setting, ...] = ()
    second: tuple[Setting, ...] = ()
    label: tuple[Setting, ...] = ()
    group: str = "baseline"


def _optimizer(weights: Sequence[Any], s: Setting, factor: float = 1.0) -> torch.optim.Optimizer:
    """Gradient descent, or Adam where a setting names its rate."""
    if s["adam"]:
        return torch.optim.Adam(weights, lr=factor * s["scale"] * s["adam"])
    return torch.optim.SGD(weights, lr=factor * s["scale"] * s["lr"])


def _plain(
    setup: Setup,
    s: Setting,
    *,
    extra: Callable[[Top], Extra] = lambda top: Extra(),
    optimizer: Callable[[Sequence[Any], Setting], torch.optim.Optimizer] = _optimizer,
) -> Method:
    """Gradient descent on the adapted weights, with what a method adds to it."""
    top = setup.top()
    weights = top.adapted()
    return Gradient(top, optimizer(weights, s), setup.training(s), extra=extra(top))


def _joint(setup: Setup, s: Setting) -> Method:
    """All tasks at once, from the closed-form readout, with falling rates; not held to a budget."""
    top = setup.top()
    optimizer = torch.optim.AdamW(top.adapted(), lr=s["adam"], weight_decay=s["decay"])
    training = setup.training(s, loss="seen", rows=max(setup.rows, 64), anneal=True)
    start = ClosedStart(top, _readout(setup, top, s), s["temper"])
    return Gradient(top, optimizer, training, extra=start, joint=True)


def _readout(setup: Setup, top: Top, s: Setting) -> Discriminant:
    return Discriminant(len(setup.classes), top.width, shrink=s["shrink"], prior=s["prior"])


def _ewc(setup: Setup, s: Setting) -> Method:
    loss = setup.training(s).loss
    return _plain(setup, s, extra=lambda top: Elastic(top, s["strength"], loss=loss))


def _replay(setup: Setup, s: Setting) -> Method:
    return _plain(setup, s, extra=lambda top: Replay(s["per_class"], setup.seed))


def _dynamic(setup: Setup, s: Setting) -> Method:
    return _plain(setup, s, optimizer=lambda p, s: Dynamic(p, s["lr"], decay=s["decay"]))


def _lora(setup: Setup, s: Setting) -> Method:
    network = LowRank(setup.top(), s["rank"], setup.seed)
    weights = [p for p in network.parameters() if p.requires_grad]
    return Gradient(network, _optimizer(weights, s), setup.training(s))


def _levels(setup: Setup, s: Setting, *, frequency: bool, k: int = 4) -> Method:
    """Eq. 71 with gradient descent or Adam: level l steps every C(l) steps.

    With `frequency=False`, the control, levels differ in rate instead.
    """
    top = setup.top(k)
    parts = []
    for i, (chunk, weights) in enumerate(zip(CHUNKS[k], top.levels(), strict=True)):
        level = Level(name=f"level {i}", chunk=chunk if frequency else 1)
        factor = chunk ** (s["power"] if frequency else -s["power"])
        parts.append((level, weights, partial(_optimizer, s=s, factor=factor)))
    return Gradient(top, NestedOptimizer(parts), setup.training(s))


def _retaining(top: Top, s: Setting, k: int, frequency: bool) -> Retaining | None:
    """The levels' optimizer: a level's prior grows with its chunk, as its batch does.

    With `frequency=False` all levels change at every step, at rates `1/chunk`.
    """
    if not s["lr"]:
        return None
    groups = []
    for chunk, layers in zip(CHUNKS[k], top.channel.levels(), strict=True):
        lr, own = (s["lr"], chunk) if frequency else (s["lr"] / chunk, 1)
        weights = [layer.weight for layer in layers]
        groups.append({"params": weights, "lr": lr, "keep": s["stiff"] * chunk, "chunk": own})
    return Retaining(groups, inputs=capture(top), dtype=torch.float32)


def _cms(setup: Setup, s: Setting, k: int, *, frequency: bool = True) -> Method:
    """Continuum memory with retaining levels (and, unless label texts are read, its readout)."""
    top = setup.top(k)
    optimizer = _retaining(top, s, k, frequency)
    if setup.readout == "label":
        frozen = torch.optim.SGD(top.adapted(), lr=0.0)
        return Gradient(top, optimizer or frozen, setup.training(s, loss="present"))
    return ContinuumLearner(top, _readout(setup, top, s), optimizer, setup.training(s))


def _lda(setup: Setup, s: Setting) -> Method:
    classes, width = setup.features.labels.shape
    knobs = {"shrink": s["shrink"], "prior": s["prior"]}
    if s["reads"] == "stream":
        return SharedCovariance(classes, width, **knobs)
    top = setup.top(wide=0)
    return SharedCovariance(classes, top.width, read=top.read, **knobs)


def _ncm(setup: Setup, s: Setting) -> Method:
    return NearestMean(*setup.features.labels.shape)


def _icl(setup: Setup, s: Setting) -> Method:
    return InContext(setup.base, setup.classes, shots=s["shots"])


def _inca(setup: Setup, s: Setting) -> Method:
    proposer = SharedCovariance(*setup.features.labels.shape, shrink=s["shrink"])
    return Proposals(setup.base, setup.classes, proposer, top=s["top"])


def _adapt(setup: Setup, s: Setting, k: int) -> Method:
    """The public interface, on text: k levels with clocks in tokens."""
    rule = retaining(s["keep"], mean=True) if s["rule"] == "retaining" else s["rule"]
    return Adapted(
        setup.base,
        setup.classes,
        ADAPT_CHUNKS[k],
        rate=s["rate"],
        rule=rule,
        epochs=s["epochs"],
        seed=setup.seed,
    )


def _knob(name: str, values: Sequence[Any]) -> tuple[Setting, ...]:
    return tuple({name: value} for value in values)


def _grid(rates: Sequence[Setting]) -> tuple[Setting, ...]:
    return tuple({"loss": loss, **rate} for loss in ("present", "seen") for rate in rates)


_FIRST = _grid(({"lr": 0.003}, {"lr": 0.01}, {"adam": 1e-4}))
_LABEL = _grid(({"lr": 0.1}, {"lr": 1.0}, {"adam": 1e-3}))
_SECOND = ({"epochs": PASSES}, {"epochs": PASSES, "scale": 3.0})
_DEFAULT = {"loss": "present", "lr": 0.01, "adam": 0.0, "scale": 1.0, "epochs": 1}
_POWERS = ({"epochs": PASSES}, {"epochs": PASSES, "power": 0.0})
_SHRINKS = (3e-4, 1e-3, 1e-2)
_CMS_DEFAULT = {"lr": 1e-3, "stiff": 100.0, "shrink": 1e-3, "prior": 0.0}
_PRIORS = ({"prior": 0.5}, {"prior": 1.0})


def _cms_arm(k: int, *, frequency: bool = True) -> Arm:
    levels = f"CMS, {k} level{'s' if k > 1 else ''}, retaining"
    return Arm(
        title=levels if frequency else f"control: {k} rates instead of frequencies, retaining",
        make=partial(_cms, k=k, frequency=frequency),
        default=_CMS_DEFAULT,
        first=tuple({"lr": lr, "shrink": s} for lr in (1e-3, 3e-3) for s in _SHRINKS),
        second=({"prior": 1.0}, {"stiff": 1000.0}),
        label=_knob("lr", (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)),
        group="cms" if frequency else "control",
    )


def _adapt_arm(k: int) -> Arm:
    rates = {"gd": (0.03, 0.1, 0.3), "dgd": (0.1,), "adam": (1e-4, 3e-4)}
    return Arm(
        title=f"nestling.adapt, {k} level{'s' if k > 1 else ''}",
        make=partial(_adapt, k=k),
        default={"rule": "gd", "rate": 0.1, "keep": 1000.0, "epochs": 1},
        first=tuple({"rule": r, "rate": eta} for r, etas in rates.items() for eta in etas),
        second=tuple({"rule": "retaining", "rate": eta} for eta in (0.1, 1.0)),
        group="adapt",
    )


METHODS: dict[str, Arm] = {
    "sequential": Arm(
        title="sequential fine-tuning",
        make=_plain,
        default=_DEFAULT,
        first=_FIRST,
        second=_SECOND,
        label=_LABEL,
    ),
    "ewc": Arm(
        title="EWC",
        make=_ewc,
        default={**_DEFAULT, "strength": 10.0},
        first=_FIRST,
        second=tuple({"epochs": PASSES, "strength": strength} for strength in (10.0, 100.0)),
        label=_LABEL,
    ),
    "lora": Arm(
        title="LoRA",
        make=_lora,
        default={**_DEFAULT, "rank": 8},
        first=_FIRST,
        second=tuple({"epochs": PASSES, "rank": rank} for rank in (8, 16)),
    ),
    "dynamic": Arm(
        title="dynamic evaluation",
        make=_dynamic,
        default={"loss": "present", "lr": 1e-3, "decay": 1e-3, "epochs": 1},
        first=_grid(({"lr": 1e-4}, {"lr": 1e-3}, {"lr": 1e-2})),
        second=tuple({"epochs": PASSES, "decay": decay} for decay in (0.0, 1e-3)),
    ),
    "cms-sgd-4": Arm(
        title="CMS, 4 levels, plain",
        make=partial(_levels, frequency=True),
        default={**_DEFAULT, "power": 0.5},
        first=_FIRST,
        second=_POWERS,
        group="cms",
    ),
    "rates-sgd-4": Arm(
        title="control: 4 rates instead of frequencies, plain",
        make=partial(_levels, frequency=False),
        default={**_DEFAULT, "power": 0.5},
        first=_FIRST,
        second=_POWERS,
        group="control",
    ),
    "cms-0": Arm(
        title="control: no level learns, the readout alone",
        make=lambda setup, s: _cms(setup, {**s, "lr": 0.0}, 1),
        default={"shrink": 1e-3, "prior": 0.0},
        first=_knob("shrink", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)),
        second=_PRIORS,
        group="control",
    ),
    **{f"cms-{k}": _cms_arm(k) for k in (1, 2, 3, 4)},
    "rates-4": _cms_arm(4, frequency=False),
    "replay": Arm(
        title="experience replay",
        make=_replay,
        default={**_DEFAULT, "per_class": 20},
        first=_FIRST,
        second=tuple({"epochs": PASSES, "per_class": count} for count in (20, 50)),
    ),
    "ncm": Arm(title="frozen features, nearest class mean", make=_ncm, default={}),
    "lda": Arm(
        title="frozen features, LDA",
        make=_lda,
        default={"shrink": 1e-2, "prior": 0.0, "reads": "stream"},
        first=tuple(
            {"reads": r, "shrink": s} for r in ("stream", "model") for s in (1e-4, 1e-3, 1e-2)
        ),
        second=_PRIORS,
    ),
    **{f"adapt-{k}": _adapt_arm(k) for k in ADAPT_CHUNKS},
    "icl": Arm(title="in-context learning", make=_icl, default={"shots": 24}, group="prompt"),
    "inca": Arm(title="InCA", make=_inca, default={"shrink": 1e-2, "top": 3}, group="prompt"),
    "joint": Arm(
        title="joint training (upper bound)",
        make=_joint,
        default={
            "adam": 3e-4,
            "temper": 0.3,
            "decay": 0.1,
            "epochs": 5,
            "shrink": 3e-4,
            "prior": 0.0,
        },
        first=tuple({"adam": a, "temper": t} for a in (3e-5, 1e-4, 3e-4) for t in (0.3, 1.0)),
        second=({"shrink": 1e-3}, {"epochs": 15}),
        label=_knob("adam", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)),
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
