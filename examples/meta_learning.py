"""Learn where to begin: initial weights from which a memory learns a new language quickly (Eq. 73).

    python examples/meta_learning.py [--steps 100] [--seeds 3]

Every text is written in a language of its own: after each word comes the one word that this
language has for it, now and then a random one. Nobody has seen the language before, and one layer
of attention cannot look it up, so it has to be learned while reading, by a memory in the MLP that
takes a step every 16 words. What is trained is where that memory begins, and its rate. Four ways
are compared on languages that were not trained on (deviation 14):

    none          the model is trained as usual, the memory only learns afterwards
    first_order   by the gradient at the adapted weights
    reptile       towards the adapted weights
    second_order  by the true gradient, through every step of the memory
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from nestling.continuum import Continuum, MemoryLevel, Part, Slot, meta_loss

WORDS, LENGTH, CHUNK = 16, 128, 16
RATES = (0.1, 0.3, 1.0)
WAYS = ("none", "first_order", "reptile", "second_order")


def texts(count: int, seed: int) -> Tensor:
    """[count, LENGTH]: each row follows a permutation of its own, with one word in four random."""
    generator = torch.Generator().manual_seed(seed)
    language = torch.rand(count, WORDS, generator=generator).argsort(1)
    rows = [torch.randint(WORDS, (count, 1), generator=generator)]
    for _ in range(LENGTH - 1):
        follows = language.gather(1, rows[-1])
        other = torch.randint(WORDS, (count, 1), generator=generator)
        rows.append(torch.where(torch.rand(count, 1, generator=generator) < 0.25, other, follows))
    return torch.cat(rows, 1)


def reader(rate: float, *, learn_rates: bool) -> Continuum:
    """A one-layer Llama whose MLP is a memory."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config).eval()
    names = [name for name, _ in model.named_parameters() if ".mlp." in name]
    level = MemoryLevel(name="memory", chunk=CHUNK, rate=rate)
    slots = [Slot(name, (Part(0),)) for name in names]
    return Continuum(model, [level], slots, learn_rates=learn_rates)


def train(way: str, rate: float, seed: int, steps: int) -> Continuum:
    """Train the model, and with it where the memory begins."""
    torch.manual_seed(seed)
    continuum = reader(rate, learn_rates=way == "second_order")
    optimizer = torch.optim.AdamW(continuum.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        ids = texts(16, seed=10_000 * (seed + 1) + step)
        if way == "none":
            loss = continuum.model(input_ids=ids, labels=ids).loss
        else:
            loss, _ = meta_loss(continuum, ids, meta=way)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(continuum.parameters(), 1.0)
        optimizer.step()
    return continuum


def loss_of(continuum: Continuum, seed: int) -> list[float]:
    """Mean loss of the first, second, third and last quarter of texts in new languages."""
    losses = continuum(texts(64, seed)).losses.detach()  # [B, LENGTH], nan where nothing is asked
    return [float(part[~part.isnan()].mean()) for part in losses.chunk(4, dim=1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("loss in nats per word, new languages       words   1-32  33-64  65-96 97-128")
    for way in WAYS:

        def tuned(rate: float, way: str = way) -> float:
            return loss_of(train(way, rate, 100, options.steps), 1)[-1]

        rate = min(RATES, key=tuned)
        found = [loss_of(train(way, rate, s, options.steps), 2) for s in range(options.seeds)]
        means = [statistics.fmean(quarter) for quarter in zip(*found, strict=True)]
        spread = statistics.stdev(f[-1] for f in found) if options.seeds > 1 else 0.0
        cells = " ".join(f"{mean:6.3f}" for mean in means)
        print(f"{way:13} rate {rate:<5g}                         {cells}  (last ± {spread:.3f})")


if __name__ == "__main__":
    main()
