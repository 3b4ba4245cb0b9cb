"""Pretrained models from single files: GGUF (llama.cpp) and llama2.c, as ordinary Llamas.

`load_pretrained` takes a folder, a name on the hub, a `.gguf` file, or a llama2.c `.bin` file with
its tokenizer beside it, and returns a Hugging Face model and tokenizer.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from nestling import pretrained as shipped
from nestling.adaptation.memory_files import LEVELS
from nestling.files import (
    BrokenFileError,
    check_finite,
    check_folder,
    expect,
    open_regular,
    read_json,
)

_HEADER = struct.Struct("<7i")  # dim, hidden, layers, heads, kv_heads, vocabulary, context
SPACE = "\u2581"
TOKENIZER_BYTES, TOKEN_BYTES = 64 << 20, 4096  # at most, of a tokenizer file and of a token
_BESIDE = (  # read beside a GGUF file
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def load_pretrained(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    strict: bool = True,
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer, from a folder, hub name, .gguf or .bin file.

    "nestling:small" is a model that comes with the package (`nestling.pretrained`), in float32.
    A GGUF file is dequantised into float32. Wrong files end in a ValueError that names them: files
    that are not regular, sizes that the weights do not fill, and (`strict`) weights that are
    missing, left over, of another shape or not finite. With `strict=False` missing weights are
    initialised and others ignored. Python code that comes with a model runs only with
    `trust_remote_code=True`.
    """
    if str(name).startswith(shipped.PREFIX):
        name, dtype = shipped.find(str(name)), dtype or torch.float32
    path = Path(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        if path.suffix == ".bin":
            return load_llama2c(path), load_llama2c_tokenizer(_tokenizer_of(path))
        if path.suffix == ".gguf":
            if not path.exists():
                raise OSError("no such file")
            check_gguf(path)
            for beside in filter(Path.exists, map(path.with_name, _BESIDE)):
                open_regular(beside, TOKENIZER_BYTES).close()
            options |= {"gguf_file": path.name}
            config = AutoConfig.from_pretrained(path.parent, **options)
            _check_fields(config.to_dict(), path.name)
            _check_size(config, path.stat().st_size)
            return _load(path.parent, options, dtype or torch.float32, strict)
        if path.is_dir():
            _check_folder(path, trust_remote_code)
        elif not _HUB_NAME.fullmatch(str(name)):
            raise OSError("there is no such folder (a name on the hub is NAME or OWNER/NAME)")
        return _load(name, options, dtype, strict)
    except Exception as error:  # parsers of other packages fail in their own ways
        raise _refused(name, error) from error


def _load(
    name: str | Path, options: dict[str, Any], dtype: torch.dtype | None, strict: bool
) -> tuple[Any, Any]:
    kind = {} if dtype is None else {"dtype": dtype}
    model, info = AutoModelForCausalLM.from_pretrained(
        name, output_loading_info=True, **options, **kind
    )
    if strict:
        _check_weights(model, info)
    else:
        _begin(model, info["missing_keys"])
    return model.eval(), AutoTokenizer.from_pretrained(name, **options)


def _check_weights(model: Any, info: dict[str, Any], own: set[str] | None = None) -> None:
    """Refuse weights that are missing, left over, of other shapes or not finite.

    own: the names a saved model of another configuration has; others may then differ.
    """
    missing, spare = set(info["missing_keys"]), set(info["unexpected_keys"])
    if own is not None:
        missing, spare = missing & own, spare - own
    for said, keys in (
        ("its weights are incomplete: missing", sorted(missing)),
        ("it holds weights the model does not have:", sorted(spare)),
        ("it holds weights of other shapes:", [str(k) for k in info["mismatched_keys"]]),
    ):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ValueError(f"{said} {', '.join(keys[:3])}{more}")
    for key, weight in model.state_dict().items():  # natural steps keep theirs in buffers
        check_finite(weight, key)


def _begin(model: Any, missing: Iterable[str]) -> None:
    """Give weights that no file held the values of a fresh model."""
    if missing := sorted(missing):
        fresh = type(model)(model.config).state_dict()
        model.load_state_dict({key: fresh[key] for key in missing if key in fresh}, strict=False)


def load_start(folder: str | Path, config: Any) -> Any:
    """A model of a configuration that begins with a saved model's weights (a warm start).

    Weights that only one of the two has may differ: they begin as in a fresh model, or are left
    out. The folder itself must be whole: wrong files end in a ValueError as in `load_pretrained`.
    """
    path = Path(folder)
    try:
        _check_folder(path, False)
        saved = AutoConfig.from_pretrained(path, trust_remote_code=False)
        if saved.model_type != config.model_type:
            raise ValueError(f"a {saved.model_type} cannot start a {config.model_type}")
        with torch.device("meta"):
            own = AutoModelForCausalLM.from_config(saved, trust_remote_code=False)
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            trust_remote_code=False,
        )
        _check_weights(model, info, set(own.state_dict()))
        _begin(model, info["missing_keys"])
    except Exception as error:  # parsers of other packages fail in their own ways
        raise _refused(folder, error) from error
    return model


