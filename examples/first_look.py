"""A first look: optimizers as memories on two problems small enough to see (under a minute).

    python examples/first_look.py            # prints two tables, writes out/first_look.png

1. A winding valley (Eq. 53). Plain momentum only adds gradients; delta momentum first takes out
   what it already holds along the new gradient (Eq. 49), so it overshoots less at the bends.
2. Four regressions on orthogonal inputs, one after another, one pair at a time (Eq. 45). Delta
   gradient descent (Eq. 56) solves for each pair exactly and takes the largest safe step. Momentum
   goes on pushing along a task that is over, for better or worse.

Every method tries the same number of settings and shows its best. Everything runs as one batch:
rules treat leading dimensions (here rates, starts and seeds) as batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.paper.exhibits.tasks import SURFACE_START, OrthogonalTasks, surface
from nestling.rules import Gates, Rule, Write, apply, delta_momentum, dgd, identity, momentum

GOAL = 1e-3  # the valley is done when the loss stays below this
DECAYS = (0.8, 0.9, 0.95)
METHODS: dict[str, list[Rule]] = {  # with no decay to choose, a rule gets three times the rates
    "gradient descent": [identity],
    "momentum": [momentum(decay) for decay in DECAYS],
    "delta momentum": [delta_momentum(decay=decay) for decay in DECAYS],
    "delta gradient descent": [dgd(mean=True, erase=0.0)],
}
COLOURS = dict(zip(METHODS, ["#8c8c8c", "#d1495b", "#00798c", "#edae49"], strict=True))


class Best(NamedTuple):
    """The best of a method's trials: the number to compare by, and all it recorded."""

    score: float
    rate: float
    record: Tensor


