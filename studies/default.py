"""The one Hope of all studies, and the models it is compared with.

Every study of the round takes its models from here. A study may choose width, depth, heads,
vocabulary and length (`FREE`); anything else is the default of the presets, which is what a user
gets. `tests/studies/test_default.py` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nestling.models import NestlingConfig, NestlingForCausalLM, presets
from studies.harness.models import LSTM, Arm

__all__ = [
    "ABLATIONS",
    "ARMS",
    "FREE",
    "FROZEN",
    "LEVELS",
    "PLAIN",
    "RIVAL",
    "Model",
    "build",
    "configuration",
    "deviations",
    "switched",
]

FREE = frozenset(
    {
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "intermediate_size",  # follows from the number of parameters
        "max_position_embeddings",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    }
)
"""The fields that a study may choose."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model by the name it has in `presets.MODELS`, and what differs from that preset."""

    title: str
    model: str
    mixer: dict[str, Any] = field(default_factory=dict)  # options of its mixer
    fields: dict[str, Any] = field(default_factory=dict)


ARMS: dict[str, Model] = {
    "hope": Model(title="Hope", model="hope"),
    "hope_printed": Model(title="Hope as printed (Eq. 70, 83-88)", model="hope_printed"),
    "hope_attention": Model(title="Hope-Attention", model="hope_attention"),
    "transformer": Model(title="Transformer++", model="transformer"),
    "transformer_conv": Model(
        title="Transformer++, short convolutions", model="transformer", mixer={"conv": 4}
    ),
    "titans": Model(title="Titans", model="titans"),
    "deltanet": Model(title="DeltaNet", model="deltanet"),
    "gated_delta": Model(title="gated DeltaNet", model="gated_delta"),
    "gated_delta_spread": Model(
        title="gated DeltaNet, retention spread as Hope's",
        model="hope",
        mixer={
            "steering": 0,
            "rates": {"most": 1.0, "start": (0.5, 0.5), "shut": 0.0},
            "retention": {"tied": False},
        },
        fields={"channel": "swiglu"},
    ),
    "linear": Model(title="linear attention", model="linear"),
    "lstm": Model(title="LSTM", model="lstm"),
}
"""The models of every table."""


def _moved(*names: str) -> dict[str, Any]:
    return {"moved": names}


ABLATIONS: dict[str, Model] = {
    "no_dgd": Model(title="without DGD (no erasing)", model="hope", mixer={"erase": False}),
    "no_retention": Model(
        title="without retention",
        model="hope",
        mixer={"retention": {"start": (0.999999, 0.999999), "most": 0.9999999}},
    ),
    "alike": Model(
        title="retention alike in all heads",
        model="hope",
        mixer={"retention": {"start": (0.9985, 0.9985)}},
    ),
    "untied": Model(
        title="retention not tied to the write, gates that never shut",
        model="hope",
        mixer={"retention": {"tied": False}, "rates": {"shut": 0.0}},
    ),
    "no_levels": Model(
        title="without levels (one gated MLP)", model="hope", fields={"channel": "swiglu"}
    ),
    "static": Model(title="static projections", model="hope", mixer={"steering": 0}),
    "static_k": Model(title="static keys", model="hope", mixer=_moved("v", "eta", "alpha")),
    "static_v": Model(title="static values", model="hope", mixer=_moved("k", "eta", "alpha")),
    "static_gates": Model(title="static rate and retention", model="hope", mixer=_moved("k", "v")),
    "adaptive_q": Model(
        title="adaptive queries", model="hope", mixer=_moved("k", "v", "q", "eta", "alpha")
    ),
    "printed_momentum": Model(
        title="as printed, with momentum",
        model="hope_printed",
        mixer={"learning": {"momentum": True}},
    ),
    "printed_l2": Model(
        title="as printed, L2 objective",
        model="hope_printed",
        mixer={"learning": {"objective": "l2"}},
    ),
}
"""Hope, and Hope as printed, with one thing changed (Table 6)."""


