"""What a run is: frozen settings, and `key=value` changes to them with clear errors."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nestling.train.schedule import Schedule

__all__ = ["Data", "Model", "Optim", "Recipe", "Run", "changed"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model: a preset, its mixer, and fields of its configuration to set."""

    preset: str = "tiny"  # tiny, small, base, hope_760m, hope_1b3
    mixer: str = "hope"  # hope, hope_attention, transformer, titans, deltanet, ...
    fields: Mapping[str, Any] = field(default_factory=dict)  # e.g. {"num_hidden_layers": 2}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which text, and how it is cut."""

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
    """How weights learn."""

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
    """How long, how often, how."""

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
        for name in ("steps", "rows", "eval_every", "eval_windows", "save_every", "keep"):
            if getattr(self.run, name) < 1:
                raise ValueError(f"run.{name} must be at least 1; got {getattr(self.run, name)}")
        if self.data.length < 2:
            raise ValueError(f"data.length must be at least 2; got {self.data.length}")
        if not self.optim.lr > 0:
            raise ValueError(f"optim.lr must be above 0; got {self.optim.lr}")
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
        if text not in options:
            raise ValueError(f"{key} must be one of {', '.join(map(str, options))}; got {text!r}")
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
    """A free value: JSON if it is JSON, text otherwise."""
    try:
        return json.loads(text)
    except ValueError:
        return text