def try_all(
    rules: list[Rule],
    rates: Tensor,
    run: Callable[[Rule, Tensor], Tensor],
    *scores: Callable[[Tensor], Tensor],
) -> list[Best]:
    """Run each rule at all rates at once: `3 * len(rates)` trials, and the best by each score."""
    low, high = rates[0].log10().item(), rates[-1].log10().item()
    grid = torch.logspace(low, high, len(DECAYS) * len(rates) // len(rules))
    best = [Best(float("inf"), 0.0, torch.empty(0))] * len(scores)
    for rule in rules:
        record = run(rule, grid)  # [steps, rates, ...]
        for i, score in enumerate(scores):
            values = score(record)  # [rates]
            at = int(values.argmin())
            if values[at] < best[i].score:
                best[i] = Best(float(values[at]), float(grid[at]), record[:, at])
    return best


# The winding valley ------------------------------------------------------------------------------


def walk(starts: Tensor, steps: int) -> Callable[[Rule, Tensor], Tensor]:
    """Follow a rule down the surface: points [steps + 1, rates, starts, 2]."""
    slope = torch.func.grad(lambda points: surface(points).sum())

    def run(rule: Rule, rates: Tensor) -> Tensor:
        point = starts[None, :, None].expand(len(rates), -1, 1, 2).clone()  # [R, N, 1, 2]
        state, path = rule.init(point), [point[:, :, 0]]
        for step in range(1, steps + 1):
            gates = Gates(rate=rates[:, None, None, None], step=step)
            point, state = apply(rule, point, Write(slope(point)), state, gates)
            path.append(point[:, :, 0])
        return torch.stack(path)

    return run


def steps_needed(path: Tensor) -> Tensor:
    """After how many steps the loss stays below the goal, per trial and start: [..., N]."""
    loss = surface(path).nan_to_num(nan=torch.inf)
    number = torch.arange(1, len(loss) + 1).reshape(-1, *[1] * (loss.ndim - 1))
    return torch.where(loss >= GOAL, number, 0).amax(0).double()


class Valley(NamedTuple):
    """The best trial of a method for the paper's start, and for many random starts together."""

    paper: Best
    random: Best


def valley(short: bool) -> dict[str, Valley]:
    """Every method from the paper's start and from random ones."""
    random = 8.0 * torch.rand(20 if short else 100, 2) - 4.0
    run = walk(torch.cat([torch.tensor([SURFACE_START]), random]), 60 if short else 300)
    rates = torch.logspace(-2.5, -0.5, 4 if short else 9)
    scores = (
        lambda path: steps_needed(path[:, :, 0]),
        lambda path: steps_needed(path[:, :, 1:]).mean(-1),
    )
    names = ["gradient descent", "momentum", "delta momentum"]
    return {name: Valley(*try_all(METHODS[name], rates, run, *scores)) for name in names}


# Orthogonal tasks --------------------------------------------------------------------------------


def learn(tasks: OrthogonalTasks, steps: int, seeds: int) -> Callable[[Rule, Tensor], Tensor]:
    """Learn the tasks one after another from single pairs: losses [steps, rates, tasks]."""
    basis, truth = tasks.truth()
    blocks = basis.reshape(tasks.inputs, tasks.tasks, tasks.width)

    def losses(weight: Tensor) -> Tensor:  # [R, S, Do, Di] -> [R, tasks]
        miss = torch.einsum("rsoi,itw->rstow", weight - truth, blocks)
        return miss.square().sum((-2, -1)).mean(1)

    def run(rule: Rule, rates: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = torch.zeros(len(rates), seeds, tasks.outputs, tasks.inputs)
        state, record = rule.init(weight), []
        for step in range(1, tasks.tasks * steps + 1):
            x, y = tasks.sample((step - 1) // steps, seeds, generator)
            x, y = x[:, None], y[:, None]  # [S, 1, Di], [S, 1, Do]
            surprise = x @ weight.mT - y
            write = Write(surprise.mT @ x, x, -surprise)
            gates = Gates(rate=rates[:, None, None, None], step=step)
            weight, state = apply(rule, weight, write, state, gates)
            record.append(losses(weight))
        return torch.stack(record)

    return run


def sequence(short: bool) -> tuple[dict[str, Best], int]:
    """Every method on four tasks in turn; best is the least loss on all of them at the end."""
    steps = 10 if short else 30
    run = learn(OrthogonalTasks(), steps, 4 if short else 30)
    rates = torch.logspace(-2.5, 0.5, 4 if short else 9)

    def final(record: Tensor) -> Tensor:
        return record[-1].mean(-1).nan_to_num(nan=torch.inf)

    return {name: try_all(rules, rates, run, final)[0] for name, rules in METHODS.items()}, steps


def forgetting(record: Tensor, steps: int) -> tuple[float, float]:
    """Mean loss of each task when its turn ended, and how much it rose until the end."""
    tasks = record.shape[-1]
    ended = torch.stack([record[(i + 1) * steps - 1, i] for i in range(tasks)])
    return float(ended.mean()), float((record[-1] - ended)[:-1].mean())


# Tables and the picture --------------------------------------------------------------------------


def print_valley(results: dict[str, Valley]) -> None:
    print(f"A winding valley (Eq. 53): steps until the loss stays below {GOAL:g}\n")
    print(f"{'':24}{'paper start':>12}{'rate':>9}{'100 starts':>12}{'arrived':>10}{'rate':>9}")
    for name, (paper, random) in results.items():
        limit = len(paper.record)
        first = f"{paper.score:.0f}" if paper.score < limit else f">{limit - 1}"
        needed = steps_needed(random.record[:, 1:])
        arrived = f"{int((needed < limit).sum())}/{len(needed)}"
        print(
            f"{name:24}{first:>12}{paper.rate:>9.3g}"
            f"{random.score:>12.0f}{arrived:>10}{random.rate:>9.3g}"
        )


def print_sequence(results: dict[str, Best], steps: int) -> None:
    print("\nFour orthogonal tasks in turn (Eq. 45): mean loss per task\n")
    print(f"{'':24}{'after its turn':>16}{'forgotten':>12}{'at the end':>12}{'rate':>9}")
    for name, best in results.items():
        learned, lost = forgetting(best.record, steps)
        end = float(best.record[-1].mean())
        print(f"{name:24}{learned:>16.3f}{lost:>12.3f}{end:>12.3f}{best.rate:>9.3g}")


def draw(walks: dict[str, Valley], tasks: dict[str, Best], steps: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")

    r, theta = torch.meshgrid(torch.linspace(-5, 4, 300), torch.linspace(-6, 6, 300), indexing="xy")
    height = surface(torch.stack([r, theta], -1))
    left.contourf(r, theta, height.clamp(min=1e-2).log10(), levels=24, cmap="Greys", alpha=0.5)
    for name, (paper, random) in walks.items():
        x, y = paper.record[:, 0].unbind(-1)
        left.plot(x, y, "-", color=COLOURS[name], lw=1.6, label=name)
        needed = steps_needed(random.record[:, 1:]).sort().values
        share = torch.arange(1, len(needed) + 1) / len(needed)
        inside = needed < len(random.record)
        middle.step(needed[inside], share[inside], color=COLOURS[name], lw=1.8, where="post")
    left.plot(*SURFACE_START, "o", color="black", ms=6)
    left.plot(0, 0, "*", color="black", ms=13)
    left.annotate("start", SURFACE_START, xytext=(6, 6), textcoords="offset points")
    left.annotate("minimum", (0, 0), xytext=(8, -12), textcoords="offset points")
    left.set(xlim=(-5, 4), ylim=(-6, 6), xlabel="r", ylabel="θ")
    left.set_title("A winding valley (Eq. 53)")
    left.legend(loc="lower right", framealpha=0.9, edgecolor="none")
    middle.set(xlabel="step", ylabel=f"share of random starts with loss below {GOAL:g}")
    middle.set(xlim=(0, None), ylim=(0, 1.02))
    middle.set_title("How many have arrived")

    for name, best in tasks.items():
        right.plot(best.record[:, 0], color=COLOURS[name], lw=1.8, label=name)
    for turn in range(1, best.record.shape[-1]):
        right.axvline(turn * steps, color="black", lw=0.8, ls=":")
    top = right.get_ylim()[1]
    for turn in range(best.record.shape[-1]):
        right.text((turn + 0.5) * steps, 1.0, f"task {turn + 1}", ha="center", va="bottom",
                   transform=right.get_xaxis_transform())  # fmt: skip
    right.set(yscale="log", xlabel="step", ylabel="loss on task 1", ylim=(None, top))
    right.set_title("What becomes of task 1 (Eq. 45)", pad=18)
    right.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/first_look.png"))
    parser.add_argument("--short", action="store_true", help="fewer starts, steps and rates")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are tiny
    torch.manual_seed(0)
    walks = valley(options.short)
    print_valley(walks)
    tasks, steps = sequence(options.short)
    print_sequence(tasks, steps)
    try:
        draw(walks, tasks, steps, options.out)
    except ModuleNotFoundError as error:
        print(f"\nNo picture ({error}): pip install 'nestling[report]'")
    else:
        print(f"\nPicture: {options.out}")


if __name__ == "__main__":
    main()
