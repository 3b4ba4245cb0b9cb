"""The settings of a run: frozen, with `key=value` changes and clear errors."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nestling.checks import one_of, require

__all__ = ["RECIPES", "Data", "Model", "Optim", "Recipe", "Run", "changed", "get_recipe"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model: a preset, the model's name, and fields of its configuration to set.

    start: a folder with a saved model whose weights it begins with (a warm start); what is not
        there, such as learned rates, begins as in a fresh model.
    grow: the step from which each level learns while it reads; none: all from the first.
    """

    preset: str = "tiny"  # tiny, small, base, hope_760m, hope_1b3
    name: str = "hope"  # hope, hope_attention, transformer, titans, deltanet, ...
    fields: Mapping[str, Any] = field(default_factory=dict)  # e.g. {"num_hidden_layers": 2}
    start: str | None = None
    grow: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Data:
    """The text, its tokens, and how it is cut into windows."""

    train: tuple[str, ...] = ("builtin:300",)  # files, folders, hf:NAME, builtin
    valid: tuple[str, ...] = ("builtin:300-319",)
    separator: str | None = None  # cuts text files into documents
    field: str = "text"  # of JSON lines and data sets
    tokenizer: str = "bytes"  # bytes, bpe:SIZE, or the folder of a tokenizer
    length: int = 256  # tokens of a window
    order: Literal["shuffled", "documents", "sequential"] = "shuffled"
    carry: bool = True  # sequential: keep the memory from window to window of a document
    cache: str = "~/.cache/nestling"
    workers: int = 1


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer, its rate over the run, and the clipping of gradients."""

    name: str = "adamw"  # adamw, sgd, muon, m3, adamuon, delta_momentum, deep_momentum
    lr: float = 2e-3
    weight_decay: float = 0.1
    options: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer, by name
    shape: str = "cosine"  # cosine, wsd, linear, constant
    warmup: int = 20
    floor: float = 0.1
    clip: float | None = 1.0
    chunks: tuple[int, ...] = ()  # steps between updates of each continuum level; none: all at once


@dataclass(frozen=True, kw_only=True)
class Run:
    """The length of a run, how often it is judged and saved, and how it computes."""

    steps: int = 300
    rows: int = 16  # sequences per step, over all processes
    micro: int | None = None  # sequences per backward pass and process; None: all at once
    seed: int = 0
    eval_every: int = 100
    eval_windows: int = 32
    save_every: int = 100
    keep: int = 2
    sample_every: int | None = None
    sample_prompt: str = "Day 1"
    patience: int | None = None  # evaluations without a better loss before stopping
    max_bad: int = 10  # steps in a row with a loss or gradient that is not finite
    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False
    recompute: bool = False  # gradient checkpointing
    strategy: Literal["ddp", "fsdp"] = "ddp"  # with several processes


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines a run."""

    model: Model = Model()
    data: Data = Data()
    optim: Optim = Optim()
    run: Run = Run()

    def __post_init__(self) -> None:
        for key, least, optional in _COUNTS:
            part, _, name = key.partition(".")
            value = getattr(getattr(self, part), name)
            none = value is None and optional
            require(none or value >= least, key, value, f"at least {least}")
        rate, clip, decay = self.optim.lr, self.optim.clip, self.optim.weight_decay
        words = f"above 0 and at most {_MOST_RATE:g}"
        require(0 < rate <= _MOST_RATE, "optim.lr", rate, words)
        finite = clip is None or 0 < clip < math.inf
        require(finite, "optim.clip", clip, "a finite number above 0, or none")
        require(0 <= decay < math.inf, "optim.weight_decay", decay, "a finite number from 0")
        chunks = self.optim.chunks
        require(all(chunk >= 1 for chunk in chunks), "optim.chunks", chunks, "at least 1 each")
        for name in ("train", "valid"):
            if not all(getattr(self.data, name)) or not getattr(self.data, name):
                raise ValueError(f"data.{name} must name at least one source")
        if self.run.recompute and self.data.order == "sequential" and self.data.carry:
            raise ValueError(
                "run.recompute=true keeps no memory from window to window; set data.carry=false,"
                " or run.recompute=false"
            )
        _ = self.schedule

    @property
    def schedule(self) -> Schedule:
        """The learning rate over the run."""
        return Schedule(
            steps=self.run.steps,
            warmup=min(self.optim.warmup, self.run.steps),
            shape=self.optim.shape,
            floor=self.optim.floor,
        )

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain values, for checkpoints and logs."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    def lines(self) -> list[str]:
        """The `key=value` changes that make this recipe of any other, as `--show` prints them."""
        lines = []
        for part, values in self.to_json().items():
            for key, value in values.items():
                if isinstance(value, dict):
                    own = value.items()
                    lines += [f"{part}.{key}.{name}={json.dumps(each)}" for name, each in own]
                elif isinstance(value, list):
                    lines.append(f"{part}.{key}={','.join(map(str, value))}")
                else:
                    lines.append(f"{part}.{key}={'none' if value is None else value}")
        return lines


