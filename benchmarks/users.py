"""Many users of one model: poisoned streams that must stay where they are, and jobs in threads.

    python benchmarks/users.py                      # 500 poisoned streams, 1,000 jobs in threads
    python benchmarks/users.py --poisoned 60 --jobs 0 --seed 3

*Poisoned*: on six small models, one user learns a text, another user learns another, then the first
one is given a poisoned text or stream. The base model and the other user's answers must be equal to
the bit. The user's loss on clean text of the same source that was never learned must be within 5%
of what it was: by itself, because the text was refused, or after one undo (of a text) or one
rollback to a named snapshot (of a stream: unnamed ones may lie inside it). A third of the poisons
is built against the memory: every token is the one the model finds least likely.

*Jobs*: learners of several kinds, second order included, in eight threads at once, equal to the
same jobs in turn to the bit; no switch of the process is touched. `tests/adaptation/test_texts.py`
runs a few of both.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import threading
import warnings
from collections import Counter
from typing import Any, NamedTuple

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import nestling
from nestling.adaptation import DriftWarning
from nestling.files import fingerprint

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2")
VOCABULARY = 64
NEAR = 1.05
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 1024,
}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_inner": 24, "n_positions": 1024}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"chunks": [16], "rate": 0.5},
    {"chunks": [16, 64], "rate": 0.5, "rank": 4},
    {"chunks": [32], "rule": "adam", "rate": 0.02},
    {"chunks": [32, 64], "rule": "natural", "rate": [30.0, 0.0], "rank": 6, "layers": None},
)


def tiny(family: str) -> Any:
    """A model of a few thousand random weights that are large enough to matter."""
    sizes = GPT2 if family == "gpt2" else SIZES
    special = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **special, **sizes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def text(source: int, sample: int, count: int = 192) -> Tensor:
    """A sample of a source: a cycle of twelve tokens of its own, one token in ten another."""
    flow = torch.Generator().manual_seed(source)
    cycle = torch.randint(3, VOCABULARY, (12,), generator=flow)
    flow.manual_seed(1_000_003 * source + sample + 1)
    noise = torch.randint(3, VOCABULARY, (count,), generator=flow)
    start = int(torch.randint(12, (1,), generator=flow))
    kept = torch.rand(count, generator=flow) > 0.1
    return torch.where(kept, cycle[(torch.arange(count) + start) % 12], noise)


@torch.no_grad()
def unlikely(learner: Any, count: int, rng: random.Random) -> Tensor:
    """Tokens that the memory finds least likely, each after the ones before."""
    ids = torch.tensor([[rng.randrange(3, VOCABULARY)]])
    while ids.shape[1] < count:
        ids = torch.cat([ids, learner(ids[:, -32:]).logits[:, -1:].argmin(-1)], 1)
    return ids[0]


def poison(learner: Any, mine: Tensor, rng: random.Random) -> Tensor:
    """A text that spoils what was learned."""
    count = rng.choice([64, 128, 250])
    kind = rng.randrange(6)
    if kind < 2:
        piece = unlikely(learner, 32, rng)
        return piece.repeat(-(-count // len(piece)))[:count]
    if kind == 2:
        return torch.tensor([rng.randrange(3, VOCABULARY) for _ in range(count)])
    if kind == 3:
        return torch.full((count,), rng.randrange(3, VOCABULARY))
    if kind == 4:
        return mine.flip(0).repeat(4)[:count]
    away = rng.randrange(1, 50)
    return ((mine - 3 + away * (torch.arange(len(mine)) % 2)) % 61 + 3).repeat(4)[:count]


class Outcome(NamedTuple):
    """The effect of one poisoned stream."""

    how: str  # harmless, refused, undone, rolled back
    before: float
    after: float
    apart: bool  # the base and the other user are as they were

    @property
    def right(self) -> bool:
        return self.apart and self.after <= NEAR * self.before


class Model(NamedTuple):
    """A base model with its fingerprint, and another user of it with what that one answers."""

    base: Any
    print: str
    other: Any
    said: Tensor

    def unchanged(self) -> bool:
        """Whether base and other user are, to the bit, what they were."""
        same = torch.equal(self.other(IDS).logits, self.said)
        return same and fingerprint(self.base) == self.print


IDS = text(9, 9, 32)[None]


def shared(family: str) -> Model:
    """A model that one user has learned with already."""
    base = tiny(family)
    other = nestling.adapt(base, [16], rate=0.5)
    other.learn(text(1, 0), name="theirs", passes=1)
    return Model(base, fingerprint(base), other, other(IDS).logits)


def attack(model: Model, number: int, seed: int) -> Outcome:
    """One poisoned stream on a model."""
    rng = random.Random(f"{seed} {number}")
    source = 100 + number + 100_000 * seed
    mine = nestling.adapt(model.base, **SETTINGS[number // len(FAMILIES) % len(SETTINGS)])
    own, clean = text(source, 0), text(source, 1)
    mine.learn(own, name="mine", passes=2)
    before = mine.score(clean)
    named = rng.random() < 0.5
    mine.snapshot("before")
    options: dict[str, Any] = {"name": "poison", "passes": 2} if named else {}
    report = mine.learn(poison(mine, own, rng), **options)
    how, after = "refused" if report.refused else "harmless", mine.score(clean)
    if not report.refused and after > NEAR * before:
        how = "undone" if named else "rolled back"
        if named:
            mine.undo("poison")
        else:
            mine.rollback("before")
        after = mine.score(clean)
    return Outcome(how, before, after, model.unchanged())


def poisoned(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """So many poisoned streams over all models; how they ended, and the failures."""
    models = [shared(family) for family in FAMILIES]
    ends: Counter[str] = Counter()
    failures = []
    for number in range(count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DriftWarning)
            found = attack(models[number % len(models)], number, seed)
        ends[found.how] += 1
        if not found.right:
            failures.append(f"stream {number} of seed {seed}: {found}")
    return ends, failures


def job(model: Any, number: int) -> str:
    """One learner's answer after a text, as a checksum."""
    kinds = ({"rate": 0.1, "transfer": "second_order"}, {"rate": 0.1}, {"rate": 0.1, "rank": 3},
             {"rule": "adam", "rate": 1e-3})  # fmt: skip
    learner = nestling.adapt(model, [8, 32], **kinds[number % len(kinds)])
    learner.learn(text(number, 0, 66))
    answer = learner(text(5, 0, 20)[None]).logits
    return hashlib.sha256(answer.detach().numpy().tobytes()).hexdigest()