def _refused(name: str | Path, error: Exception) -> ValueError:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(f"{name}: cannot load a model: {said}")


def _check_folder(folder: Path, trust: bool) -> None:
    """Refuse a model folder that would hang, or whose configuration asks for more than it holds."""
    kinds = (".safetensors", ".bin", ".pt", ".pth")
    weights = sum(size for path, size in check_folder(folder).items() if path.suffix in kinds)
    found = check_config(folder)
    if "auto_map" in found and not trust and found.get("model_type") not in CONFIG_MAPPING:
        raise ValueError("it comes with Python code of its own, which runs only when trusted")
    if trust:
        return
    _check_size(AutoConfig.from_pretrained(folder, trust_remote_code=False), weights)


def _check_size(config: Any, weights: int) -> None:
    """Refuse a configuration of more parameters than so many bytes of weights can hold."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    count = sum(p.numel() for p in skeleton.parameters())
    if count > 8 * weights + (1 << 20):
        raise ValueError(f"it declares {count:,} parameters, but its files hold {weights:,} bytes")


def check_config(folder: Path) -> dict[str, Any]:
    """The fields of a model folder's config.json, none of which declares more than is sensible."""
    found: dict[str, Any] = expect(
        read_json(folder / "config.json", 16 << 20)[0], dict, "config.json"
    )
    _check_fields(found, "config.json")
    return found


def _check_fields(found: dict[str, Any], file: str) -> None:
    parts = {key: part for key, part in found.items() if isinstance(part, dict)}
    for name, fields in {"": found, **parts}.items():
        for keys, most in _MOST.items():
            for key in keys.split():
                value = fields.get(key)
                if value is not None and (type(value) is not int or not 0 <= value <= most):
                    where = f"{name}.{key}" if name else key
                    said = f"must be from 0 to {most}; got {str(value)[:40]}"
                    raise ValueError(f"{file}: {where} {said}")
        levels = fields.get("levels")
        if isinstance(levels, list) and len(levels) > LEVELS:
            raise ValueError(f"{file}: at most {LEVELS} levels; got {len(levels)}")


LAYERS = 2048
_MOST = {  # what a configuration may declare
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers": LAYERS,
    "hidden_size n_embd d_model": 1 << 20,
    "intermediate_size n_inner d_ff": 1 << 22,
    "num_attention_heads num_key_value_heads n_head num_heads": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings n_positions n_ctx": 1 << 27,
}