def _levels(model: str, change: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """The levels of a model, changed."""
    return change(presets.tiny(model).levels or [])


def _frozen(levels: list[Any]) -> list[Any]:
    return [{"name": level["name"], "chunk": level["chunk"]} for level in levels]


def _by_rate(levels: list[Any]) -> list[Any]:
    """One chunk for all; a slow level's rate is as much smaller as its chunk was larger."""
    fastest = levels[0]["chunk"]
    return [
        {**level, "chunk": fastest, "rate": level["rate"] * fastest / level["chunk"]}
        for level in levels
    ]


FROZEN = Model(
    title="Hope, trained plain, levels frozen",
    model="hope",
    fields={"levels": _levels("hope", _frozen)},
)
"""The default Hope without learning, in training and in reading."""
PLAIN = Model(title="Hope, trained plain", model="hope", fields={"learning": "plain"})
"""The default Hope whose levels learn while it reads, and stood still in training."""
ABLATIONS["levels_frozen"] = FROZEN
ABLATIONS["levels_plain"] = PLAIN


def _alone(name: str) -> list[Any]:
    """One level for all: as fast as the default Hope's fastest; what it holds fades slowly."""
    fastest = presets.CONTINUUM["levels"][0]
    return [{"name": name, "chunk": fastest["chunk"], "rate": fastest["rate"], "retain": 0.98}]


RIVAL: dict[str, Any] = {
    "channel": "cms",
    "topology": "parallel",
    "activation": "swiglu",
    "levels": _alone("mlp"),
    "learning": presets.CONTINUUM["learning"],
    "learning_layers": presets.CONTINUUM["learning_layers"],
}
"""What makes a rival's gated MLP one level, which learns where Hope's levels do."""
LEVELS: dict[str, Model] = {
    "plain": PLAIN,
    "hope": Model(title="Hope, equal compute", model="hope"),
    "hope_bytes": ARMS["hope"],
    "one": Model(title="the same, one level", model="hope", fields={"levels": _alone("mlp")}),
    "by_rate": Model(
        title="the same, levels differ in rate only",
        model="hope",
        fields={"levels": _levels("hope", _by_rate)},
    ),
    "every": Model(
        title="the same, the levels of all layers learn",
        model="hope",
        fields={"learning_layers": None},
    ),
    "attention_plain": Model(
        title="Hope-Attention, trained plain",
        model="hope_attention",
        fields={"learning": "plain"},
    ),
    "attention": Model(title="Hope-Attention, equal compute", model="hope_attention"),
    "gated_delta": ARMS["gated_delta"],
    "gated_delta_bytes": Model(
        title="gated DeltaNet, trained with a learning MLP", model="gated_delta", fields=RIVAL
    ),
    "transformer": ARMS["transformer"],
}
"""Models of the studies of levels: the default Hope, trained so or plain, and rivals."""


def configuration(model: Model, size: presets.Size, **fields: Any) -> NestlingConfig:
    """The configuration of a model at a size; `fields` are of `FREE`, or for all models alike."""
    mixer = presets.MODELS[model.model]["mixer"]
    options = {"mixer_options": {mixer: dict(model.mixer)}} if model.mixer else {}
    return presets.configure(size, model.model, **{**options, **model.fields, **fields})


def build(model: Model, size: presets.Size, **fields: Any) -> nn.Module:
    """The untrained model, [B, T] -> [B, T, V]."""
    if model.model == "lstm":
        return LSTM(size.vocabulary, size.layers, size.parameters)
    return Arm(configuration(model, size, **fields))


def switched(model: Any, factor: float, *, every: bool = False) -> Any:
    """The same weights; levels learn while they read, at `factor` times their rates; 0: frozen.

    The MLP of a model without levels is one level (`RIVAL`). every: the levels of all layers learn,
    not those of the last ones alone.
    """
    config, weights = model.config.to_dict(), dict(model.state_dict())
    if config["channel"] == "swiglu":
        config |= RIVAL
        weights = {n.replace("channel.mlp.", "channel.mlps.0."): w for n, w in weights.items()}
        for layer in range(model.config.num_hidden_layers):
            weights[f"model.layers.{layer}.channel.weight"] = torch.ones(1)
    levels = [{**level, "rate": factor * level.get("rate", 0.0)} for level in config["levels"]]
    config["levels"] = levels if factor else [_still(level) for level in levels]
    layers = None if every else config["learning_layers"]
    config |= {"learning": "plain", "learning_layers": layers}
    twin = NestlingForCausalLM(type(model.config)(**config))
    twin.load_state_dict(weights)
    return twin.eval()


def _still(level: dict[str, Any]) -> dict[str, Any]:
    return {name: level[name] for name in ("name", "chunk")}


def deviations(config: NestlingConfig) -> dict[str, Any]:
    """The fields in which a Hope differs from the default one, those of `FREE` aside."""
    default = presets.tiny("hope").to_dict()
    given = config.to_dict()
    return {
        name: value
        for name, value in given.items()
        if name not in FREE and value != default.get(name)
    }
