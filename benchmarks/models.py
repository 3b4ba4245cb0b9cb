"""Whole models: Hope against Transformer++ at equal parameters, in one run.

    python benchmarks/models.py                        everything (several minutes)
    python benchmarks/models.py --train                training tokens/s at T=2048 (B=4) and T=8192
    python benchmarks/models.py --train --compile      the same with torch.compile
    python benchmarks/models.py --flat                 training cost per token from 2K to 32K tokens
    python benchmarks/models.py --memory               peak memory of a training step at T=8192
    python benchmarks/models.py --decode               tokens/s from position 1K to 100K
    python benchmarks/models.py --parts                time of each part of both models, T=2048 B=1
    python benchmarks/models.py --profile hope         the operators of a training step
    python benchmarks/models.py --loaded ...           one thread, processor time: a busy machine
    python benchmarks/models.py --options '{"steering": 16}' ...     another Hope

Width 256, 4 layers, vocabulary 512, about 3.3M parameters, float32. A training step is forward,
loss and backward; levels stand still, and a step in which they learn is timed beside it. Both arms
keep freed memory (`machine.keep_memory`), except for --memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from common import (
    Product,
    delta_rule,
    in_fresh_process,
    interleaved,
    linear_layers,
    matmuls,
    over_floor,
    peak_mb,
    verdict,
)
from torch import Tensor

from nestling.machine import keep_memory
from nestling.memories import Attention
from nestling.models import MemoryCache, NestlingForCausalLM, presets

SIZE = presets.Size(width=256, layers=4, heads=4, vocabulary=512, parameters=3_300_000)
BASELINE = "transformer"
OPTIONS: dict[str, Any] = {}  # of the mixer of all arms but the baseline, from --options
CLOCK = time.perf_counter
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "1048576"}  # bytes from which a block is mapped by itself


def model_of(name: str, *, recompute: bool = False, learning: bool = False) -> NestlingForCausalLM:
    """An arm; its levels stand still in training, unless they are to learn there."""
    torch.manual_seed(0)
    fields: dict[str, Any] = {"use_cache": False}
    if not learning:
        fields["learning"] = "plain"
    if OPTIONS and name != BASELINE:
        fields["mixer_options"] = {presets.MODELS[name]["mixer"]: OPTIONS}
    model = NestlingForCausalLM(presets.configure(SIZE, name, **fields)).train()
    if recompute:
        model.gradient_checkpointing_enable()
    return model


def training_step(
    model: NestlingForCausalLM, batch: int, tokens: int, *, compiled: bool = False
) -> Callable[[], None]:
    """Forward, loss and backward on random tokens."""
    ids = torch.randint(SIZE.vocabulary, (batch, tokens))

    def loss_of() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    # Code for this very shape, as in training: a second length would else get slower, general code.
    run = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step() -> None:
        run().backward()
        model.zero_grad(set_to_none=True)

    return step


def train(name: str, *, lengths: list[int], compiled: bool, repeats: int) -> bool:
    """Training tokens/s of the arm against Transformer++."""
    met = True
    models = {arm: model_of(arm) for arm in (name, BASELINE)}
    for arm, model in models.items():
        print(f"{arm}: {model.num_parameters():,} parameters")
    for batch, tokens, target in ((4, 2048, 1.0), (1, 8192, 2.0)):
        if tokens not in lengths:
            continue
        arms = {
            arm: training_step(model, batch, tokens, compiled=compiled)
            for arm, model in models.items()
        }
        if models[name].learns and not compiled:
            learning = model_of(name, learning=True)
            arms[f"{name}, levels learning"] = training_step(learning, batch, tokens)
        floors = {arm: matmuls(_products(model, batch, tokens)) for arm, model in models.items()}
        arms |= {f"{arm}'s floor": run for arm, run in floors.items()}
        seconds = interleaved(arms, repeats=repeats, warmup=1, clock=CLOCK)
        for arm in models:
            what = f"{arm} training, T={tokens} B={batch}"
            over_floor(what, seconds[arm], seconds.pop(f"{arm}'s floor"))
        speed = {arm: batch * tokens / s for arm, s in seconds.items()}
        print(", ".join(f"{arm} {rate:,.0f} tokens/s" for arm, rate in speed.items()))
        how = "compiled" if compiled else "eager"
        what = f"{name} training speed, T={tokens} B={batch}, {how}"
        met &= verdict(what, speed[name] / speed[BASELINE], target, at_most=False)
        torch.compiler.reset()
    return met


def _products(model: NestlingForCausalLM, batch: int, tokens: int) -> list[Product]:
    """The products a training step needs: its linear layers, and its scan or its scores."""
    head = SIZE.width // SIZE.heads
    sequences = batch * SIZE.heads * SIZE.layers
    if isinstance(model.model.layers[0].mixer, Attention):
        half = Product(sequences, tokens // 2, head, tokens, 3)  # the lower triangle
        return [*linear_layers(model, batch * tokens), half, half._replace(k=tokens, n=head)]
    chunked = delta_rule(sequences, tokens, head, head, 32)
    return [*linear_layers(model, batch * tokens), *chunked]


def flat(name: str, *, compiled: bool, repeats: int) -> bool:
    """Cost per token of a training step must not grow with the length; the lengths take turns."""
    model = model_of(name, recompute=True)
    steps = {
        str(tokens): training_step(model, 1, tokens, compiled=compiled)
        for tokens in (2048, 8192, 32768)
    }
    seconds = interleaved(steps, repeats=repeats, warmup=1, clock=CLOCK)
    cost = {tokens: took / int(tokens) for tokens, took in seconds.items()}
    for tokens, each in cost.items():
        print(f"{name} T={tokens}: {1 / each:,.0f} tokens/s (with recomputation)")
    how = "compiled" if compiled else "eager"
    what = f"{name} cost per token at 32K against 2K, {how}"
    return verdict(what, cost["32768"] / cost["2048"], 1.15, at_most=True)


def memory(name: str) -> bool:
    """Peak memory of a training step at T=8192, each arm in a fresh process.

    What counts is what a step needs: freed blocks go back to the system at once (`RETURNING`).
    The resident size under glibc's own rules stands beside it; it is mostly holes between blocks.
    """
    needed = {}
    for arm in (name, BASELINE):
        for how in ("plain", "recompute"):
            needed[arm, how] = in_fresh_process(__file__, "--peak", arm, how, **RETURNING)["mb"]
            resident = in_fresh_process(__file__, "--peak", arm, how)["mb"]
            print(
                f"{arm} T=8192 B=1, {how}: {needed[arm, how]:,.0f} MB"
                f" ({resident:,.0f} MB resident under glibc's defaults)"
            )
    met = True
    for how in ("plain", "recompute"):
        ratio = needed[name, "recompute"] / needed[BASELINE, how]
        what = f"{name} memory, T=8192, recompute / {BASELINE} {how}"
        met &= verdict(what, ratio, 1.0, at_most=True)
    return met


def peak(name: str, how: str) -> None:
    """One training step; prints the memory it took beyond what a short step had loaded."""
    model = model_of(name, recompute=how == "recompute")
    training_step(model, 1, 64)()
    step = training_step(model, 1, 8192)
    before = peak_mb()
    step()
    print(json.dumps({"mb": peak_mb() - before}))


@torch.no_grad()
def decode(name: str, *, steps: int = 8) -> bool:
    """Tokens/s of one-token calls at far positions, and the KV cache beside it; all take turns.

    Levels stand still; what they cost when they learn is shown beside it.
    """
    arms: dict[str, Callable[[], None]] = {}
    for arm, positions in ((name, (1024, 8192, 32768, 102400)), (BASELINE, (1024, 8192))):
        model = model_of(arm).eval()
        cache = MemoryCache(SIZE.layers)
        for position in positions:
            while cache.get_seq_length() < position - 1:
                piece = min(2048, position - 1 - cache.get_seq_length())
                ids = torch.randint(SIZE.vocabulary, (1, piece))
                _read(model, ids, cache, logits_to_keep=1)
            arms[f"{arm} at position {position:,}"] = _decoding(model, deepcopy(cache), steps)
    if model_of(name).learns:
        model, cache = model_of(name).eval(), MemoryCache(SIZE.layers)
        model(torch.randint(SIZE.vocabulary, (1, 1023)), past_key_values=cache, use_cache=True)
        arms[f"{name}, levels learning, at position 1,024"] = _decoding(model, cache, steps, True)
    floor = matmuls(linear_layers(model_of(name), 1, times=steps))
    found = interleaved({**arms, "floor": floor}, repeats=9, clock=CLOCK)
    over_floor(f"{name} decode", found[f"{name} at position 8,192"], found.pop("floor"))
    speed = {at: steps / seconds for at, seconds in found.items()}
    for at, tokens in speed.items():
        print(f"{at}: {tokens:,.0f} tokens/s")
    far, near = speed[f"{name} at position 102,400"], speed[f"{name} at position 1,024"]
    met = verdict(f"{name} decode at 100K against 1K", far / near, 0.9, at_most=False)
    ratio = speed[f"{name} at position 8,192"] / speed[f"{BASELINE} at position 8,192"]
    return verdict(f"{name} decode against KV cache at 8K", ratio, 3.0, at_most=False) and met


def _read(model: NestlingForCausalLM, ids: Tensor, cache: MemoryCache, **options: Any) -> Any:
    """Read on, without learning unless it is asked for."""
    still = {"learn": False} if model.learns else {}
    return model(input_ids=ids, past_key_values=cache, use_cache=True, **{**still, **options})


def _decoding(
    model: NestlingForCausalLM, cache: MemoryCache, steps: int, learn: bool = False
) -> Callable[[], None]:
    """Write some tokens more, each by the one before."""

    def run() -> None:
        token = torch.zeros(1, 1, dtype=torch.long)
        for _ in range(steps):
            options = {"learn": True} if learn else {}
            logits = _read(model, token, cache, **options).logits
            token = logits[:, -1:].argmax(-1)

    return run


def parts(name: str, batch: int = 1, tokens: int = 2048) -> None:
    """Forward and backward of each part of a layer, alone; the arms take turns."""
    x = torch.randn(batch, tokens, SIZE.width, requires_grad=True)
    ids = torch.randint(SIZE.vocabulary, (batch, tokens))
    arms: dict[str, Callable[[], None]] = {}
    for arm in (name, BASELINE):
        model = model_of(arm)
        layer = model.model.layers[0]
        arms[f"{arm} mixer"] = _step(lambda part=layer.mixer: part(x)[0].sum())
        arms[f"{arm} channel"] = _step(lambda part=layer.channel: part(x)[0].sum())
        arms[f"{arm} layer"] = _step(lambda part=layer: part(x)[0].sum())
    arms["norm"] = _step(lambda part=layer.norm: part(x).sum())
    arms["head and loss"] = _step(lambda: model.loss_function(model.lm_head(x), ids, 512))
    for part, seconds in interleaved(arms, repeats=3, warmup=1, clock=CLOCK).items():
        print(f"{part:<24} {seconds * 1e3:8.1f} ms")


def _step(loss_of: Callable[[], torch.Tensor]) -> Callable[[], None]:
    return lambda: loss_of().backward()


def profile(name: str, tokens: int = 2048) -> None:
    """The operators that take the time of a training step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step = training_step(model_of(name), 1, tokens)
    step()
    with record(activities=[ProfilerActivity.CPU]) as found:
        step()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    targets = ("train", "flat", "memory", "decode")
    for part in targets:
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--model", default="hope", choices=sorted(presets.MODELS))
    parser.add_argument("--options", type=json.loads, default={}, help="of the mixer, as JSON")
    parser.add_argument("--loaded", action="store_true", help="one thread, processor time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192], help="of --train")
    parser.add_argument("--profile", metavar="MODEL")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    global CLOCK
    OPTIONS.update(options.options)
    torch.set_num_threads(1 if options.loaded else 2)
    CLOCK = time.process_time if options.loaded else time.perf_counter
    torch.set_flush_denormal(True)
    if options.peak:
        peak(*options.peak)
        return 0
    keep_memory()
    if options.profile:
        profile(options.profile)
        return 0
    if options.parts:
        parts(options.model)
        return 0
    chosen = [part for part in targets if getattr(options, part)] or list(targets)
    runs = {
        "train": lambda: train(
            options.model,
            lengths=options.lengths,
            compiled=options.compile,
            repeats=options.repeats,
        ),
        "flat": lambda: flat(options.model, compiled=options.compile, repeats=options.repeats),
        "memory": lambda: memory(options.model),
        "decode": lambda: decode(options.model),
    }
    met = [runs[part]() for part in chosen]
    return 0 if all(met) else 1


if __name__ == "__main__":
    raise SystemExit(main())
