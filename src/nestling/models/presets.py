"""Named configurations. At one size all models have the same width, depth and parameters.

    presets.tiny()                        Hope, about 1M parameters, bytes
    presets.tiny(model="transformer")     Transformer++ with as many parameters

`model` names the model (`MODELS`); the hidden width of its channel memory is what makes the
parameter counts equal, so that comparisons are fair. Other fields of the configuration may be
given as keywords; with an explicit `intermediate_size` nothing is adjusted.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from nestling.continuum import Block
from nestling.models.configuration import NestlingConfig
from nestling.models.specs import MIXERS
from nestling.models.tokenizer import BYTE_VOCABULARY

__all__ = [
    "MODELS",
    "Size",
    "base",
    "configure",
    "hope_1b3",
    "hope_760m",
    "parameter_count",
    "small",
    "tiny",
]


CONTINUUM: dict[str, Any] = {
    "channel": "cms",
    "topology": "parallel",
    "activation": "swiglu",
    "levels": [
        {"name": "fast", "chunk": 128, "rate": 2.0, "retain": 0.96},
        {"name": "middle", "chunk": 256, "rate": 2.0},
        {"name": "slow", "chunk": 512, "rate": 2.0},
    ],
    "learning": "first_order",
    "learning_layers": 1,
}
"""The continuum memory of `hope` and `hope_attention`: gated levels side by side (Eq. 74).

Those of the last layer learn while the model reads, from the first training step on.
"""

MODELS: dict[str, dict[str, Any]] = {
    "hope": {"mixer": "steered", **CONTINUUM},
    "hope_printed": {
        "mixer": "self_modifying",
        "channel": "cms",
        "mixer_options": {"self_modifying": {"projections": {"residual": False}}},
    },
    "hope_attention": {"mixer": "attention", **CONTINUUM},
    "transformer": {"mixer": "attention", "channel": "swiglu"},
    "ada_transformer": {"mixer": "attention", "channel": "in_context"},
    "titans": {"mixer": "titans", "channel": "swiglu"},
    "deltanet": {"mixer": "deltanet", "channel": "swiglu"},
    "gated_delta": {"mixer": "gated_delta", "channel": "swiglu"},
    "linear": {"mixer": "linear", "channel": "swiglu"},
    "retnet": {"mixer": "retnet", "channel": "swiglu"},
}
"""Models by name: their mixer and channel memory, and what else makes them what they are.

`hope` is ours, the same in every study; `hope_printed` is what the paper prints (Eq. 70, 83-88):
five memories that rewrite all of themselves, and a chain of four levels.
"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Width, depth and heads shared by all models of a size, and their parameter count."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    parameters: int


TINY = Size(width=128, layers=5, heads=4, vocabulary=BYTE_VOCABULARY, parameters=1_000_000)
SMALL = Size(width=256, layers=6, heads=4, vocabulary=BYTE_VOCABULARY, parameters=5_000_000)
BASE = Size(width=512, layers=12, heads=8, vocabulary=32_000, parameters=60_000_000)
PAPER_760M = Size(width=1024, layers=24, heads=16, vocabulary=32_000, parameters=760_000_000)
PAPER_1B3 = Size(width=1536, layers=24, heads=16, vocabulary=32_000, parameters=1_300_000_000)

SIZES = {
    "tiny": TINY,
    "small": SMALL,
    "base": BASE,
    "hope_760m": PAPER_760M,
    "hope_1b3": PAPER_1B3,
}
"""The sizes by the names of their presets."""


def tiny(model: str = "hope", **fields: Any) -> NestlingConfig:
    """About 1M parameters, bytes: tests, demonstrations, a laptop."""
    return configure(TINY, model, **fields)


def small(model: str = "hope", **fields: Any) -> NestlingConfig:
    """About 5M parameters, bytes."""
    return configure(SMALL, model, **fields)


def base(model: str = "hope", **fields: Any) -> NestlingConfig:
    """About 60M parameters, vocabulary of 32,000."""
    return configure(BASE, model, **fields)


def hope_760m(model: str = "hope", **fields: Any) -> NestlingConfig:
    """The paper's 760M size: width 1024, vocabulary of 32,000."""
    return configure(PAPER_760M, model, **fields)


def hope_1b3(model: str = "hope", **fields: Any) -> NestlingConfig:
    """The paper's 1.3B size: width 1536, vocabulary of 32,000."""
    return configure(PAPER_1B3, model, **fields)


def configure(size: Size, model: str = "hope", **fields: Any) -> NestlingConfig:
    """The model of this name at a size; its channel's hidden width is fitted to the size.

    fields: of `NestlingConfig`; a hybrid gives `mixer` as a list with one name per layer. Options
        of a mixer are added to the model's own.
    """
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}; got {model!r}")
    mixer = fields.get("mixer")
    if isinstance(mixer, str) and mixer in MODELS:
        raise ValueError(
            f"mixer={mixer!r} names a model: say model={mixer!r} (a preset's mixer may be changed"
            " by a list with one mixer per layer)"
        )
    given = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        **deepcopy(MODELS[model]),
        **fields,
    }
    if "cms" not in given["channel"] and "levels" not in fields:  # there are no levels to learn
        ours = ("levels", "learning", "learning_layers")
        given = {name: v for name, v in given.items() if name not in ours}
    used = {given["mixer"]} if isinstance(given["mixer"], str) else set(given["mixer"])
    for name in fields.get("mixer_options") or {}:
        if name in MIXERS and name not in used:
            raise ValueError(
                f"mixer_options has options of {name!r}, and the mixer of {model!r} is"
                f" {' and '.join(map(repr, sorted(used)))}: they would change nothing"
            )
    if "mixer_options" in fields and "mixer_options" in MODELS[model]:
        given["mixer_options"] = _joined(MODELS[model]["mixer_options"], fields["mixer_options"])
    if given["vocab_size"] == BYTE_VOCABULARY:
        given = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258, **given}
    if "intermediate_size" in given:
        return NestlingConfig(**given)
    return NestlingConfig(**given, intermediate_size=_fit(size.parameters, given))


def _joined(own: Any, given: Any) -> Any:
    """Options of a model with those that were given on top, group by group."""
    if not (isinstance(own, dict) and isinstance(given, dict)):
        return given
    return own | {name: _joined(own.get(name), value) for name, value in given.items()}


def parameter_count(config: NestlingConfig) -> int:
    """The parameters of the model, without making them."""
    ends = 1 if config.tie_word_embeddings else 2
    total = config.vocab_size * config.hidden_size * ends + config.hidden_size
    counted: dict[tuple[str, str], int] = {}
    for layer in range(config.num_hidden_layers):
        kind = config.names_of(layer)
        if kind not in counted:
            with torch.device("meta"):
                block = Block(*config.build(layer))
            counted[kind] = sum(weight.numel() for weight in block.parameters())
        total += counted[kind]
    return total


def _fit(parameters: int, given: dict[str, Any]) -> int:
    """The hidden width, a multiple of 4 and of the heads, that comes nearest to the goal."""
    step = math.lcm(4, given["num_attention_heads"])
    low, high = (  # the count is affine in the hidden width
        parameter_count(NestlingConfig(**given, intermediate_size=hidden))
        for hidden in (step, 2 * step)
    )
    steps = 1 + round((parameters - low) / (high - low))
    if steps < 1:
        raise ValueError(
            f"{given['mixer']!r} with width {given['hidden_size']} and"
            f" {given['num_hidden_layers']} layers has at least {low} parameters: more than"
            f" {parameters}"
        )
    return steps * step
