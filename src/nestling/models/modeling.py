"""One causal language model for every mixer and channel memory, as Hugging Face classes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from nestling.continuum import Block, BlockState
from nestling.continuum.layers import NOW, LevelLinear, LevelRates
from nestling.levels import LevelUpdate
from nestling.memories import Attention
from nestling.models.cache import MemoryCache
from nestling.models.card import GENERATED, model_card
from nestling.models.configuration import NestlingConfig
from nestling.models.embedded import tokens_of
from nestling.models.learning import Request, learn_tokens, outer_targets
from nestling.models.one_token import read_one_token
from nestling.models.packing import as_documents, as_rows, documents
from nestling.models.streaming import StreamOutput, stream
from nestling.norm import RMSNorm
from nestling.tree import state_select

PIECE = 1024
"""Tokens whose activations are recomputed together, where a state of constant size goes between."""


class NestlingLayer(GradientCheckpointingLayer, Block):
    """A block whose activations may be recomputed in the backward pass.

    A long text is then read in pieces, from state to state, and only one piece's activations are
    alive at a time. Attention, whose state grows, is recomputed as a whole, and so is a compiled
    layer, whose code would grow with the pieces.
    """

    def __init__(self, config: NestlingConfig, layer: int) -> None:
        Block.__init__(self, *config.build(layer), eps=config.rms_norm_eps)

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._in_pieces(x):
            return Block.__call__(self, x, *args, **kwargs)  # `forward` recomputes, piece by piece
        return super().__call__(x, *args, **kwargs)

    def forward(
        self, x: Tensor, state: BlockState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, BlockState]:
        """[B, T, D] -> [B, T, D] and the state after the last token; mask as for memories."""
        if not self._in_pieces(x):
            return super().forward(x, state, mask)
        recompute: Any = self._gradient_checkpointing_func
        after: Any = state
        outputs = []
        for start in range(0, x.shape[1], PIECE):
            part = slice(start, start + PIECE)
            some = None if mask is None else mask[:, part]
            y, after = recompute(super().forward, x[:, part], after, some)
            outputs.append(y)
        return torch.cat(outputs, 1), after

    def read(self, x: Tensor, state: BlockState | None) -> tuple[Tensor, BlockState]:
        """`forward` without anybody's hooks, computed again in the backward pass where asked.

        Its gradients are asked for (`torch.autograd.grad`), which a reentrant checkpoint refuses.
        """
        if not (self.gradient_checkpointing and self.training) or self._in_pieces(x):
            return self.forward(x, state)
        found: Any = checkpoint(self.forward, x, state, use_reentrant=False)
        return found[0], found[1]

    def _in_pieces(self, x: Tensor) -> bool:
        if torch.compiler.is_compiling() or isinstance(self.mixer, Attention):
            return False
        if not (self.gradient_checkpointing and self.training and x.shape[1] > PIECE):
            return False
        func = self._gradient_checkpointing_func
        return getattr(func, "keywords", {}).get("use_reentrant") is False  # states' gradients


class NestlingPreTrainedModel(PreTrainedModel):
    """The facts both classes tell transformers about themselves."""

    config_class = NestlingConfig
    config: NestlingConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("NestlingLayer",)
    _skip_keys_device_placement = ("past_key_values",)
    _is_stateful = True
    _can_record_outputs = {"hidden_states": NestlingLayer}  # noqa: RUF012
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """Our own modules know their initial values; the embedding's scale is configured."""
        if isinstance(module, nn.Embedding) or module is getattr(self, "lm_head", None):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, LevelLinear):
            return  # its MLP gives it its values
        elif type(module).__module__.startswith("nestling."):
            _reset(module)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *args: Any,
        config: NestlingConfig | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a saved model; another vocabulary than the saved one is refused at once.

        Weights that are not in the file start as those of a new model, and transformers says so.
        """
        asked = kwargs.get("vocab_size", getattr(config, "vocab_size", None))
        if None not in (asked, pretrained_model_name_or_path):
            saved = _saved_vocabulary(pretrained_model_name_or_path, kwargs)
            if saved not in (None, asked) and not kwargs.get("ignore_mismatched_sizes"):
                raise ValueError(
                    f"{pretrained_model_name_or_path}: the saved model has vocab_size={saved}; it"
                    f" cannot be loaded with vocab_size={asked} (load it, then call"
                    " resize_token_embeddings)"
                )
        told = kwargs.pop("output_loading_info", False)
        model, found = super().from_pretrained(
            pretrained_model_name_or_path, *args, config=config, output_loading_info=True, **kwargs
        )
        _start(model, found["missing_keys"])
        both: Any = (model, found)
        return both if told else model

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """Save the model as transformers does, and a model card unless there is one."""
        super().save_pretrained(save_directory, *args, **kwargs)
        main = args[0] if args else kwargs.get("is_main_process", True)
        card = Path(save_directory, "README.md")
        if main and not card.exists():
            card.write_text(model_card(self.config), encoding="utf-8")

    def _upload_modified_files(
        self, working_dir: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        """Before files go to the hub: our card in place of an empty one made by transformers."""
        card = Path(working_dir, "README.md")
        if card.exists() and GENERATED in card.read_text(encoding="utf-8"):
            card.write_text(model_card(self.config), encoding="utf-8")
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing to do: the file beside a saved model imports the package."""