def jobs(count: int) -> list[str]:
    """The jobs in turn and in eight threads; what differed."""
    model = tiny("llama")
    serial = [job(model, number) for number in range(count)]
    found: dict[int, str] = {}
    gate = threading.Semaphore(8)

    def run(number: int) -> None:
        with gate:
            found[number] = job(model, number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    flash = torch.backends.cuda.flash_sdp_enabled()
    for thread in threads:
        thread.start()
    during = [torch.backends.cuda.flash_sdp_enabled() for _ in range(200)]
    for thread in threads:
        thread.join()
    wrong = [f"job {number}" for number in range(count) if found.get(number) != serial[number]]
    switched = any(seen != flash for seen in [*during, torch.backends.cuda.flash_sdp_enabled()])
    return [*wrong, *(["attention back ends were switched"] if switched else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--poisoned", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    if given.jobs:
        wrong = jobs(given.jobs)
        bad += len(wrong)
        print(f"{given.jobs} jobs in 8 threads: {len(wrong)} differ from jobs in turn", *wrong[:5])
    if given.poisoned:
        ends, failures = poisoned(given.poisoned, given.seed)
        bad += len(failures)
        print(f"{given.poisoned} poisoned streams over {len(FAMILIES)} models: {dict(ends)};"
              f" {len(failures)} failures", flush=True)  # fmt: skip
        for line in failures[:10]:
            print(f"  {line}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
