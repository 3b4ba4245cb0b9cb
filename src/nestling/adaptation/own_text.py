"""A model's own text: a sample to measure forgetting by, with no data from elsewhere.

Text sampled from a model at temperature 1 has, on average, the lowest loss under that very model:
whatever a memory learns, the loss of such a sample can only rise, and the rise is what was
forgotten (the divergence of the new model from the old one, in nats per token).
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

ROWS, LENGTH, HELD_OUT = 10, 96, 4


class OwnText(NamedTuple):
    """A model's own texts: ids [rows, length] to measure it by, and others to judge it by."""

    measured: Tensor
    held_out: Tensor


class _Kept:
    """One sample per model, drawn when it is first needed and shared by all its learners."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.kept: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
        self.found: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def __call__(self, model: Any) -> OwnText:
        with self.lock:
            if model not in self.kept:
                self.kept[model] = sample_text(model, rows=ROWS, length=LENGTH)
            ids = self.kept[model]
        return OwnText(ids[:-HELD_OUT], ids[-HELD_OUT:])

    def remember(self, model: Any, ids: Tensor) -> None:
        """Use a sample drawn before (one that lies beside a memory), unless there is one."""
        with self.lock:
            self.kept.setdefault(model, ids.to(next(model.parameters()).device))

    def drawn(self, model: Any) -> Tensor | None:
        """The sample, if there is one."""
        return self.kept.get(model)

    def beside(self, model: Any) -> dict[Any, Any]:
        """A place for measurements on a model's sample; they are dropped with it."""
        with self.lock:
            return self.found.setdefault(model, {})

    def forget(self, model: Any) -> None:
        """Draw a new sample when one is needed: the model has changed."""
        with self.lock:
            self.kept.pop(model, None)
            self.found.pop(model, None)


own_texts = _Kept()


@torch.no_grad()
def sample_text(model: Any, *, rows: int = 8, length: int = 64, seed: int = 0) -> Tensor:
    """`rows` texts of `length` tokens that the model writes by itself: [rows, length] ids.

    They begin with the model's first token (BOS, or EOS where it has none) and are drawn from its
    own distribution. The same model, numbers and seed give the same texts.
    """
    if rows < 1 or length < 2:
        raise ValueError(f"a sample needs a row and 2 tokens at least; got {rows} x {length}")
    device = next(model.parameters()).device
    chance = torch.Generator().manual_seed(seed)
    ids = torch.full((rows, 1), _first(model.config), dtype=torch.long, device=device)
    cache, new = None, ids
    while ids.shape[1] < length:
        out = model(input_ids=new, past_key_values=cache, use_cache=True)
        chances = out.logits[:, -1].float().softmax(-1).cpu()
        new = torch.multinomial(chances, 1, generator=chance).to(device)
        ids, cache = torch.cat([ids, new], 1), out.past_key_values
    return ids


def _first(config: Any) -> int:
    for name in ("bos_token_id", "eos_token_id"):
        found = getattr(config, name, None)
        found = found[0] if isinstance(found, list) and found else found
        if isinstance(found, int) and 0 <= found < config.vocab_size:
            return found
    return 0
