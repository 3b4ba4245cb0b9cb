"""Four ways for one level to learn from another, each on a task of a few seconds.

    python examples/knowledge_transfer.py

Initialisation: sine waves from ten points, from a learned start (MAML, first-order, Reptile).
Generation of weights: a hypernetwork makes the classifier for the task it is told about.
Generation of context: a learned optimizer turns the gradients a model makes into better steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nestling.paper.nested import (
    NestedSystem,
    Parameters,
    Problem,
    View,
    backpropagation,
    context_generation,
    generation,
    proximal_step,
    reset,
)
from nestling.paper.nested.meta import (
    FIRST_ORDER,
    FULL,
    REPTILE,
    MetaRule,
    Task,
    meta_learning,
    solve_task,
)
from nestling.paper.nested.training import inner
from nestling.rules import Gates, adam

# ------------------------------------------------------------------ initialisation


def sine_net(hidden: int = 32) -> Parameters:
    return {
        "w1": torch.randn(hidden, 1),
        "b1": torch.randn(hidden) / 2,
        "w2": torch.randn(hidden, hidden) / hidden**0.5,
        "b2": torch.zeros(hidden),
        "w3": torch.randn(1, hidden) / hidden**0.5 / 3,
    }


def sine_loss(own: Parameters, points: tuple[Tensor, Tensor]) -> Tensor:
    x, y = points
    hidden = torch.tanh(x @ own["w1"].mT + own["b1"])
    hidden = torch.tanh(hidden @ own["w2"].mT + own["b2"])
    return (hidden @ own["w3"].mT - y).square().mean()


def sine_task() -> Task:
    """Ten points of a wave to learn from, twenty others to be judged by."""
    height, phase = 0.5 + 4 * torch.rand(()), math.pi * torch.rand(())
    x = 10 * torch.rand(30, 1) - 5
    y = height * torch.sin(x + phase)
    return Task((x[:10], y[:10]), (x[10:], y[10:]))


def few_shot(rule: MetaRule, *, tasks: int = 300) -> tuple[float, float]:
    """Mean loss on 50 held-out waves after five steps, before and after meta-learning."""
    start, held_out = sine_net(), [sine_task() for _ in range(50)]
    problems = meta_learning(
        start,
        sine_loss,
        rule=rule,
        steps=5,
        inner_rate=0.03,
        rate=0.003,
        tasks=4,
        outer_rule=adam(),
    )
    state, _ = NestedSystem(problems).run(sine_task() for _ in range(tasks))

    def score(own: Parameters) -> float:
        losses = [
            sine_loss(solve_task(own, sine_loss, task.support, steps=5, rate=0.03), task.query)
            for task in held_out
        ]
        return float(torch.stack(losses).mean())

    return score(start), score(state.parameters["start"])


# ------------------------------------------------------------------ generation of weights


def rotated(angle: Tensor, n: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Points [n, 2], labelled by the side of a line at this angle on which they lie."""
    told = torch.stack([torch.cos(angle), torch.sin(angle)])
    x = torch.randn(n, 2)
    return told, x, (x @ told > 0).float()


def hypernetwork(*, tasks: int = 300) -> float:
    """Accuracy of generated classifiers on 50 tasks; each item is a task the network is told."""
    own = {"w1": torch.randn(16, 2), "w2": torch.randn(2, 16) / 16}

    def make(slow: Parameters, item: tuple[Tensor, Tensor, Tensor]) -> Parameters:
        return {"w": slow["w2"] @ torch.tanh(slow["w1"] @ item[0])}

    def loss(slow: Parameters, seen: tuple[Parameters, Tensor, Tensor]) -> Tensor:
        classifier, x, y = seen
        return torch.nn.functional.binary_cross_entropy_with_logits(x @ classifier["w"], y)

    classifier = Problem(
        name="classifier",
        parameters={"w": torch.zeros(2)},
        context=lambda view: None,
        chunk=math.inf,
        start=generation("hypernetwork", make),
        context_text="the task it is told",
        objective_text="none: it is generated",
    )
    slow = Problem(
        name="hypernetwork",
        parameters=own,
        context=lambda view: (view["classifier"], *view.item[1:]),
        objective=loss,
        solver=proximal_step(adam()),
        gates=Gates(rate=0.02),
        reads=(backpropagation("classifier"),),
        context_text="tasks",
        objective_text="loss of the generated classifier",
    )
    angles = 2 * math.pi * torch.rand(tasks)
    state, _ = NestedSystem((classifier, slow)).run(rotated(angle) for angle in angles)
    tests = [rotated(angle, 200) for angle in 2 * math.pi * torch.rand(50)]
    learned = state.parameters["hypernetwork"]
    right = [((x @ make(learned, (told,))["w"] > 0) == (y > 0)) for told, x, y in tests]
    return float(torch.stack(right).float().mean())


