"""Language modelling: Hope beside Transformer++, Titans and DeltaNet, at equal size and tokens.

    python -m studies older.lm            run what is missing, write the page
    python -m studies older.lm --report   only write the page

Bytes of WikiText-2, about 1M parameters, every arm the same batches. Each arm's rate is the best of
three on a seed of its own, at half the steps; then three seeds. More arms, at Hope's rate, tell
what matters: `hope_printed` is Eq. 83-88 as printed (deviation 22), `hope_parallel` has its levels
side by side (Eq. 74) instead of in a chain, `hope_gated` has gated MLPs as levels. Beside the
validation loss at the trained length, every model reads streams eight times as long: loss against
position.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nestling.files import write_atomic
from nestling.models import MemoryCache, NestlingForCausalLM, presets
from nestling.report import Line, lines
from studies.harness import loop
from studies.harness.command import common, ready, watched
from studies.harness.store import Store
from studies.harness.tuning import best
from studies.harness.verdict import interval

SIZE = presets.Size(width=128, layers=3, heads=4, vocabulary=256, parameters=1_000_000)
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "hope": ("hope", {}),
    "transformer": ("transformer", {}),
    "titans": ("titans", {}),
    "deltanet": ("deltanet", {}),
    "hope_parallel": ("hope", {"topology": "parallel"}),
    "hope_gated": ("hope", {"activation": "swiglu"}),
    "hope_parallel_gated": ("hope", {"topology": "parallel", "activation": "swiglu"}),
    "hope_printed": ("hope", {"mixer_options": {"self_modifying": {"residual": False}}}),
}
VARIANTS = ("hope_parallel", "hope_gated", "hope_parallel_gated", "hope_printed")
"""Arms that take Hope's rate."""

RATES = (6e-3, 12e-3, 24e-3)
TUNING_SEED, SEEDS = 100, (0, 1, 2)
LENGTH, ROWS, FURTHER = 512, 4, 8


def text(folder: Path, part: str) -> Tensor:
    """The bytes of one part of WikiText-2."""
    return torch.frombuffer(
        bytearray(gzip.decompress((folder / f"{part}.txt.gz").read_bytes())), dtype=torch.uint8
    )