_MOST_RATE = 1e37  # an optimizer divides it by what is not less than 0.1, in float32
_COUNTS = (  # settings that count something: the least, and whether none is allowed
    ("run.steps", 1, False),
    ("run.rows", 1, False),
    ("run.micro", 1, True),
    ("run.seed", 0, False),
    ("run.eval_every", 1, False),
    ("run.eval_windows", 1, False),
    ("run.save_every", 1, False),
    ("run.keep", 1, False),
    ("run.sample_every", 1, True),
    ("run.patience", 1, True),
    ("run.max_bad", 1, False),
    ("data.length", 2, False),
    ("data.workers", 1, False),
    ("optim.warmup", 0, False),
)


RENAMED = {"model.mixer": "model.name"}
"""Keys of earlier versions, which checkpoints still have, and what they are called now."""


def changed(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with `key=value` changes: `run.steps=1000`, `model.fields.num_hidden_layers=2`.

    Values are read by the type of the key; lists are separated by commas. A key that does not exist
    is refused with the nearest one that does.
    """
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"expected key=value, got {setting!r}")
        recipe = _set(recipe, key.split("."), text, key)
    return recipe


def _set(node: Any, path: Sequence[str], text: str, key: str) -> Any:
    name, *rest = path
    if isinstance(node, Mapping):
        return {**node, ".".join(path): _guess(text)}
    names = [f.name for f in dataclasses.fields(node)]
    if name not in names:
        prefix = key[: len(key) - len(".".join(path))]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        near = [RENAMED[key].rpartition(".")[2]] if key in RENAMED else near
        hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(names)}"
        raise ValueError(f"unknown key {key!r}; {hint}")
    value = getattr(node, name)
    if rest:
        if not (dataclasses.is_dataclass(value) or isinstance(value, Mapping)):
            raise ValueError(f"unknown key {key!r}: {name} has no parts")
        return dataclasses.replace(node, **{name: _set(value, rest, text, key)})
    if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
        raise ValueError(f"{key!r} has parts: set one of them, as in {key}.NAME=VALUE")
    kind = get_type_hints(type(node))[name]
    return dataclasses.replace(node, **{name: _read(text, kind, key)})


def _read(text: str, kind: Any, key: str) -> Any:
    """Read a value of the annotated type."""
    options = get_args(kind)
    if get_origin(kind) is Literal:
        one_of(key, text, options)
        return text
    if get_origin(kind) is tuple:
        return tuple(_read(part, options[0], key) for part in text.split(",") if part)
    if type(None) in options:
        if text.lower() in ("none", "null", ""):
            return None
        kind = next(option for option in options if option is not type(None))
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError(f"{key} must be true or false; got {text!r}")
        return text.lower() in ("true", "1", "yes")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{key} must be a {kind.__name__}; got {text!r}") from None


def _guess(text: str) -> Any:
    """A value without a type: JSON where it is JSON (of at most 200 brackets), else text."""
    try:
        return json.loads(text) if text.count("[") + text.count("{") <= 200 else text
    except ValueError:
        return text


# Learning rates over a run, as multipliers of the base rate: pure functions of the step


def constant(progress: float) -> float:
    """Stay at one."""
    return 1.0


def cosine(progress: float) -> float:
    """Half a cosine, from one to zero."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def linear(progress: float) -> float:
    """A straight line from one to zero."""
    return 1.0 - progress


def wsd(progress: float, decay: float = 0.2) -> float:
    """Warm-up, stable, decay: one, then a straight line to zero over the last fifth."""
    return min(1.0, (1.0 - progress) / decay)


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "wsd": wsd,
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up over `warmup` steps, then `shape` down to `floor` at the last of `steps`."""

    steps: int
    warmup: int = 0
    shape: str = "cosine"
    floor: float = 0.0

    def __post_init__(self) -> None:
        one_of("shape", self.shape, SHAPES)
        if self.steps < 1 or not 0 <= self.warmup <= self.steps:
            raise ValueError(
                f"need steps >= 1 and 0 <= warmup <= steps; got steps={self.steps},"
                f" warmup={self.warmup}"
            )
        require(0.0 <= self.floor <= 1.0, "floor", self.floor, "in [0, 1]")

    def __call__(self, step: int) -> float:
        """The multiplier of step `step`, counted from 0; never zero during warm-up."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.floor + (1.0 - self.floor) * SHAPES[self.shape](min(1.0, progress))


# Recipes by name: `nestling train NAME key=value...`

PLAIN = {"learning": "plain"}
"""Levels that learn when the model is trained, not in training: compiled, or in many processes."""


def tiny() -> Recipe:
    """A Hope of 1M parameters on the built-in chronicles: minutes on a laptop."""
    return Recipe()


def stream() -> Recipe:
    """Like tiny, but rows read whole documents and carry their memory from window to window.

    Levels learn when the model is trained, not in training: so it runs in many processes, too.
    """
    return Recipe(
        model=Model(fields=dict(PLAIN)), data=Data(order="sequential", length=128), run=Run(rows=16)
    )


def small() -> Recipe:
    """A Hope of 5M parameters on text of your own (data.train=FILE data.valid=FILE)."""
    return Recipe(
        model=Model(preset="small"),
        data=Data(tokenizer="bpe:4096", length=512),
        optim=Optim(lr=1e-3, warmup=100),
        run=Run(steps=2000, rows=32, micro=8, eval_every=200, save_every=200),
    )


def hope() -> Recipe:
    """A Hope of 1M parameters on long windows, in which all of its levels step."""
    return Recipe(data=Data(length=2048), run=Run(rows=2, eval_windows=8))


def hope_attention() -> Recipe:
    """Like hope, with window attention in place of steered memories."""
    fields = {"mixer_options": {"attention": {"window": 128}}}
    return dataclasses.replace(hope(), model=Model(name="hope_attention", fields=fields))


def hope_760m() -> Recipe:
    """The paper's 760M Hope: 30B tokens, windows of 4,096, on many GPUs through torchrun."""
    return _paper("hope_760m", steps=60_000, lr=1.5e-3)


def hope_1b3() -> Recipe:
    """The paper's 1.3B Hope: 100B tokens, windows of 4,096, on many GPUs through torchrun."""
    return _paper("hope_1b3", steps=200_000, lr=1e-3)


def _paper(preset: str, steps: int, lr: float) -> Recipe:
    return Recipe(
        model=Model(preset=preset, fields=dict(PLAIN)),
        data=Data(
            train=("hf:HuggingFaceFW/fineweb-edu",),
            tokenizer="bpe:32000",
            length=4096,
            workers=8,
        ),
        optim=Optim(lr=lr, warmup=2000),
        run=Run(
            steps=steps,
            rows=128,
            micro=1,
            eval_every=1000,
            save_every=1000,
            precision="bf16",
            compile=True,
            recompute=True,
            strategy="fsdp",
        ),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    f.__name__: f for f in (tiny, stream, small, hope, hope_attention, hope_760m, hope_1b3)
}


def get_recipe(name: str) -> Recipe:
    """The recipe of this name."""
    one_of("recipe", name, RECIPES)
    return RECIPES[name]()