class NestlingModel(NestlingPreTrainedModel):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: NestlingConfig) -> None:
        super().__init__(config)
        config.check()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = [NestlingLayer(config, layer) for layer in range(config.num_hidden_layers)]
        self.layers: Any = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MemoryCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """[B, T] tokens -> [B, T, D]; with `use_cache` also the memory state after them.

        A token whose `attention_mask` is 0 leaves no trace: it neither decays nor writes a memory.
        `position_ids` that restart at 0 begin a new document (packed rows): it is read with fresh
        memories, and the state returned is that of each row's last document.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        self._refuse(kwargs, position_ids)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, x.shape[0], bool(use_cache))
        states = None if cache is None else cache.states
        columns = x.shape[1]
        mask = _token_mask(attention_mask, columns)
        layout = documents(position_ids, mask, x.shape[0])
        if layout is not None:
            if states is not None or kwargs.get("output_hidden_states"):
                raise ValueError(
                    "packed rows (position_ids that restart) cannot go on from past_key_values and"
                    " give no hidden states: put each document in a row of its own"
                )
            x, mask = as_documents(x, layout), layout.mask
        after = []
        hooks = kwargs.get("hooks", True)  # without: the engine's segments, nobody else's business
        gather: list[Tensor] | None = kwargs.get("gather")  # hidden states, for the engine
        for number, layer in enumerate(self.layers):
            if gather is not None:
                gather.append(x)
            read = layer if hooks else layer.forward
            x, state = read(x, None if states is None else states[number], mask)
            after.append(state)
        if layout is not None:
            x, after = as_rows(x, layout), list(state_select(tuple(after), layout.last))
        if cache is not None:
            cache.advance(tuple(after), columns)
        x = self.norm(x)
        if gather is not None:
            gather.append(x)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=cache)

    def below(
        self, ids: Tensor, states: Sequence[BlockState] | None, first: int
    ) -> tuple[Tensor, tuple[BlockState, ...]]:
        """Read tokens [B, T] up to the channel of layer `first`: [B, T, D], and the states.

        The state of that layer is its mixer's alone. `above` reads on from there.
        """
        x, after = self.embed_tokens(ids), []
        for number, layer in enumerate(self.layers[:first]):
            x, state = layer.read(x, None if states is None else states[number])
            after.append(state)
        half = self.layers[first]
        y, mixer = half.mixer(half.norm(x), None if states is None else states[first].mixer)
        return x + y, (*after, BlockState(mixer, None))

    def above(
        self, x: Tensor, states: Sequence[BlockState] | None, first: int
    ) -> tuple[Tensor, tuple[BlockState, ...]]:
        """The rest of the model after `below`: [B, T, D], and the states from layer `first` on."""
        before = None if states is None else states[first].channel
        x, channel = self.layers[first].channel(x, before)
        after = [BlockState(None, channel)]
        for number, layer in enumerate(self.layers[first + 1 :], first + 1):
            x, state = layer.forward(x, None if states is None else states[number])
            after.append(state)
        return self.norm(x), tuple(after)

    def init_states(self, batch_size: int) -> tuple[Any, ...]:
        """The memory state of every layer before the first token."""
        return tuple(layer.init(batch_size) for layer in self.layers)

    def _refuse(self, options: dict[str, Any], position_ids: Tensor | None) -> None:
        """Raise ValueError for what other models offer and this one would silently ignore."""
        asked = options.get("output_attentions")
        if self.config.output_attentions if asked is None else asked:
            raise ValueError(
                "output_attentions=True: memories have no attention weights; use"
                " output_hidden_states, or the states in past_key_values"
            )
        if position_ids is None and options.get("cu_seq_lens_q") is not None:
            raise ValueError("packed rows are told apart by position_ids; got cu_seq_lens_q alone")

    def _cache(self, cache: Any, batch: int, use_cache: bool) -> MemoryCache | None:
        if cache is None:
            recompute = self.training and any(x.gradient_checkpointing for x in self.layers)
            return MemoryCache(len(self.layers)) if use_cache and not recompute else None
        if not isinstance(cache, MemoryCache):
            raise TypeError(
                f"past_key_values must be a MemoryCache, the state of this model's memories; got"
                f" {type(cache).__name__}"
            )
        if len(cache) != len(self.layers) or cache.batch_size not in (-1, batch):
            raise ValueError(
                f"past_key_values holds {len(cache)} layers and {cache.batch_size} sequences; the"
                f" model has {len(self.layers)} layers, the input {batch} sequences"
            )
        return cache


@dataclass
class NestlingOutput(CausalLMOutputWithPast):
    """The output of a model whose levels learn, with their updates in the order they happened."""

    updates: tuple[LevelUpdate, ...] | None = None


class NestlingForCausalLM(NestlingPreTrainedModel, GenerationMixin):
    """A language model whose memories learn while it reads."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: NestlingConfig) -> None:
        super().__init__(config)
        self.model = NestlingModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        rates = [level.rate for level in config.memory_levels]
        self.rates = LevelRates(rates) if config.learn_rates else None
        self.post_init()

    @property
    def learns(self) -> bool:
        """Whether the levels of this model learn while it reads (`config.levels` have rates)."""
        return self.config.learns

    @property
    def learns_now(self) -> bool:
        """Whether they learn in the model's present mode (`config.learning`).

        Not where it is read with what others have learned (`nestling.adapt`, `Continuum`).
        """
        if not torch.compiler.is_compiling() and NOW.depth:
            return False
        return self.config.learns_in_training if self.training else self.config.learns

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the memory state is the cache: _prepare_cache_for_generation

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        """Give `generate` a cache before it reads, so that it can read a prompt in pieces."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if generation_config.use_cache is not False and "past_key_values" not in model_kwargs:
            model_kwargs["past_key_values"] = self.make_cache()

    def make_cache(self, states: tuple[Any, ...] | None = None, seen: int = 0) -> MemoryCache:
        """A cache that holds these states after `seen` tokens; an empty one without."""
        return MemoryCache(len(self.model.layers), states, seen)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MemoryCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        learn: bool | Sequence[str] | None = None,
        measure: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Next-token logits [B, T, V]; with `labels` (-100 = ignore) also the mean loss.

        `position_ids` are needed for packed rows only: every state knows its position.

        learn: in a model whose levels learn, False only reads, with what was learned so far; names
            of levels let only these learn; by default all do. Embeddings teach as the tokens whose
            rows of the embedding table they are; others (soft prompts) are only read, and a warning
            says so where so many tokens would have taught. measure: the norms in the output's
            `updates`.

        Where levels learn, the logits of padding are zeros.
        """
        if labels is None and inputs_embeds is None and past_key_values is not None:
            alone = (logits_to_keep, learn, measure, attention_mask, kwargs)
            if (quick := self._one_token(input_ids, past_key_values, *alone)) is not None:
                return quick
        learned = getattr(past_key_values, "learned", None) is not None
        asked = learn is not None
        learn = True if learn is None else learn if isinstance(learn, bool) else tuple(learn)
        learn = learn if learn and self.learns_now and self.device.type != "meta" else False
        if learn is not False and torch.compiler.is_exporting():
            raise ValueError("levels that learn cannot be exported: give learn=False")
        tokens, known = input_ids, None
        if learn is not False and input_ids is None and inputs_embeds is not None:
            tokens, known = self._tokens_of(inputs_embeds, attention_mask, past_key_values, asked)
            learn = False if known is None else learn
        if learned or learn is not False:
            if input_ids is not None and inputs_embeds is not None:
                raise ValueError("give exactly one of input_ids and inputs_embeds")
            return self._learning(
                tokens,
                inputs_embeds,
                known,
                attention_mask,
                position_ids,
                past_key_values,
                labels,
                use_cache,
                logits_to_keep,
                learn,
                measure,
                kwargs,
            )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        x = outputs.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, keep])
        masked = attention_mask is not None and self.learns_now
        mask = _token_mask(attention_mask, x.shape[1]) if masked else None
        if mask is not None:  # as where it learns
            logits = logits * mask[:, keep].unsqueeze(-1)
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def _one_token(
        self,
        ids: Tensor | None,
        cache: Any,
        keep: int | Tensor,
        learn: bool | Sequence[str] | None,
        measure: bool,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> CausalLMOutputWithPast | None:
        """`forward` of one token a sequence by `read_one_token`; None where that cannot serve."""
        if ids is None or ids.dim() != 2 or ids.shape[1] != 1 or not isinstance(keep, int):
            return None
        if not isinstance(cache, MemoryCache) or measure or not isinstance(learn, bool | None):
            return None
        learning = learn is not False and self.learns_now
        if learning != (cache.learned is not None) or self.training:
            return None
        config, wanted = self.config, [v for k, v in options.items() if k != "return_dict"]
        if any(each is not None and each is not False for each in wanted):
            return None
        if config.output_hidden_states or config.output_attentions:
            return None
        if cache.batch_size != len(ids) or len(cache) != len(self.model.layers):
            return None
        if _token_mask(mask, 1) is not None:
            return None
        logits = read_one_token(self, ids, cache)
        if logits is None:
            return None
        if learning:
            return NestlingOutput(logits=logits, past_key_values=cache, updates=())
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _tokens_of(
        self, embeds: Tensor, mask: Tensor | None, past: MemoryCache | None, asked: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens of embeddings, and which teach, [B, T] each; None where none does.

        Padding counts as teaching: it is in nobody's way. Warn if so many tokens in the place of
        the others would have made a level step; whoever `asked` to learn must give some tokens.
        """
        ids, known = tokens_of(embeds, self.get_input_embeddings().weight)
        real = _token_mask(mask, embeds.shape[1])
        others = ~known if real is None else ~known & real
        if embeds.is_meta or not bool(others.any()):
            return ids, None if embeds.is_meta else ~others
        none = bool(others.all() if real is None else others[real].all())
        if asked and none:
            raise ValueError(
                "levels learn from tokens, and none of inputs_embeds is a row of the embedding"
                " table: give input_ids, or learn=False"
            )
        seen = 0 if past is None else past.get_seq_length()
        places = [seen + column + 1 for column in others.any(0).nonzero()[:, 0].tolist()]
        active = [level for level in self.config.memory_levels if level.active]
        if not asked and any(level.due(at) for at in places for level in active):
            warnings.warn(
                "levels learn from tokens, so inputs_embeds that are no rows of the embedding table"
                " are only read: give learn=False to read without this warning",
                stacklevel=6,  # whoever called the model
            )
        return ids, None if none else ~others

    def _learning(
        self,
        ids: Tensor | None,
        embeds: Tensor | None,
        known: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: MemoryCache | None,
        labels: Tensor | None,
        use_cache: bool | None,
        logits_to_keep: int | Tensor,
        learn: bool | tuple[str, ...],
        measure: bool,
        options: dict[str, Any],
    ) -> CausalLMOutputWithPast:
        """`forward` while the levels learn from what is read (Eq. 71), or have learned before."""
        self.model._refuse(options, position_ids)
        if embeds is not None and known is None:  # they are only read
            ids = torch.zeros(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
        if known is not None and bool(known.all()):
            known, embeds = None, embeds if torch.is_grad_enabled() else None  # just tokens
        if ids is None:
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        names = [level.name for level in self.config.memory_levels]
        if wrong := [] if isinstance(learn, bool) else sorted(set(learn) - set(names)):
            raise ValueError(f"learn: no level {', '.join(wrong)}; there are {', '.join(names)}")
        if past is None and (use_cache or (use_cache is None and not self.training)):
            past = MemoryCache(len(self.model.layers)) if self.config.use_cache else None
        cache = None if past is None else self.model._cache(past, ids.shape[0], True)
        mask = _token_mask(attention_mask, ids.shape[1])
        config, shifted = self.config, options.get("shift_labels")
        order = "first_order" if config.learning == "plain" else config.learning
        targets = outer_targets(ids, labels, shifted, mask)
        grad = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        first = grad and config.truncate and order != "second_order"
        once = first and self.training and targets is not None and learn is not False
        once = once and (embeds is None or not embeds.requires_grad)  # gradients go through them
        layout = documents(position_ids, mask, ids.shape[0])
        hidden: Any = options.get("output_hidden_states")
        hidden = config.output_hidden_states if hidden is None else hidden
        given = Request(
            ids=ids,
            embeds=embeds,
            known=known,
            mask=mask,
            cache=cache,
            targets=targets if once else None,
            items=options.get("num_items_in_batch"),
            meta=order if grad and not once else None,
            learn=learn,
            keep_logits=targets is not None
            or isinstance(logits_to_keep, Tensor)
            or logits_to_keep != 1,
            measure=measure,
            hidden=bool(hidden),
        )
        logits, loss, updates, states = learn_tokens(self, given, layout)
        if loss is None and targets is not None:
            options = {**options, "shift_labels": targets}
            loss = self.loss_function(logits, labels, config.vocab_size, **options)
        if given.keep_logits and not isinstance(logits_to_keep, int):
            logits = logits[:, logits_to_keep]
        elif given.keep_logits:
            logits = logits[:, -logits_to_keep:]
        return NestlingOutput(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            updates=updates,
            hidden_states=_chosen(states, hidden),
        )

    def stream(
        self,
        tokens: Iterable[Tensor | list[int] | int],
        state: MemoryCache | None = None,
        *,
        piece: int = 512,
    ) -> Iterator[StreamOutput]:
        """Read a stream of tokens of any length in constant memory; see `streaming.stream`."""
        return stream(self, tokens, state, piece=piece)


def _chosen(states: tuple[Tensor, ...] | None, asked: Any) -> tuple[Tensor | None, ...] | None:
    """All hidden states, or the outputs of the layers `asked` for and None in the others' place."""
    if states is None or not isinstance(asked, (list, tuple, set)):
        return states
    return tuple(each if n in asked else None for n, each in enumerate(states[1:]))


def _reset(module: nn.Module) -> None:
    """Give a module its initial values, except for parameters and buffers that were loaded."""
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is None:
        return
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    loaded = [(p, p.clone()) for p in own if getattr(p, "_is_hf_initialized", False)]
    if own and len(loaded) == len(own):
        return
    reset()
    for parameter, value in loaded:
        parameter.copy_(value)


@torch.no_grad()
def _start(model: Any, names: Iterable[str]) -> None:
    """Give weights that were not loaded the values of a new model.

    Transformers initialises modules of its own kind; a plain layer of ours would hold whatever was
    in memory.
    """
    weights = dict(model.named_parameters())
    left = [name for name in names if name in weights and not weights[name].is_meta]
    if left:
        fresh = dict(type(model)(model.config).named_parameters())
        for name in left:
            weights[name].copy_(fresh[name])


def _saved_vocabulary(folder: Any, options: dict[str, Any]) -> int | None:
    """The vocabulary of a saved model, None where only weights or an adapter lie there."""
    names = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    hub = {name: options[name] for name in names if name in options}
    try:
        return NestlingConfig.get_config_dict(folder, **hub)[0].get("vocab_size")
    except OSError:
        return None


def _token_mask(attention_mask: Tensor | None, tokens: int) -> Tensor | None:
    """The mask of the last `tokens` columns as bool, None when all are real."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask must be [batch, tokens so far]; got {tuple(attention_mask.shape)} for"
            f" {tokens} new tokens"
        )
    mask = attention_mask[:, -tokens:].to(torch.bool)
    if torch.compiler.is_compiling() or mask.is_meta:  # what is in it is not known yet
        return mask
    return None if bool(mask.all()) else mask