def windows(data: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Windows of `length + 1` bytes from random places, [count, length + 1]."""
    flow = torch.Generator().manual_seed(seed)
    first = torch.randint(len(data) - length - 1, (count,), generator=flow)
    return data[first[:, None] + torch.arange(length + 1)].long()


def schedule(step: int, steps: int) -> float:
    """Up over 20 steps, down to a tenth along a cosine."""
    return min(1.0, (step + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def train(
    model: NestlingForCausalLM, data: Tensor, *, rate: float, seed: int, steps: int
) -> loop.Trained:
    """AdamW on windows from random places."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))

    def loss(step: int) -> Tensor:
        ids = windows(data, ROWS, LENGTH, 1_000_003 * (seed + 1) + step)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return loop.train([model], loss, optimizer, steps=steps, schedule=schedule)


@torch.no_grad()
def validate(model: NestlingForCausalLM, data: Tensor, windows_of: int) -> float:
    """Mean loss in nats per byte over windows of the trained length."""
    losses = []
    for ids in windows(data, windows_of, LENGTH, seed=7).split(8):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses.append(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
    return sum(losses) / len(losses)


@torch.no_grad()
def by_position(model: NestlingForCausalLM, data: Tensor, streams: int) -> list[float]:
    """The loss of streams beyond the trained length, one value for every `LENGTH` bytes."""
    ids = windows(data, streams, FURTHER * LENGTH, seed=8)
    cache = MemoryCache(SIZE.layers)
    losses = []
    for start in range(0, FURTHER * LENGTH, LENGTH):
        seen, next_ = ids[:, start : start + LENGTH], ids[:, start + 1 : start + LENGTH + 1]
        logits = model(input_ids=seen, past_key_values=cache, use_cache=True).logits
        losses.append(cross_entropy(logits.flatten(0, 1), next_.flatten()).item())
    return losses


def run(arm: str, rate: float, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train one model and judge it; a run of a few steps is judged by less."""
    quick = steps < 4
    name, fields = ARMS[arm]
    torch.manual_seed(seed)
    model = NestlingForCausalLM(presets.configure(SIZE, name, **fields)).train()
    found = train(model, text(folder, "train"), rate=rate, seed=seed, steps=steps)
    model.eval()
    valid = text(folder, "valid")
    result = {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "tokens": steps * ROWS * LENGTH,
        "parameters": model.num_parameters(),
        "train": found.last(),
        "valid": validate(model, valid, 4 if quick else 48),
        "seconds": found.seconds,
    }
    if seed != TUNING_SEED:
        result["positions"] = by_position(model, valid, 1 if quick else 8)
    return result


def study(store: Store, folder: Path, arms: list[str], seeds: list[int], steps: int) -> None:
    """Tune, then run the seeds one after another, so that a stopped study is balanced."""
    trials = [(arm, rate) for arm in arms if arm not in VARIANTS for rate in RATES]
    for arm, rate in watched(trials, lambda job: f"{job[0]} at rate {job[1]:g}"):
        key = f"tune/{steps}/{arm}/{rate:g}"
        if key not in store:
            store.put(key, run(arm, rate, TUNING_SEED, steps // 2, folder))
    jobs = [(arm, seed) for seed in seeds for arm in arms]
    for arm, seed in watched(jobs, lambda job: f"{job[0]}, seed {job[1]}"):
        tuned = "hope" if arm in VARIANTS else arm
        rate = best(
            RATES,
            lambda r, arm=tuned: store.get(f"tune/{steps}/{arm}/{r:g}")["valid"],
            lower=True,
        )
        key = f"run/{steps}/{arm}/{seed}"
        if key not in store:
            store.put(key, run(arm, rate, seed, steps, folder))


NAMES = {
    "hope": "Hope",
    "transformer": "Transformer++",
    "titans": "Titans",
    "deltanet": "DeltaNet",
    "hope_parallel": "Hope, levels side by side (Eq. 74)",
    "hope_gated": "Hope, gated levels",
    "hope_parallel_gated": "Hope, gated levels side by side",
    "hope_printed": "Hope as printed (Eq. 83-88)",
}
Runs = dict[str, list[dict[str, Any]]]


def show(values: list[float], digits: int = 3, sign: str = "") -> str:
    mean, half = interval(values)
    return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"


def page(
    stored: dict[str, dict[str, Any]], path: Path, *, length: int, rows: int, size: presets.Size
) -> None:
    """Write the page and its picture."""
    runs: Runs = {}
    for key, result in sorted(stored.items()):
        if key.startswith("run/"):
            runs.setdefault(result["arm"], []).append(result)
    trials = [r for key, r in stored.items() if key.startswith("tune/")]
    runs = {arm: runs[arm] for arm in NAMES if arm in runs}
    if not runs:
        raise ValueError("no finished runs yet, so there is no page")
    first = next(iter(runs.values()))[0]
    text = [
        "# Language modelling: Hope beside its neighbours\n",
        f"Bytes of WikiText-2, {size.layers} layers of width {size.width}, about"
        f" {size.parameters:,} parameters each, {first['tokens']:,} tokens of training in windows"
        f" of {length}, {rows} at a time. Each arm's rate is the best of three, by the validation"
        " loss at half the steps on a seed that is not used again. Mean and 95% interval over"
        f" {min(len(r) for r in runs.values())} seeds; losses in nats per byte.\n",
        "| model | rate | validation loss | against Hope, seed by seed | training, CPU s |",
        "|---|---|---|---|---|",
        *(_row(arm, found, runs.get("hope")) for arm, found in runs.items()),
        "",
        "All rates tried (validation loss): "
        + "; ".join(_tried(arm, trials) for arm in runs)
        + ".",
        "",
        *_limit(runs),
        "## Beyond the trained length\n",
        f"Every model reads streams of {8 * length:,} bytes: the loss of each stretch of {length}"
        " bytes.\n",
        "| model | " + " | ".join(f"to {length * (i + 1):,}" for i in range(8)) + " |",
        "|---|" + "---|" * 8,
        *(_stretches(arm, found) for arm, found in runs.items()),
        "",
        f"![Loss against position]({path.stem}_positions.svg)\n",
        _reading(runs),
        "`python -m studies older.lm --data FOLDER` runs what is missing and writes this page.\n",
    ]
    write_atomic(path, "\n".join(text).encode())
    write_atomic(path.with_name(f"{path.stem}_positions.svg"), _picture(runs, length).encode())


def _row(arm: str, found: list[dict[str, Any]], hope: list[dict[str, Any]] | None) -> str:
    valid = [r["valid"] for r in found]
    gap = "-"
    if hope and arm != "hope":
        ours = {r["seed"]: r["valid"] for r in hope}
        pairs = [r["valid"] - ours[r["seed"]] for r in found if r["seed"] in ours]
        gap = show(pairs, sign="+") if pairs else "-"
    seconds = sum(r["seconds"] for r in found) / len(found)
    return f"| {NAMES[arm]} | {found[0]['rate']:g} | {show(valid)} | {gap} | {seconds:.0f} |"


def _tried(arm: str, trials: list[dict[str, Any]]) -> str:
    mine = sorted((r["rate"], r["valid"]) for r in trials if r["arm"] == arm)
    if not mine:
        return f"{NAMES[arm]} takes Hope's"
    return f"{NAMES[arm]} " + ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in mine)


def _limit(runs: Runs) -> list[str]:
    """What the levels in other forms say about the chain of plain ones."""
    said = []
    for arm in ("hope_parallel", "hope_gated", "hope_parallel_gated"):
        pairs = zip(runs.get("hope", []), runs.get(arm, []), strict=False)
        gaps = [plain["valid"] - other["valid"] for plain, other in pairs]
        if len(gaps) > 1:
            mean, half = interval(gaps)
            word = "costs" if mean > half else "does not cost significantly"
            other = NAMES[arm].removeprefix("Hope, ")
            said.append(f"- Hope's chain of narrow levels {word} {show(gaps)} nats against {other}")
    title = "What limits Hope at this size, with the same memory and parameters:"
    return [title, "", *said, ""] if said else []


def _stretches(arm: str, found: list[dict[str, Any]]) -> str:
    each = zip(*(r["positions"] for r in found), strict=True)
    return f"| {NAMES[arm]} | " + " | ".join(show(list(v), 2) for v in each) + " |"


def _rise(found: list[dict[str, Any]]) -> tuple[float, float]:
    """How much more the last four stretches cost than the first, mean and half interval."""
    return interval([sum(r["positions"][4:]) / 4 - r["positions"][0] for r in found])


def _reading(runs: Runs) -> str:
    """What the numbers say, in words made from the numbers."""
    said = []
    for arm, found in runs.items():
        mean, half = _rise(found)
        if math.isfinite(mean) and abs(mean) <= half:
            word = "does not change significantly"
        else:
            word = "rises" if mean > 0 else "falls"
        said.append(f"{NAMES[arm]}: {word} ({mean:+.3f} ± {half:.3f}).")
    listed = "\n".join(f"- {line}" for line in said)
    return f"From the first stretch to the mean of the last four the loss\n\n{listed}\n"


def _picture(runs: Runs, length: int) -> str:
    drawn = []
    for arm, found in runs.items():
        each = [interval(list(v)) for v in zip(*(r["positions"] for r in found), strict=True)]
        x = [length * (i + 0.5) for i in range(len(each))]
        mean = [m for m, _ in each]
        low, high = [m - h for m, h in each], [m + h for m, h in each]
        drawn.append(Line(NAMES[arm].split(" (")[0], x, mean, low, high))
    return lines(drawn, x="position (bytes)", y="loss (nats per byte)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run."""
    parser = common("older.lm", __doc__)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=60, help="of training; tuning takes half")
    options = parser.parse_args(arguments)
    ready("older.lm", options)
    if options.quick:
        options.steps, options.seeds, options.arms = 2, [0], ["hope", "deltanet"]
    copy, needs = options.out / "lm.json", ("arm", "rate", "seed", "valid")
    store = Store(options.runs, study="older.lm", copy=copy, needs=needs)
    if not options.report:
        folder = options.data if (options.data / "train.txt.gz").is_file() else None
        folder = folder or options.data / "wikitext2"
        if not (folder / "train.txt.gz").is_file():
            raise ValueError(f"--data: no train.txt.gz in {folder}")
        study(store, folder, options.arms, options.seeds, options.steps)
    stored = store.gather()
    chosen = {key: r for key, r in stored.items() if int(key.split("/")[1]) == options.steps}
    path = options.out / "lm.md"
    page(chosen, path, length=LENGTH, rows=ROWS, size=SIZE)
    print(path.read_text())
    return 0