# ------------------------------------------------------------------ generation of context

STEPS = 20


def valley(own: Parameters, item: Tensor) -> Tensor:
    """A long valley: 50 times steeper across than along."""
    return (own["x"] * item).square().sum() / 2


def learned_optimizer(*, problems: int = 60) -> dict[str, float]:
    """Loss after 20 steps of the best plain rate, and of an optimizer learned on other valleys.

    Level 3 is the model, whose gradients are the context of level 2, an optimizer with a momentum
    and a rate per coordinate; level 1 learns those, by backpropagation through 20 steps.
    """
    plain = {"x": torch.ones(2)}
    slopes = torch.tensor([1.0, 50.0**0.5])

    def memory_context(view: View) -> Parameters:
        (grad,) = torch.autograd.grad(
            valley(view["model"], view.item), view["model"]["x"], create_graph=True
        )
        return {"x": grad}

    memory = Problem(
        name="optimizer",
        parameters={"x": torch.zeros(2)},
        context=memory_context,
        objective=lambda own, grad: -inner(own, grad),
        gates=lambda view: Gates(retain=torch.sigmoid(view["learned"]["keep"])),
        reads=(context_generation("model"), backpropagation("learned")),
        start=reset(every=STEPS),
        context_text="gradients the model makes",
        objective_text="-<m, g>",
    )
    model = Problem(
        name="model",
        parameters=plain,
        context=lambda view: {"x": view["learned"]["rate"].exp() * view["optimizer"]["x"]},
        objective=inner,
        reads=(backpropagation("optimizer"), backpropagation("learned")),
        start=reset(every=STEPS, to=plain),
        context_text="what the optimizer says",
        objective_text="<x, m>",
    )
    learned = Problem(
        name="learned",
        parameters={"keep": torch.zeros(2), "rate": torch.full((2,), -4.0)},
        context=lambda view: (view["model"], view.item),
        objective=lambda own, seen: (valley(*seen) + 1e-8).log() / STEPS,
        solver=proximal_step(adam()),
        gates=Gates(rate=0.1),
        chunk=STEPS,
        reads=(backpropagation("model"),),
        context_text="runs of 20 steps",
        objective_text="log loss along the run",
    )
    system = NestedSystem((memory, model, learned))
    items = [slopes * (0.9 + 0.2 * torch.rand(())) for _ in range(problems) for _ in range(STEPS)]
    state, _ = system.run(items)
    final, _ = system.run([slopes] * (STEPS - 1), state)
    best = min(
        float(valley(solve_task(plain, valley, slopes, steps=STEPS - 1, rate=rate), slopes))
        for rate in (0.005, 0.01, 0.02, 0.03, 0.035, 0.039)
    )
    return {"plain": best, "learned": valley(final.parameters["model"], slopes).item()}


if __name__ == "__main__":
    torch.manual_seed(0)
    for rule in (FULL, FIRST_ORDER, REPTILE):
        before, after = few_shot(rule)
        print(f"initialisation, {rule.name:11}: held-out loss {before:.2f} -> {after:.2f}")
    print(f"generation of weights: accuracy of generated classifiers {hypernetwork():.2f}")
    scores = learned_optimizer()
    print(
        f"generation of context: loss {scores['plain']:.1e} with the best plain rate,"
        f" {scores['learned']:.1e} with the learned optimizer"
    )
