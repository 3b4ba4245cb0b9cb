"""Text as bytes: a tokenizer that needs no training and no download."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<pad>", "<bos>", "<eos>")
BYTE_VOCABULARY = 256 + len(_SPECIAL)
"""Tokens of the byte tokenizer: token i < 256 is byte i; then padding, begin and end."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer whose tokens are the bytes of UTF-8 (padding on the left)."""
    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=_SPECIAL[0],
        bos_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    if len(tokenizer) != BYTE_VOCABULARY:
        raise RuntimeError(f"byte tokenizer has {len(tokenizer)} tokens, not {BYTE_VOCABULARY}")
    return tokenizer


def _letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, extra = [], 256
    for byte in range(256):
        letters.append(chr(byte) if byte in printable else chr(extra))
        extra += byte not in printable
    return letters
