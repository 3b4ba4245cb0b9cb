"""Cost of a step on about 10M parameters (20 matrices 512 x 1024 and 20 vectors), against torch's.

    python benchmarks/optim.py            # ratios with their targets, and the memory of the states
    python benchmarks/optim.py --loaded   # one thread, processor time: a busy machine

M3's slow momentum moves every `chunk` steps, so its cost is the mean over whole chunks. All arms
take turns in one process.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import torch
from common import Product, interleaved, matmuls, over_floor, verdict
from torch import nn

from nestling.machine import bf16_is_quicker, keep_memory
from nestling.optim import DGD, M3, AdaMuon, DeepMomentum, DeltaMomentum, Muon, capture, compose
from nestling.rules import adam

MATRICES, ROWS, COLUMNS = 20, 512, 1024
BATCH, WIDTHS = 64, (1024, 2048, 2048, 10)  # the MLP of the DGD arm
CLOCK = time.perf_counter
FEW = 2  # matrices for torch.optim.Muon, whose time is scaled up: without bfloat16 units it is slow


def parameters() -> list[nn.Parameter]:
    """The 10M parameters, with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, COLUMNS)] * MATRICES + [(COLUMNS,)] * MATRICES
    made = [nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def groups() -> list[dict[str, object]]:
    """The same, saying which are orthogonalised."""
    made = parameters()
    return [
        {"params": made[:MATRICES], "orthogonal": True},
        {"params": made[MATRICES:], "orthogonal": False},
    ]


def state_mb(optimizer: torch.optim.Optimizer) -> float:
    """Megabytes of an optimizer's state."""
    states = [v for state in optimizer.state.values() for v in state.values()]
    return sum(v.nbytes for v in states if torch.is_tensor(v)) / 2**20


def torch_muon() -> torch.optim.Optimizer:
    """torch.optim.Muon on `FEW` of the matrices: it loops over them, so time is proportional."""
    return torch.optim.Muon(parameters()[:FEW], lr=1e-3)


def training_step(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], None]:
    """Forward, backward and step of an MLP."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    x, y = torch.randn(BATCH, WIDTHS[0]), torch.randint(WIDTHS[-1], (BATCH,))
    optimizer = make(model)

    def run() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return run


def means(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Mean seconds per call; the arms take turns, after two warm-up rounds.

    The first makes states, the second asks the system for the memory of the states after them.
    """
    totals = dict.fromkeys(arms, 0.0)
    for turn in range(rounds + 2):
        for name, run in arms.items():
            start = CLOCK()
            run()
            totals[name] += (CLOCK() - start) * (turn > 1)
    return {name: total / rounds for name, total in totals.items()}


def measure() -> tuple[dict[str, float], dict[str, float]]:
    """Seconds per step and megabytes of state, by name."""
    optimizers = {
        "M3": (M3(groups(), lr=1e-3),),
        "Muon": (Muon(groups(), lr=1e-3),),
        "AdaMuon": (AdaMuon(groups(), lr=1e-3),),
        "torch.optim.Muon": (torch_muon(),),
        "DeltaMomentum": (DeltaMomentum(parameters(), lr=1e-3),),
        "DeepMomentum": (DeepMomentum(parameters(), lr=1e-3),),
        "AdamW from rules": (compose(parameters(), adam(), lr=1e-3, weight_decay=0.01),),
        "torch AdamW loop": (torch.optim.AdamW(parameters(), lr=1e-3, foreach=False),),
    }
    steps = {
        name: lambda parts=parts: [part.step() for part in parts]
        for name, parts in optimizers.items()
    }
    rounds = optimizers["M3"][0].param_groups[0]["chunk"]
    steps["Newton-Schulz's products"] = matmuls(
        [
            Product(1, ROWS, COLUMNS, ROWS, MATRICES),  # the Gram matrix, once
            Product(1, ROWS, ROWS, ROWS, 5 * 2 * MATRICES),  # and each of five steps on it
            Product(1, ROWS, ROWS, COLUMNS, MATRICES),
        ]
    )
    seconds = means(
        {n: steps[n] for n in ("M3", "Muon", "AdaMuon", "Newton-Schulz's products")}, rounds
    )
    seconds |= interleaved({"torch.optim.Muon": steps["torch.optim.Muon"]}, 3, 1, CLOCK)
    seconds["torch.optim.Muon"] *= MATRICES / FEW
    seconds |= interleaved({n: steps[n] for n in ("DeltaMomentum", "DeepMomentum")}, 3, 1, CLOCK)
    seconds |= interleaved({n: s for n, s in steps.items() if "AdamW" in n}, 21, 3, CLOCK)
    memory = {name: sum(map(state_mb, parts)) for name, parts in optimizers.items()}
    memory["torch.optim.Muon"] *= MATRICES / FEW
    training = {
        "SGD training": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        "DGD training": lambda m: DGD(m.parameters(), lr=0.1, inputs=capture(m)),
        "DGD erase=1 training": lambda m: DGD(m.parameters(), lr=0.1, erase=1.0, inputs=capture(m)),
    }
    seconds |= interleaved({n: training_step(make) for n, make in training.items()}, 21, 3, CLOCK)
    return seconds, memory


def main() -> int:
    """Measure everything and print the verdicts."""
    global CLOCK
    loaded = "--loaded" in sys.argv[1:]
    torch.set_num_threads(1 if loaded else 2)
    CLOCK = time.process_time if loaded else time.perf_counter
    keep_memory()  # for all arms alike
    seconds, memory = measure()
    print(f"{'optimizer':<24} {'ms per step':>12} {'state MB':>9}")
    for name, time_ in seconds.items():
        state = f"{memory[name]:9.1f}" if name in memory else ""
        print(f"{name:<24} {1e3 * time_:12.1f} {state}")
    targets = [
        ("M3", "Muon", 1.15),
        ("M3", "torch.optim.Muon", 1.15 if bf16_is_quicker() else 0.6),
        ("DGD training", "SGD training", 1.5),
        ("DGD erase=1 training", "SGD training", 1.5),
        ("AdamW from rules", "torch AdamW loop", 1.5),
    ]
    over_floor("M3", seconds["M3"], seconds["Newton-Schulz's products"])
    met = [
        verdict(f"{ours} / {theirs}", seconds[ours] / seconds[theirs], target, at_most=True)
        for ours, theirs, target in targets
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
