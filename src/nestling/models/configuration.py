"""The one configuration of all language models."""

from __future__ import annotations

import difflib
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from nestling.checks import one_of
from nestling.continuum.engine import TRANSFERS, MemoryLevel
from nestling.continuum.layers import ACTIVATIONS, GATED, Channel
from nestling.levels import Level
from nestling.memories import Memory
from nestling.models.specs import CHANNELS, MIXERS, TOPOLOGIES, mixer_config

_STUB = "modeling_nestling"
_AUTO_MAP = {
    "AutoConfig": f"{_STUB}.NestlingConfig",
    "AutoModel": f"{_STUB}.NestlingModel",
    "AutoModelForCausalLM": f"{_STUB}.NestlingForCausalLM",
}
_CODE = """# Lets Hugging Face tools open this model with trust_remote_code=True.
try:
    from nestling.models import NestlingConfig, NestlingForCausalLM, NestlingModel
except ImportError as error:
    raise ImportError("this model needs nestling: pip install 'nestling[lm]'") from error
"""

LEARNING = ("plain", "frozen", "first_order", "second_order")
"""How the initial states of learning levels are trained."""

_ENTRY = {"name", "chunk", "rate", "retain", "early"}
_LEVELS = (("fast", 512), ("middle", 2048), ("slow", 8192), ("slowest", 32768))


