"""What can be learned from: text, token ids, or an iterator of either, as pieces of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_ids", "chat_ids", "check_range", "encode", "pieces"]


def as_ids(ids: Any, name: str = "ids") -> Tensor:
    """Token ids as [T], from a tensor [T] or [1, T] or a sequence of whole numbers."""
    tokens = torch.as_tensor(ids)
    tokens = tokens[0] if tokens.dim() == 2 and tokens.shape[0] == 1 else tokens
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(
            f"{name}: one stream of token ids, [T] or [1, T] whole numbers; got"
            f" {tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    return tokens.long()


def encode(text: str, tokenizer: Any, *, begin: bool) -> Tensor:
    """The tokens of a text; the tokenizer's own first token (BOS) only where a text begins."""
    if tokenizer is None:
        raise ValueError("learning from text needs a tokenizer: adapt(model, tokenizer=...)")
    plain = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    bos = tokenizer.bos_token_id
    if begin and bos is not None and _adds_bos(tokenizer, bos):
        plain = [bos, *plain]
    return torch.tensor(plain, dtype=torch.long)


def chat_ids(chat: list[Any], tokenizer: Any) -> Tensor:
    """The tokens of a chat, [T], up to where the assistant's answer begins."""
    if not chat or not all(isinstance(turn, Mapping) and "role" in turn for turn in chat):
        raise ValueError(
            'a chat is a list of {"role": ..., "content": ...}; token ids go into a tensor [B, T];'
            f" got {str(chat)[:80]}"
        )
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError("a chat needs a tokenizer with a chat template: adapt(model, tokenizer=)")
    made = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    return torch.tensor(made["input_ids"], dtype=torch.long).flatten()


def _adds_bos(tokenizer: Any, bos: int) -> bool:
    ids = tokenizer("a", verbose=False).input_ids
    return bool(ids) and ids[0] == bos


def pieces(source: Any, tokenizer: Any, *, begin: bool) -> Iterator[Tensor]:
    """A source as pieces [T] of one stream; each text of an iterator is encoded by itself."""
    if isinstance(source, str):
        yield encode(source, tokenizer, begin=begin)
    elif isinstance(source, Tensor):
        yield as_ids(source)
    elif isinstance(source, Iterable):
        single: list[int] = []
        for item in source:
            if isinstance(item, int) and not isinstance(item, bool):
                single.append(item)
                if len(single) < 1024:
                    continue
                yield torch.tensor(single)
                single = []
            elif isinstance(item, str):
                yield encode(item, tokenizer, begin=begin)
            else:
                yield as_ids(item)
            begin = False
        if single:
            yield torch.tensor(single)
    else:
        raise TypeError(
            f"learn takes text, token ids or an iterator of them; got {type(source).__name__}"
        )


def check_range(ids: Tensor, vocabulary: int) -> Tensor:
    """Refuse ids the model does not know."""
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        raise ValueError(
            f"ids: the model knows tokens 0 to {vocabulary - 1}; got {int(ids.min())} to"
            f" {int(ids.max())}"
        )
    return ids
