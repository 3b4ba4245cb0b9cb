"""Knowledge moves between levels: learned starts, generated weights, generated context."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from nestling.paper.nested import NestedSystem
from nestling.paper.nested.meta import FIRST_ORDER, FULL, REPTILE, Task, meta_learning, solve_task

EXAMPLE = runpy.run_path(
    str(Path(__file__).resolve().parents[2] / "examples" / "knowledge_transfer.py")
)


def quadratic(own, point):
    return 0.5 * (point[0] * (own["w"] - point[1])).square().sum()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("rule", [FULL, FIRST_ORDER, REPTILE], ids=lambda r: r.name)
def test_meta_gradients_equal_their_formulas(rule, steps):
    """On a quadratic everything is known: theta - y = prod(1 - eta a^2) (Phi - y)."""
    eta, start = 0.2, {"w": torch.randn(3, dtype=torch.float64)}
    tasks = [
        Task(*(tuple(torch.randn(2, 3, dtype=torch.float64)) for _ in range(2))) for _ in range(2)
    ]
    problems = meta_learning(
        start, quadratic, rule=rule, steps=steps, inner_rate=eta, rate=1.0, tasks=2
    )
    state, ticks = NestedSystem(problems).run(tasks)
    expected = torch.zeros_like(start["w"])
    for task in tasks:
        (a, y), (b, z) = task
        shrink = (1 - eta * a**2) ** steps
        end = y + shrink * (start["w"] - y)
        slope = b**2 * (end - z)
        expected += {FULL: shrink * slope, FIRST_ORDER: slope, REPTILE: start["w"] - end}[rule] / 2
    learned = state.parameters["start"]["w"].detach()
    torch.testing.assert_close(learned, start["w"] - expected, rtol=0, atol=1e-12)
    assert [len(tick.updates) for tick in ticks] == [1, 2]


def test_adapt_is_what_the_fast_level_does():
    start = {"w": torch.randn(3, dtype=torch.float64)}
    task = Task(*(tuple(torch.randn(2, 3, dtype=torch.float64)) for _ in range(2)))
    problems = meta_learning(start, quadratic, rule=FULL, steps=4, inner_rate=0.1, rate=0.0)
    state, _ = NestedSystem(problems).run([task])
    alone = solve_task(start, quadratic, task.support, steps=4, rate=0.1)
    torch.testing.assert_close(alone["w"], state.parameters["fast"]["w"].detach())


def test_a_hypernetwork_generates_classifiers_for_unseen_tasks():
    assert EXAMPLE["hypernetwork"](tasks=200) > 0.9


def test_a_learned_optimizer_beats_the_best_plain_rate():
    scores = EXAMPLE["learned_optimizer"](problems=40)
    assert scores["learned"] < 1e-3 * scores["plain"]
