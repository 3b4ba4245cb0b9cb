"""Learning while reading against only reading: the continuum memory on a Llama, in one run.

    python benchmarks/cms.py                        chunks 64 to 1024, one dense level
    python benchmarks/cms.py --levels 4             four levels (chunk, 4, 16, 64 x) on every matrix
    python benchmarks/cms.py --rank 16              compact fast weights
    python benchmarks/cms.py --chunks 512 --profile the operators of one learning pass
    python benchmarks/cms.py --model FILE.gguf      a pretrained model (SmolLM2-135M)
    python benchmarks/cms.py --inside               levels that learn inside a Hope of 1M parameters

Without --model: random weights in SmolLM2-135M's shape (width 576, MLP 1536, 9 heads), 6 of its 30
layers and a fifth of its vocabulary, so that head and blocks keep their proportion. All matrices of
all MLPs learn. Two baselines: one forward pass over the text, and forward passes over the same
chunks with a cache; neither computes a loss. Learning reads, computes the loss, goes back to every
MLP, forms its gradient and updates. Arms are interleaved, keep freed memory
(`nestling.machine.keep_memory`) and are charged the CPU time they used on one thread, which a busy
machine disturbs less than the clock on the wall; --wall takes that clock, with --threads.

--inside: gated levels side by side (chunk, 2 and 4 x), those of the last layer learning (--layers),
4 rows of 1,024 bytes. A training step with
first-order learning levels against the plain step of the same model, and reading with learning
against a plain pass; beside them the same segments without learning, which is what cutting the text
into segments costs by itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import interleaved, verdict
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nestling.continuum import Continuum, MemoryLevel, Part, Slot
from nestling.machine import keep_memory
from nestling.models import NestlingForCausalLM, presets
from nestling.tree import state_detach, tree_leaves

TARGET = 3.2
TRAIN_TARGET, READ_TARGET = 1.25, 2.5


def load(path: str | None):
    torch.manual_seed(0)
    if path is not None:
        folder, _, file = path.rpartition("/")
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        return model.eval()
    config = LlamaConfig(
        vocab_size=9830,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def continuum_of(model, chunk: int, count: int, rank: int | None) -> Continuum:
    """`count` levels of growing chunks, all of them on every matrix of every MLP."""
    levels = [
        MemoryLevel(name=f"level{n}", chunk=chunk * 4**n, rate=1e-3, rank=rank)
        for n in range(count)
    ]
    parts = tuple(Part(n) for n in range(count))
    names = [n for n, p in model.named_parameters() if ".mlp." in n and p.dim() == 2]
    return Continuum(model, levels, [Slot(name, parts) for name in names])


def arms_of(
    model, ids: torch.Tensor, continuum: Continuum, chunk: int
) -> dict[str, Callable[[], object]]:
    @torch.no_grad()
    def plain() -> None:
        model(input_ids=ids[:, :-1])

    @torch.no_grad()
    def in_chunks() -> None:
        cache = None
        for start in range(0, ids.shape[1] - 1, chunk):
            piece = ids[:, start : min(start + chunk, ids.shape[1] - 1)]
            cache = model(input_ids=piece, past_key_values=cache, use_cache=True).past_key_values

    def learn() -> object:
        return continuum(ids, keep_logits=False)

    return {"one pass": plain, "chunks": in_chunks, "learn": learn}


def check(model, ids: torch.Tensor, chunk: int) -> None:
    """Check what is measured: the gradient of the first chunk is the one autograd finds."""
    continuum = continuum_of(model, chunk, 1, None)
    name = continuum.slots[-1].name
    out = continuum(ids[:, : chunk + 1], learn=True)
    loss = model(input_ids=ids[:, :chunk]).logits[0]
    loss = torch.nn.functional.cross_entropy(loss, ids[0, 1 : chunk + 1])
    (grad,) = torch.autograd.grad(loss, [model.get_parameter(name)])
    delta = continuum.delta(out.state, name)
    assert delta is not None
    torch.testing.assert_close(
        delta[0] / -1e-3, grad, rtol=1e-2, atol=1e-4 * float(grad.abs().max())
    )


def cpu_seconds(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds per call of each arm, in turns, after one call each to warm up."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name, run in arms.items():
            start = time.process_time()
            run()
            if turn:
                found[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def megabytes(tree: object) -> float:
    return sum(leaf.numel() * leaf.element_size() for _, leaf in tree_leaves(tree)) / 2**20


def memory_of(continuum: Continuum, ids: torch.Tensor) -> str:
    """The bytes of one user's memory, learned part and unfinished chunk apart."""
    state = continuum(ids, keep_logits=False).state
    learned = sum(megabytes(level.fast) for level in state.levels)
    waiting = sum(megabytes(level.sums) for level in state.levels)
    base = sum(p.numel() * p.element_size() for p in continuum.model.parameters()) / 2**20
    return (
        f"memory per user: {learned:.1f} MB learned, {waiting:.1f} MB unfinished chunks,"
        f" {megabytes((state.cache, state.ahead)):.1f} MB running context; base {base:.1f} MB"
    )


def inside_arms(model, ids: torch.Tensor, chunk: int) -> dict[str, Callable[[], object]]:
    def segments(train: bool) -> None:
        states = None
        for start in range(0, ids.shape[1], chunk):
            cache = model.make_cache(states, start)
            piece = ids[:, start : start + chunk]
            labels = piece if train else None
            out = model(piece, past_key_values=cache, labels=labels, use_cache=True, learn=False)
            if train:
                out.loss.backward()
            states = state_detach(cache.states)

    def step(learn: bool) -> None:
        model.train()
        model(ids, labels=ids, learn=learn).loss.backward()
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def read(learn: bool) -> None:
        model.eval()
        model(ids, use_cache=False, learn=learn)

    def train_segments() -> None:
        model.train()
        segments(True)
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def read_segments() -> None:
        model.eval()
        segments(False)

    return {
        "train plain": lambda: step(False),
        "train segments": train_segments,
        "train learn": lambda: step(True),
        "read plain": lambda: read(False),
        "read segments": read_segments,
        "read learn": lambda: read(True),
    }


def inside_model(chunk: int, layers: int | None) -> NestlingForCausalLM:
    torch.manual_seed(0)
    levels = [{"name": f"level{n}", "chunk": chunk * 2**n, "rate": 0.2} for n in range(3)]
    return NestlingForCausalLM(presets.tiny(levels=levels, learning_layers=layers))


def check_inside(ids: torch.Tensor) -> None:
    """Check what is measured: with one segment the gradients are those of plain training."""
    model = inside_model(2 * ids.shape[1], None).train()
    found = []
    for learn in (False, True):
        model.zero_grad()
        model(ids, labels=ids, learn=learn).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def inside(chunks: list[int], tokens: int, repeats: int, layers: int | None) -> None:
    """Levels that learn inside the model."""
    ids = torch.randint(0, 256, (4, tokens))
    check_inside(ids[:, :64])
    for chunk in chunks:
        model = inside_model(chunk, layers)
        seconds = cpu_seconds(inside_arms(model, ids, chunk), repeats)
        print(f"chunk {chunk}: seconds: " + ", ".join(f"{n} {s:.2f}" for n, s in seconds.items()))
        for what, target in (("train", TRAIN_TARGET), ("read", READ_TARGET)):
            learn = seconds[f"{what} learn"]
            for name, title in (("segments", "the same segments"), ("plain", "plain")):
                ratio = learn / seconds[f"{what} {name}"]
                verdict(f"chunk {chunk}: {what}, learning / {title}", ratio, target, at_most=True)
        with torch.no_grad():
            learned = model.eval()(ids, use_cache=True).past_key_values.learned
        parts = [(level.fast, level.sums) for state in learned.states for level in state.levels]
        fast, sums = (sum(megabytes(part[n]) for part in parts) / len(ids) for n in (0, 1))
        base = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
        print(
            f"memory per sequence: {fast:.2f} MB learned, {sums:.2f} MB unfinished chunks; the"
            f" model {base:.2f} MB"
        )


def profile(run: Callable[[], object]) -> None:
    run()
    with torch.profiler.profile() as found:
        run()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=18))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--levels", type=int, default=1)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--model", help="a .gguf file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--layers", type=int, default=1, help="last layers that learn; 0: all")
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    keep_memory()
    torch.set_num_threads(args.threads)
    if args.inside:
        inside(args.chunks, args.tokens, args.repeats, args.layers or None)
        return
    model = load(args.model)
    ids = torch.randint(10, model.config.vocab_size, (1, args.tokens + 1))
    check(model, ids, 32)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{millions:.1f}M parameters, {args.tokens} tokens, {torch.get_num_threads()} threads")
    cost = {}
    for chunk in args.chunks:
        continuum = continuum_of(model, chunk, args.levels, args.rank)
        arms = arms_of(model, ids, continuum, chunk)
        if args.profile:
            profile(arms["learn"])
            continue
        if args.wall:
            seconds = interleaved(arms, repeats=args.repeats, warmup=1)
        else:
            seconds = cpu_seconds(arms, args.repeats)
        cost[chunk] = seconds["learn"] / args.tokens
        times = ", ".join(f"{n} {1e3 * s / args.tokens:.2f}" for n, s in seconds.items())
        print(f"chunk {chunk}: ms per token: {times}")
        for name, title in (("chunks", "the same chunks"), ("one pass", "one forward pass")):
            ratio = seconds["learn"] / seconds[name]
            verdict(f"chunk {chunk}: learning / {title}", ratio, TARGET, at_most=True)
        print(memory_of(continuum, ids))
    if len(cost) > 1:
        first, last = cost[args.chunks[0]], cost[args.chunks[-1]]
        verdict(
            f"cost per token, chunk {args.chunks[-1]} / {args.chunks[0]}",
            last / first,
            1.0,
            at_most=True,
        )


if __name__ == "__main__":
    main()
