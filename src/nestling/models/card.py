"""Model cards: what a saved model is, how it was trained, how to load it, and its licence."""

from __future__ import annotations

from math import inf

from nestling.models.configuration import NestlingConfig
from nestling.models.presets import MODELS, parameter_count
from nestling.models.tokenizer import BYTE_VOCABULARY

GENERATED = "has been automatically generated"
"""The text of the card that transformers makes for a new repository on the hub."""

_TITLES = {
    "hope": "Hope",
    "hope_attention": "Hope-Attention",
    "transformer": "Transformer++",
    "titans": "Titans",
    "deltanet": "DeltaNet",
}


def model_card(
    config: NestlingConfig, *, training: str | None = None, licence: str | None = None
) -> str:
    """The `README.md` of a saved model, in the form of the Hugging Face hub.

    training: how it was trained, in Markdown. licence: an identifier such as "apache-2.0".
    """
    parts = config.mixer, config.channel
    model = next((n for n, m in MODELS.items() if (m["mixer"], m["channel"]) == parts), None)
    title = _TITLES.get(model or "", model or "A hybrid")
    tags = ["nestling", "nested-learning", *([model] if model else [])]
    head = ["library_name: transformers", "pipeline_tag: text-generation"]
    head += [f"license: {licence}"] if licence else []
    head += ["tags:", *(f"- {tag}" for tag in tags)]
    text = "bytes of UTF-8" if config.vocab_size == BYTE_VOCABULARY else "tokens"
    return "\n".join(
        [
            "---",
            *head,
            "---",
            "",
            f"# {title}, {parameter_count(config):,} parameters",
            "",
            f"A causal language model over {text} (vocabulary of {config.vocab_size:,}) made with"
            " nestling, an implementation of"
            " [Nested Learning](https://arxiv.org/abs/2512.24695).",
            "",
            f"- {config.num_hidden_layers} layers of width {config.hidden_size} with"
            f" {config.num_attention_heads} heads",
            f"- mixer: {_names(config.mixer)}; channel: {_names(config.channel)}",
            *_levels(config),
            "",
            "## How it was trained",
            "",
            training or "Not recorded: whoever trained it should say so here.",
            "",
            "## How to load it",
            "",
            "With `pip install 'nestling[lm]'`:",
            "",
            "```python",
            "import nestling",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model = AutoModelForCausalLM.from_pretrained("THIS FOLDER")',
            'tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")',
            "```",
            "",
            "Without `import nestling`, pass `trust_remote_code=True`. From a shell:"
            ' `nestling generate "THIS FOLDER" --prompt "..."`.',
            "",
            "## Licence",
            "",
            licence or "Not stated: whoever publishes it should state one here.",
            "",
        ]
    )


def _names(value: str | list[str]) -> str:
    return value if isinstance(value, str) else ", ".join(value)


def _levels(config: NestlingConfig) -> list[str]:
    if "cms" not in config.channel:
        return []
    said = []
    for level in config.memory_levels:
        pace = f"every {level.chunk:g} tokens" if level.chunk < inf else "fixed"
        rate = f", learning at rate {level.rate:g}" if level.active else ""
        said.append(f"{level.name} {pace}{rate}")
    how = "learn while it reads" if config.learns else "updated at their own pace in training"
    if config.learns and config.first_learning:
        last = config.num_hidden_layers - config.first_learning
        how += ", in the last layer" if last == 1 else f", in the last {last} layers"
    return [f"- levels ({how}): {'; '.join(said)}"]
