"""Pretrained models from single files: GGUF (llama.cpp) and llama2.c, as ordinary Llamas.

`load_pretrained` takes a folder, a name on the hub, a `.gguf` file, or a llama2.c `.bin` file with
its tokenizer beside it, and returns a Hugging Face model and tokenizer.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

__all__ = ["load_llama2c", "load_llama2c_tokenizer", "load_pretrained"]

_HEADER = struct.Struct("<7i")  # dim, hidden, layers, heads, kv_heads, vocabulary, context
SPACE = "\u2581"


def load_pretrained(name: str | Path, *, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """A causal language model and its tokenizer, from a folder, hub name, .gguf or .bin file.

    A GGUF file is dequantised into float32. Wrong files end in a ValueError that names them.
    """
    path = Path(name)
    try:
        if path.suffix == ".bin":
            return load_llama2c(path), load_llama2c_tokenizer(_tokenizer_of(path))
        options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if path.suffix != ".gguf":
            model = AutoModelForCausalLM.from_pretrained(name, **options)
            return model.eval(), AutoTokenizer.from_pretrained(name)
        if not path.is_file():
            raise OSError("no such file")
        options = {"gguf_file": path.name, "dtype": torch.float32, **options}
        model = AutoModelForCausalLM.from_pretrained(path.parent, **options)
        return model.eval(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, ImportError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name}: cannot load a model: {said}") from error


def load_llama2c(path: str | Path) -> LlamaForCausalLM:
    """A llama2.c checkpoint ("version 0", such as stories260K.bin) as a LlamaForCausalLM."""
    data = Path(path).read_bytes()
    if len(data) < _HEADER.size:
        raise ValueError(f"{path}: {len(data)} bytes are no llama2.c checkpoint")
    dim, hidden, layers, heads, kv_heads, vocabulary, context = _HEADER.unpack_from(data)
    if min(dim, hidden, layers, heads, kv_heads, context) < 1 or dim % heads:
        raise ValueError(f"{path}: not a llama2.c checkpoint: its header is {data[:28].hex()}")
    config = LlamaConfig(
        vocab_size=abs(vocabulary),
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=vocabulary > 0,
        bos_token_id=1,
        eos_token_id=2,
    )
    floats = torch.from_numpy(np.frombuffer(data, "<f4", offset=_HEADER.size).copy())
    model = LlamaForCausalLM(config)
    model.load_state_dict(_llama2c_weights(config, floats, str(path)))
    return model.eval()


def _llama2c_weights(config: LlamaConfig, floats: Tensor, path: str) -> dict[str, Tensor]:
    """The file's arrays, in their order, under the names of transformers."""
    d, f, n = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    size = d // config.num_attention_heads
    kv = size * config.num_key_value_heads
    plan: list[tuple[str, tuple[int, ...]]] = [
        ("input_layernorm", (d,)),
        ("self_attn.q_proj", (d, d)),
        ("self_attn.k_proj", (kv, d)),
        ("self_attn.v_proj", (kv, d)),
        ("self_attn.o_proj", (d, d)),
        ("post_attention_layernorm", (d,)),
        ("mlp.gate_proj", (f, d)),
        ("mlp.down_proj", (d, f)),
        ("mlp.up_proj", (f, d)),
    ]
    at = 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        if at + count > len(floats):
            raise ValueError(f"{path}: only {len(floats)} numbers; the file is cut")
        at += count
        return floats[at - count : at].view(*shape)

    weights = {"model.embed_tokens.weight": take(config.vocab_size, d)}
    for name, shape in plan:
        for layer, value in enumerate(take(n, *shape)):
            if name.endswith(("q_proj", "k_proj")):
                value = _half_split(value, size)
            weights[f"model.layers.{layer}.{name}.weight"] = value
    weights["model.norm.weight"] = take(d)
    take(2, config.max_position_embeddings, size // 2)  # the rotary tables, which are recomputed
    tied = config.tie_word_embeddings
    head = weights["model.embed_tokens.weight"] if tied else take(config.vocab_size, d)
    weights["lm_head.weight"] = head
    return weights


def _half_split(weight: Tensor, size: int) -> Tensor:
    """Rows for rotary pairs (2i, 2i+1) reordered for pairs (i, i + size/2), as transformers has."""
    pairs = weight.view(-1, size // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape_as(weight)


def load_llama2c_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """A llama2.c tokenizer file (such as tok512.bin): byte-pair merges by score, byte fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    pieces = _read_pieces(Path(path))
    names = [f"<0x{i - 3:02X}>" if 3 <= i < 259 else piece for i, (piece, _) in enumerate(pieces)]
    names[:3] = ["<unk>", "<s>", "</s>"]
    vocabulary = {name.replace(" ", SPACE): place for place, name in enumerate(names)}
    raw = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(vocabulary, [score for _, score in pieces]),
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    raw.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def _read_pieces(path: Path) -> list[tuple[str, float]]:
    """(token, score) of a llama2.c tokenizer file."""
    data, pieces, at = path.read_bytes(), [], 4
    try:
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            if length < 0 or at + 8 + length > len(data):
                raise ValueError("a token reaches beyond the end")
            pieces.append((data[at + 8 : at + 8 + length].decode("utf-8", "replace"), score))
            at += 8 + length
    except (struct.error, ValueError) as error:
        raise ValueError(f"{path}: not a llama2.c tokenizer file: {error}") from error
    if len(pieces) < 259:
        raise ValueError(
            f"{path}: a llama2.c tokenizer has at least 259 tokens; {len(pieces)} here"
        )
    return pieces


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the best score first, as llama2.c merges them."""
    found = []
    for name, place in vocabulary.items():
        if place >= 259:
            cuts = [(name[:cut], name[cut:]) for cut in range(1, len(name))]
            found += [
                (-scores[place], a, b) for a, b in cuts if a in vocabulary and b in vocabulary
            ]
    return [(a, b) for _, a, b in sorted(found)]


def _tokenizer_of(path: Path) -> Path:
    """The one tokenizer file beside a llama2.c checkpoint: tokenizer.bin or tok*.bin."""
    beside = [p for p in sorted(path.parent.glob("tok*.bin")) if p != path]
    if len(beside) != 1:
        raise ValueError(
            f"needs its tokenizer beside it, exactly one file tok*.bin; found"
            f" {[p.name for p in beside]}"
        )
    return beside[0]