@strict
class NestlingConfig(PreTrainedConfig):
    """The parts of a model: a mixer and a channel memory per layer, and their sizes.

    mixer: the sequence memory, one name for all layers or one per layer (hybrids); `MIXERS` lists
        them: "steered", "self_modifying", "attention", "titans", "deltanet", ...
    mixer_options: options of the mixers by name, `{"self_modifying": {"chunk": 64}}`: the fields
        of the memory's own configuration.
    channel: the channel memory, one name or one per layer: "cms" (continuum memory), "swiglu"
        (Transformer++) or "in_context" (AdaTransformer).
    levels: the continuum memory's levels, fastest first: `[{"name": "fast", "chunk": 512}, ...]`;
        chunk None never changes. A level with a `rate` above 0 learns while the model reads, one
        step of gradient descent every `chunk` tokens (Eq. 71), and with `retain` below 1 drifts
        back to where it began; without a rate it is frozen within a sequence. `early` gives it
        smaller chunks at first: `[[64, 8], [256, 32]]` is 8 up to token 64, then 32 up to 256.
    learning: how the learning levels' initial states are trained (Eq. 73): "plain" (as ordinary
        weights: in `train()` mode no level learns, in `eval()` mode they do), "first_order" (by the
        gradient at the adapted weights), "second_order" (by the true gradient, through every
        update) or "frozen" (not at all).
    learning_layers: the levels of so many last layers learn, those below stand still; None: of
        all layers. What lies below is read once for a whole text, so one last layer that learns
        makes a training step hardly dearer, at any chunk (`docs/cms.md`).
    learn_rates: the rates are trained too, from the given ones on.
    natural: the levels take natural steps, `G A^-1` with A the second moment of each matrix's
        inputs (`nestling.continuum.natural`); the model keeps A as buffers and learns it in
        training. False is plain gradient descent.
    truncate: in first-order training the memories' states are constants at the start of every
        segment (the tokens between two updates), which lets one backward pass per segment do all;
        False keeps the exact gradient across segments, at about twice the cost.
    transfer: None (sequential, Eq. 73), or how a slower level learns the initial state of the next
        faster one, which returns to it whenever the slower one is due (nested, Eq. 72): "frozen",
        "first_order", "reptile" or "second_order".
    topology: "chain" (Eq. 70) or "parallel" (independent levels, Eq. 74).
    activation: of the levels' MLPs: "gelu", "relu", "relu2", "silu", or "swiglu" for gated ones.
    intermediate_size: hidden width of each MLP (of each level); None: what keeps a layer's channel
        near the usual 8 hidden_size^2 parameters.
    max_position_embeddings: the context callers should plan with; memories have no limit.
    """

    model_type = "nestling"
    keys_to_ignore_at_inference = ["past_key_values", "updates"]  # noqa: RUF012 (Trainer adds to it)

    vocab_size: int = 259
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    mixer: str | list[str] = "self_modifying"
    mixer_options: dict | None = None
    channel: str | list[str] = "cms"
    intermediate_size: int | None = None
    levels: list[dict] | None = None
    learning: str = "first_order"
    learning_layers: int | None = None
    learn_rates: bool = False
    natural: bool = False
    truncate: bool = True
    transfer: str | None = None
    topology: str = "chain"
    activation: str = "gelu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if "model_type" not in kwargs:  # a saved configuration has it, and may come from later
            self._refuse_typos(kwargs)
        if self.mixer_options is None:
            self.mixer_options = {}
        if self.levels is None:
            self.levels = [{"name": name, "chunk": chunk} for name, chunk in _LEVELS]
        self.check()
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the configuration, and the file that lets stock tools open the model.

        With it, `trust_remote_code=True` is enough in a process that never imported nestling.
        """
        self.auto_map = dict(_AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)
        Path(save_directory, f"{_STUB}.py").write_text(_CODE)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing to do: the saved file imports the package, no source is copied."""

    def check(self) -> None:
        """Raise ValueError, naming the field, unless a model can be built from this."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            _at_least_one(name, getattr(self, name))
        if self.intermediate_size is not None:
            _at_least_one("intermediate_size", self.intermediate_size)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads="
                f"{self.num_attention_heads}"
            )
        for name, options in (self.mixer_options or {}).items():
            if name not in MIXERS or not isinstance(options, dict):
                first = self.mixer if isinstance(self.mixer, str) else self.mixer[0]
                raise ValueError(
                    "mixer_options are given by the mixer's name, as in mixer_options="
                    f"{{{first!r}: {{'chunk': 32}}}}; got {{{name!r}: {options!r}}} (the mixers are"
                    f" {', '.join(sorted(MIXERS))})"
                )
            self._mixer_config(name)  # also where no layer has it
        for layer in range(self.num_hidden_layers):
            self._check_layer(*self.names_of(layer))
        one_of("topology", self.topology, TOPOLOGIES)
        one_of("activation", self.activation, (*ACTIVATIONS, GATED))
        levels = [level.name for level in self.level_list]
        if len(set(levels)) < len(levels):
            raise ValueError(f"levels must have different names; got {levels}")
        self._check_learning()

    def _check_layer(self, mixer: str, channel: str) -> None:
        if mixer not in MIXERS and mixer in ("hope", "hope_attention", "transformer"):
            raise ValueError(
                f"mixer={mixer!r} names a model, not a mixer: nestling.models.presets.tiny("
                f"model={mixer!r}) configures it (the mixers are {', '.join(sorted(MIXERS))})"
            )
        one_of("mixer", mixer, sorted(MIXERS))
        self._mixer_config(mixer)
        one_of("channel", channel, sorted(CHANNELS))
        hidden, heads = self.intermediate_size, self.num_attention_heads
        if channel == "in_context" and hidden and hidden % heads:
            raise ValueError(
                f"heads={heads} must divide the in-context channel's hidden width; got {hidden}"
            )

    def _check_learning(self) -> None:
        one_of("learning", self.learning, sorted(LEARNING))
        if self.learning_layers is not None:
            _at_least_one("learning_layers", self.learning_layers)
        if self.transfer is not None:
            one_of("transfer", self.transfer, sorted(TRANSFERS))
        levels = self.memory_levels
        if not any(level.active for level in levels):
            if self.learn_rates:
                raise ValueError(
                    "learn_rates=True trains the rates of learning levels, and no level has a rate:"
                    " give levels=[{'name': ..., 'chunk': ..., 'rate': 0.1}, ...]"
                )
            return
        channels = [self._of_layer("channel", n) for n in range(self.num_hidden_layers)]
        if "cms" not in channels:
            raise ValueError(
                f"levels learn in the channel 'cms' (a continuum memory); channel is"
                f" {self.channel!r}, so no level can have a rate"
            )
        if "cms" not in channels[self.first_learning :]:
            raise ValueError(
                f"learning_layers={self.learning_layers}: none of these last layers has the"
                f" channel 'cms', whose levels learn; channel is {self.channel!r}"
            )
        for name in ("learn_rates", "natural"):
            if getattr(self, name) and not self.learns_in_training:
                raise ValueError(
                    f"{name}=True is trained while the levels learn, and learning='plain' trains"
                    " them standing still: take learning='first_order' or 'second_order'"
                )
        if self.transfer == "second_order" and self.learning != "second_order":
            raise ValueError(
                "transfer='second_order' needs learning='second_order'; got"
                f" learning={self.learning!r}"
            )

    @property
    def first_learning(self) -> int:
        """The first layer whose levels learn; more layers than there are is all of them."""
        if self.learning_layers is None:
            return 0
        return max(0, self.num_hidden_layers - self.learning_layers)

    @property
    def learns(self) -> bool:
        """Whether any level learns while the model reads."""
        return any(level.active for level in self.memory_levels)

    @property
    def learns_in_training(self) -> bool:
        """Whether they learn in `train()` mode too: always, but with learning="plain"."""
        return self.learns and self.learning != "plain"

    @property
    def memory_levels(self) -> tuple[MemoryLevel, ...]:
        """The levels with their rates, fastest first."""
        return tuple(
            MemoryLevel(
                name=level.name,
                chunk=level.chunk,
                rate=float(entry.get("rate", 0.0)),
                retain=float(entry.get("retain", 1.0)) if entry.get("rate") else 1.0,
                early=level.early,
            )
            for level, entry in zip(self.level_list, self.levels or [], strict=True)
        )

    def names_of(self, layer: int) -> tuple[str, str]:
        """The names of one layer's mixer and channel memory."""
        return self._of_layer("mixer", layer), self._of_layer("channel", layer)

    def mixer_config(self, layer: int) -> Any:
        """The configuration of one layer's mixer."""
        return self._mixer_config(self.names_of(layer)[0])

    def _mixer_config(self, name: str) -> Any:
        options = (self.mixer_options or {}).get(name, {})
        return mixer_config(name, self.hidden_size, self.num_attention_heads, options)

    def build(self, layer: int) -> tuple[Memory, Channel]:
        """One layer's mixer and channel memory."""
        mixer, channel = self.names_of(layer)
        return MIXERS[mixer][1](self._mixer_config(mixer)), CHANNELS[channel](self)

    @property
    def level_list(self) -> tuple[Level, ...]:
        """The continuum memory's levels, fastest first."""
        if not self.levels:
            raise ValueError("levels must name at least one level; got none")
        for entry in self.levels:
            known = isinstance(entry, dict) and {"name", "chunk"} <= set(entry) <= _ENTRY
            if not known:
                raise ValueError(
                    "each of levels has a name and a chunk, as in {'name': 'fast', 'chunk': 512},"
                    f" and if it learns a rate (and retain); got {entry!r}"
                )
        return tuple(
            Level(
                name=e["name"],
                chunk=math.inf if e["chunk"] is None else e["chunk"],
                early=tuple(tuple(pair) for pair in e.get("early", ())),
            )
            for e in self.levels
        )

    def _of_layer(self, field: str, layer: int) -> str:
        """The entry for one layer of a field that holds one name or one per layer."""
        value = getattr(self, field)
        if isinstance(value, str):
            return value
        if len(value) != self.num_hidden_layers:
            raise ValueError(
                f"{field} lists {len(value)} names for num_hidden_layers={self.num_hidden_layers}:"
                " give one name, or one per layer"
            )
        return str(value[layer])

    def _refuse_typos(self, unknown: dict[str, Any]) -> None:
        """Transformers keeps unknown keywords silently; one that resembles ours is a mistake."""
        ours = [f.name for f in fields(type(self)) if f.name in type(self).__annotations__]
        for key in unknown:
            if close := difflib.get_close_matches(key, ours, n=1, cutoff=0.8):
                raise ValueError(f"unknown field {key!r}; did you mean {close[0]!r}?")


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}")
