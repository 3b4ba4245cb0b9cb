"""Tokenizers by a short name: bytes, a BPE trained on the spot, or an existing one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestling.files import check_folder, write_atomic
from nestling.train.corpus import Corpus


class TextEncoder:
    """A Hugging Face tokenizer as packing needs it."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token, which ends every document")
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_token_id: int = tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def fingerprint(self) -> str:
        """A checksum of the vocabulary and its rules."""
        return hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def check_tokenizer(name: str) -> None:
    """Refuse a `bpe:` without a proper size, and what is no tokenizer."""
    if name.startswith("bpe:"):
        match = re.fullmatch(r"bpe:(\d{1,9})", name)
        if not match or int(match[1]) < 260:
            raise ValueError(f"tokenizer {name!r}: expected bpe:SIZE with a size of at least 260")
    else:
        load_tokenizer(name, (), Path())


def load_tokenizer(name: str, corpora: Sequence[Corpus], cache: Path) -> TextEncoder:
    """`bytes`, `bpe:SIZE` (trained on the corpora once, then cached), or a folder or hub name."""
    from transformers import AutoTokenizer

    if name == "bytes":
        from nestling.models.tokenizer import byte_tokenizer

        return TextEncoder(byte_tokenizer())
    if name.startswith("bpe:"):
        return TextEncoder(_trained(name, corpora, cache))
    try:
        if Path(name).is_dir():
            check_folder(Path(name))
        return TextEncoder(AutoTokenizer.from_pretrained(name, trust_remote_code=False))
    except Exception as error:  # parsers of other packages fail in their own ways
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"tokenizer {name!r}: expected bytes, bpe:SIZE, or the folder of a tokenizer ({reason})"
        ) from error


def _trained(name: str, corpora: Sequence[Corpus], cache: Path) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    check_tokenizer(name)
    facts = json.dumps([name, [corpus.fingerprint() for corpus in corpora]])
    path = cache / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.tokenizer.json"
    if not path.exists():
        write_atomic(path, _train(corpora, int(name[4:])).to_str().encode())
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(path)),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _train(corpora: Sequence[Corpus], size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (text for corpus in corpora for text, _ in corpus.pieces())
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer
