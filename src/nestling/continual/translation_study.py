"""CTNL (Fig. 8): learn to translate one language, then another; what is left of the first?

Hope-k is a language model whose continuum memory has k levels: the MLPs of its chains are grouped
into k levels with a clock each (Eq. 71, across steps); all other weights learn with the fastest
level. In-context learning sees pairs in its prompt and changes nothing.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nestling.blocks import Chain
from nestling.continual import metrics
from nestling.continual.base import Base, load_base
from nestling.continual.methods import CHUNKS
from nestling.continual.study import Store
from nestling.continual.translation import Language, chrf, cipher, indonesian, kalamang, manchu
from nestling.levels import Level
from nestling.models import NestlingForCausalLM, byte_tokenizer, presets
from nestling.optim import NestedOptimizer

__all__ = ["LEARNERS", "Translator", "levels_of", "run_translation", "translation_part"]

LEARNERS = ("hope-1", "hope-2", "hope-3", "icl")
_ARROW, _END = " = ", "\n"
Say = Callable[[str], None]


def levels_of(model: nn.Module, k: int) -> list[list[nn.Parameter]]:
    """All weights in k groups: the MLPs of every chain by their place, the rest in the fastest."""
    groups: list[list[nn.Parameter]] = [[] for _ in range(k)]
    placed: set[int] = set()
    for module in model.modules():
        if isinstance(module, Chain):
            for number, mlp in enumerate(module.mlps):
                weights = list(mlp.parameters())
                groups[number * k // len(module.mlps)] += weights
                placed |= {id(weight) for weight in weights}
    if not placed:
        raise ValueError("levels need a model with a continuum memory, such as the base 'hope'")
    groups[0] += [p for p in model.parameters() if id(p) not in placed]
    return groups


class Translator:
    """A copy of a base model that learns pairs at k levels, and translates greedily."""

    def __init__(self, base: Base, k: int, *, lr: float, rows: int = 8, length: int = 96) -> None:
        self.model, self.tokenizer = copy.deepcopy(base.model), base.tokenizer
        self.rows, self.length = rows, length
        parts = [
            (Level(name=f"level {i}", chunk=chunk), weights, lambda p: torch.optim.Adam(p, lr=lr))
            for i, (chunk, weights) in enumerate(
                zip(CHUNKS[k], levels_of(self.model, k), strict=True)
            )
        ]
        self.optimizer = NestedOptimizer(parts)

    def learn(self, pairs: Sequence[tuple[str, str]], epochs: int, seed: int) -> None:
        """Train on the English side of each line `sentence = English`."""
        draw = random.Random(seed)
        encoded = [self._line(*pair) for pair in pairs]
        self.model.train()
        for _ in range(epochs):
            draw.shuffle(encoded)
            for begin in range(0, len(encoded), self.rows):
                self._step(encoded[begin : begin + self.rows])
        self.model.eval()

    def _line(self, sentence: str, english: str) -> tuple[list[int], list[int]]:
        return self._ids(sentence + _ARROW), self._ids(english + _END)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids[: self.length]

    def _step(self, lines: list[tuple[list[int], list[int]]]) -> None:
        longest = max(len(a) + len(b) for a, b in lines)
        ids = torch.zeros(len(lines), longest, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for row, (source, target) in enumerate(lines):
            end = len(source) + len(target)
            ids[row, :end] = torch.tensor(source + target)
            labels[row, len(source) : end] = torch.tensor(target)
        self.optimizer.zero_grad()
        self.model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        self.optimizer.step()

    def score(self, language: Language, prompt: Sequence[tuple[str, str]] = ()) -> float:
        """chrF on the test pairs, after a prompt of pairs."""
        before = "".join(f"{a}{_ARROW}{b}{_END}" for a, b in prompt)
        guesses = [self.translate(before, sentence) for sentence, _ in language.test]
        return chrf(guesses, [english for _, english in language.test])

    @torch.no_grad()
    def translate(self, before: str, sentence: str, limit: int = 40) -> str:
        """Greedy English for a sentence."""
        start = self._ids(before)[-512:] if before else []
        ids = torch.tensor([[*start, *self._ids(sentence + _ARROW)]])
        cache, out = None, []
        for _ in range(limit):
            done = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = done.past_key_values
            ids = done.logits[:, -1:].argmax(-1)
            out.append(int(ids))
            if _END in self.tokenizer.decode(out[-1:]):
                break
        text: str = self.tokenizer.decode(out)
        return text.split(_END)[0].strip()


def _cipher_base(seed: int) -> Base:
    """A fresh Hope-Attention on bytes for the enciphered languages."""
    torch.manual_seed(seed)
    fields = {"hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 96}
    model = NestlingForCausalLM(presets.tiny("hope_attention", **fields)).eval()
    return Base(name="hope-attention", model=model, tokenizer=byte_tokenizer())


def _one(
    learner: str, base: Base, languages: Sequence[Language], epochs: int, lr: float, seed: int
) -> dict[str, Any]:
    """chrF on every language after each one is learned in turn."""
    if learner == "icl":
        frozen = Translator(base, 1, lr=0.0)
        rows = []
        for number in range(len(languages)):
            seen = [pair for lang in languages[: number + 1] for pair in lang.train[:8]]
            rows.append([frozen.score(lang, seen) for lang in languages])
        return {"matrix": rows}
    made = Translator(base, int(learner[-1]), lr=lr)
    rows = []
    for language in languages:
        made.learn(language.train, epochs, seed)
        rows.append([made.score(lang) for lang in languages])
    return {"matrix": rows}


def run_translation(
    data: Path,
    cache: Path,
    store: Store,
    *,
    seeds: int = 3,
    manchu: Path | None = None,
    quick: bool = False,
    say: Say = print,
) -> str:
    """Run what is missing: real languages with the base 'hope', and the enciphered analogue."""
    for seed in range(seeds):
        for name, base, languages, epochs, lr in _problems(data, cache, manchu, seed, quick):
            orders = {lang.name: [lang] for lang in languages}
            orders[" then ".join(lang.name for lang in languages)] = list(languages)
            for learner in LEARNERS:
                for order, given in orders.items():
                    say(f"{name}: {learner}, {order}, seed {seed}")
                    facts = {
                        "kind": "translation",
                        "problem": name,
                        "base": base.name,
                        "learner": learner,
                        "order": order,
                        "sizes": [len(lang.train) for lang in given],
                        "epochs": epochs,
                        "lr": lr,
                        "seed": seed,
                    }
                    where = ("translation", name, learner, order.replace(" ", "_"), f"seed{seed}")
                    one = partial(_one, learner, base, given, epochs, lr, seed)
                    store.get(where, facts, one)
    return "\n".join(translation_part(store, quick=quick))


def _problems(data: Path, cache: Path, folder: Path | None, seed: int, quick: bool) -> Any:
    size = {"train": 24, "test": 4} if quick else {"train": 600, "test": 40}
    pair = cipher("cipher A", 2 * seed, **size), cipher("cipher B", 2 * seed + 1, **size)
    yield (
        ("quick-cipher" if quick else "cipher"),
        _cipher_base(seed),
        pair,
        (1 if quick else 12),
        2e-3,
    )
    if quick:
        return
    second = indonesian(data, seed=seed + 1) if folder is None else manchu(folder)
    real = kalamang(data, seed=seed), second
    yield "real", load_base("hope", data, cache), real, 3, 1e-3


def translation_part(store: Store, *, quick: bool = False) -> list[str]:
    """The part of the results page about languages."""
    found: dict[tuple[str, str], dict[str, dict[int, Any]]] = {}
    for run in store.read():
        facts = run["facts"]
        if facts.get("kind") != "translation" or facts["problem"].startswith("quick") != quick:
            continue
        key = facts["problem"], facts["order"]
        found.setdefault(key, {}).setdefault(facts["learner"], {})[facts["seed"]] = run
    if not found:
        return []
    lines = [
        "",
        "## New languages, one after another (CTNL)",
        "",
        "chrF on each language at the end. *cipher* is an analogue with invented languages, not a"
        " translation result. *real* is Kalamang, and Indonesian from the same dictionary (or the"
        " user's Manchu set), to English, by the small base model.",
        "",
        "| problem | learned | learner | " + "chrF first | chrF last | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for (problem, order), learners in sorted(found.items()):
        for learner in LEARNERS:
            runs = learners.get(learner, {})
            if not runs:
                continue
            cells = []
            for column in (0, -1):
                values = [run["matrix"][-1][column] / 100 for run in runs.values()]
                cells.append(str(metrics.interval(values)))
            lines.append(
                f"| {problem} | {order} | {learner} | {cells[0]} | {cells[1]} | {len(runs)} |"
            )
    return lines