def load_llama2c(path: str | Path) -> LlamaForCausalLM:
    """A llama2.c checkpoint ("version 0", such as stories260K.bin) as a LlamaForCausalLM."""
    with open_regular(Path(path)) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise ValueError(f"{path}: {size} bytes are no llama2.c checkpoint")
        dim, hidden, layers, heads, kv_heads, vocabulary, context = _HEADER.unpack(head)
        if (
            min(dim, hidden, layers, heads, kv_heads, context, abs(vocabulary)) < 1
            or dim % heads
            or heads % kv_heads
            or layers > LAYERS
            or (dim // heads) % 2
        ):
            raise ValueError(f"{path}: not a llama2.c checkpoint: its header is {head.hex()}")
        kv = dim // heads * kv_heads
        block = 2 * dim + 2 * dim * dim + 2 * kv * dim + 3 * hidden * dim
        words = abs(vocabulary) * dim * (1 if vocabulary > 0 else 2)
        count = layers * block + dim + context * (dim // heads) + words
        if size != _HEADER.size + 4 * count:
            raise ValueError(
                f"{path}: its header asks for {count} numbers, its {size} bytes hold"
                f" {(size - _HEADER.size) // 4}: the file is cut, or of another kind"
            )
        floats = torch.from_numpy(np.frombuffer(file.read(), "<f4").copy())
    check_finite(floats, path)
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
    with open_regular(path, TOKENIZER_BYTES) as file:
        data = file.read()
    pieces: list[tuple[str, float]] = []
    at = 4
    try:
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            if not 0 <= length <= TOKEN_BYTES or at + 8 + length > len(data):
                raise ValueError(f"a token of {length} bytes reaches beyond the end")
            if not math.isfinite(score):
                raise ValueError(f"a token with the score {score}")
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


# GGUF: the header is walked through before any other package sees the file

_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type
_STRING, _ARRAY, _ENTRIES, _DEPTH = 8, 9, 1 << 20, 4


class _Walk:
    """A place in a GGUF file that moves forward, never beyond its end."""

    def __init__(self, file: Any, size: int) -> None:
        self.file, self.size, self.at = file, size, 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > self.size:
            raise ValueError("an entry reaches beyond the end of the file")
        self.at += count
        data: bytes = self.file.read(count)
        return data

    def skip(self, count: int) -> None:
        if count < 0 or self.at + count > self.size:
            raise ValueError("an entry reaches beyond the end of the file")
        self.at += count
        self.file.seek(self.at)

    def number(self, kind: str) -> int:
        (value,) = struct.unpack(kind, self.take(struct.calcsize(kind)))
        return int(value)

    def text(self) -> bytes:
        length = self.number("<Q")
        if length > 1 << 24:
            raise ValueError(f"a text of {length} bytes")
        return self.take(length)

    def value(self, kind: int, depth: int = 0) -> None:
        if kind in _FIXED:
            self.skip(_FIXED[kind])
        elif kind == _STRING:
            self.text()
        elif kind == _ARRAY and depth < _DEPTH:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in _FIXED:
                self.skip(count * _FIXED[inner])
                return
            if count > _ENTRIES * 4:
                raise ValueError(f"an array of {count} entries")
            for _ in range(count):
                self.value(inner, depth + 1)
        else:
            raise ValueError(f"a value of the unknown type {kind}")


def check_gguf(path: Path) -> None:
    """Refuse a GGUF file whose header declares what the file does not hold."""
    with open_regular(path) as file:
        walk = _Walk(file, os.fstat(file.fileno()).st_size)
        try:
            if walk.take(4) != b"GGUF":
                raise ValueError("it does not start with GGUF")
            if (version := walk.number("<I")) not in (2, 3):
                raise ValueError(f"version {version}; 2 and 3 are read")
            tensors, settings = walk.number("<Q"), walk.number("<Q")
            if not 1 <= tensors <= _ENTRIES or settings > _ENTRIES:
                raise ValueError(f"{tensors} tensors and {settings} settings")
            names = set()
            for _ in range(settings):
                names.add(walk.text())
                walk.value(walk.number("<I"))
            total = sum(_gguf_tensor(walk) for _ in range(tensors))
            if b"general.architecture" not in names:
                raise ValueError("it names no architecture")
            if total > 8 * walk.size:
                raise ValueError(f"{total} weights in {walk.size} bytes")
        except (ValueError, struct.error) as error:
            raise BrokenFileError(f"not a proper GGUF file: {error}") from error


def _gguf_tensor(walk: _Walk) -> int:
    """Walk over one tensor's description; returns its number of weights."""
    walk.text()
    dimensions = walk.number("<I")
    if not 1 <= dimensions <= 4:
        raise ValueError(f"a tensor of {dimensions} dimensions")
    count = math.prod(walk.number("<Q") for _ in range(dimensions))
    if count < 1:
        raise ValueError("a tensor without weights")
    walk.number("<I")  # its type
    if walk.number("<Q") > walk.size:
        raise ValueError("a tensor begins beyond the end of the file")
    return count
