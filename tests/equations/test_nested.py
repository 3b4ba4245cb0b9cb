"""Nested systems and knowledge transfer, equation by equation (Eq. 4, 6, 19-28, 98-99)."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nestling.continuum.layers import Block, Chain
from nestling.levels import Level
from nestling.memories import SelfModifying, SelfModifyingConfig, configure
from nestling.objectives import Matrix, dot, l2
from nestling.paper.exhibits.gd import argmin, gd_proximal, layer_proximal, proximity
from nestling.paper.nested import (
    NestedSystem,
    Problem,
    direct,
    keep_context,
    minimise,
    proximal_step,
    solution,
)
from nestling.paper.nested.hope import hope_block
from nestling.paper.nested.meta import FIRST_ORDER, FULL, REPTILE, Task, meta_learning
from nestling.paper.nested.sequences import Token, ada_transformer_block, attend, transformer_block
from nestling.paper.nested.training import KeyValue, sgd_problem
from nestling.rules import Gates

EXAMPLE = runpy.run_path(
    str(Path(__file__).resolve().parents[2] / "examples" / "knowledge_transfer.py")
)
B, T, D, K = 2, 5, 3, 3


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def same(found, expected):
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=1e-10)


@pytest.mark.equation(19)
def test_every_level_takes_the_proximal_step_on_its_own_context():
    """Two levels with their own objectives and contexts; each step is the argmin it stands for."""
    start, item = {"fast": rand(2, 3), "slow": rand(2, 3)}, rand(3)

    def fast_loss(own, x):
        return torch.tanh(own["w"] @ x).sum()

    def slow_loss(own, x):
        return (own["w"] @ x).square().sum()

    fast = sgd_problem("fast", {"w": start["fast"]}, fast_loss, rate=0.3)
    slow = sgd_problem(
        "slow",
        {"w": start["slow"]},
        slow_loss,
        rate=0.1,
        context=lambda view: 2 * view.item,
        chunk=2,
    )
    state, _ = NestedSystem([fast, slow]).run([item, item])
    weight = start["fast"]
    for _ in range(2):
        grad = torch.func.grad(lambda w: fast_loss({"w": w}, item))(weight)
        weight = gd_proximal(weight, grad, 0.3)
    same(state.parameters["fast"]["w"], weight)
    grad = torch.func.grad(lambda w: slow_loss({"w": w}, 2 * item))(start["slow"])
    same(state.parameters["slow"]["w"], gd_proximal(start["slow"], 2 * grad, 0.1))


@pytest.mark.equation(20)
@pytest.mark.parametrize("objective", [dot, l2], ids=["dot", "l2"])
def test_every_problem_maps_its_keys_to_its_values(objective):
    weight, keys, values = rand(4, 3), rand(6, 3), rand(6, 4)
    problem = Problem(
        name="memory",
        parameters={"M": weight},
        context=lambda view: KeyValue(*view.item),
        objective=lambda own, pair: objective.loss(Matrix(own["M"]), *pair).sum(),
        solver=proximal_step(),
        gates=Gates(rate=0.05),
    )
    state, _ = NestedSystem([problem]).run([(keys, values)])
    (signal,) = objective.surprise(Matrix(weight), keys, values)
    same(state.parameters["memory"]["M"], layer_proximal(weight, keys, signal.error, 0.05))


def block_weights():
    sizes = {"up": (4, K), "down": (K, 4)}
    square = ("key", "value", "query", "memory_key", "memory_value", "memory_query", "start")
    return {name: rand(*sizes.get(name, (K, D))) * 0.5 for name in (*square, *sizes)}


def run_block(block, weights, x):
    """The block's outputs [B, T, K] while it reads one sequence."""
    outputs = []

    def record(y, target):
        outputs.append(y)
        return y.sum()

    tokens = [Token(x[:, t], x[:, t]) for t in range(T)]
    NestedSystem(block(weights, record, batch=B, length=T, rate=0.0)).run(tokens)
    return torch.stack(outputs, 1)


def attended(weights, x):
    k, v, q = (x @ weights[name].mT for name in ("key", "value", "query"))
    return scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.equation(21)
def test_a_transformer_block_is_an_mlp_of_attention():
    weights, x = block_weights(), rand(B, T, D)
    hidden = torch.relu(attended(weights, x) @ weights["up"].mT)
    same(run_block(transformer_block, weights, x), hidden @ weights["down"].mT)


@pytest.mark.equation(22, 23, 69)
def test_an_ada_transformer_block_writes_its_mlp_in_context():
    weights, x = block_weights(), rand(B, T, D)
    a = attended(weights, x)
    k, v, q = (a @ weights[f"memory_{name}"].mT for name in ("key", "value", "query"))
    memory, expected = weights["start"].expand(B, K, K), []
    for t in range(T):
        memory = memory + v[:, t, :, None] * k[:, t, None, :]
        expected.append((memory @ q[:, t, :, None])[..., 0])
    same(run_block(ada_transformer_block, weights, x), torch.stack(expected, 1))


def conditioned(seen, *, source):
    """The contexts of a memory whose context is `seen(view)` of `source`, and all weights.

    Two memories, fast (every item) and slow (every second). The one that is read learns the items,
    `w - item`; the reader learns `w - context`, which is checked. Returns the reader's contexts of
    four items, the start of the memory that is read, and the items.
    """
    starts, items = {"fast": rand(2, 3), "slow": rand(2, 3)}, list(rand(4, 2, 3))
    reader = "slow" if source == "fast" else "fast"
    problems = [
        Problem(
            name=name,
            parameters={"w": starts[name]},
            context=seen if name == reader else (lambda view: view.item),
            objective=lambda own, context: (own["w"] * context).sum(),
            chunk=chunk,
            reads=(direct(source),) if name == reader else (),
        )
        for name, chunk in (("fast", 1), ("slow", 2))
    ]
    state, ticks = NestedSystem(problems).run(items)
    contexts = [tick.contexts[reader] for tick in ticks]
    assert not any(context.requires_grad for context in contexts)  # knowledge, no gradient
    same(state.parameters[reader]["w"], starts[reader] - sum(contexts))
    return contexts, starts[source], items


@pytest.mark.equation(24)
def test_a_slow_memory_conditions_on_a_faster_ones_parameters():
    contexts, start, items = conditioned(lambda view: view["fast"]["w"], source="fast")
    same(contexts[0], start - items[0])  # the fast memory as it is after the item
    same(contexts[1], start - items[0] - items[1])


@pytest.mark.equation(25)
def test_a_slow_memory_conditions_on_a_faster_ones_output():
    asked = rand(3, 3)
    contexts, start, items = conditioned(lambda view: view["fast"]["w"] @ asked, source="fast")
    same(contexts[0], (start - items[0]) @ asked)
    same(contexts[1], (start - items[0] - items[1]) @ asked)


@pytest.mark.equation(26)
def test_a_fast_memory_conditions_on_a_slower_one():
    contexts, start, items = conditioned(lambda view: view["slow"]["w"] * view.item, source="slow")
    same(contexts[1], start * items[1])  # the slow memory learns behind the second item
    same(contexts[2], (start - items[0] - items[1]) * items[2])


@pytest.mark.equation(27)
@pytest.mark.parametrize("window", [None, 3])
def test_a_memory_conditions_on_the_context_itself(window):
    keys, values, query = rand(B, T, K), rand(B, T, K), rand(B, K)
    box = Problem(
        name="box",
        parameters={"keys": keys[:, :0], "values": values[:, :0]},
        context=lambda view: dict(zip(("keys", "values"), view.item)),
        solver=keep_context(window=window),
    )
    reader = Problem(
        name="reader",
        parameters={},
        context=lambda view: attend(view["box"], query),
        chunk=math.inf,
        reads=(direct("box"),),
    )
    items = [(keys[:, t : t + 1], values[:, t : t + 1]) for t in range(T)]
    _, ticks = NestedSystem([box, reader]).run(items)
    start = 0 if window is None else T - window
    expected = scaled_dot_product_attention(query[:, None], keys[:, start:], values[:, start:])
    same(ticks[-1].contexts["reader"], expected[:, 0])


@pytest.mark.equation(4, 28)
@pytest.mark.parametrize("rule", [FULL, FIRST_ORDER, REPTILE], ids=lambda r: r.name)
def test_a_learned_start_improves_tasks_it_never_saw(rule):
    before, after = EXAMPLE["few_shot"](rule, tasks=240)
    assert after < 0.75 * before


@pytest.mark.equation(4, 28)
@pytest.mark.parametrize("rule", [FULL, FIRST_ORDER, REPTILE], ids=lambda r: r.name)
def test_the_start_steps_by_the_gradient_of_what_its_tasks_came_to(rule):
    """Two tasks for each step of the start; every task begins there and takes two steps."""
    start = rand(3)
    tasks = [Task((rand(5, 3), rand(5)), (rand(4, 3), rand(4))) for _ in range(2)]

    def loss(own, pair):
        return 0.5 * (pair[0] @ own["w"] - pair[1]).square().sum()

    problems = meta_learning(
        {"w": start}, loss, rule=rule, steps=2, inner_rate=0.05, rate=0.1, tasks=2
    )
    state, _ = NestedSystem(problems).run(tasks)
    leaf = start.clone().requires_grad_()
    total = torch.zeros(())
    for task in tasks:
        end = leaf
        for _ in range(2):
            inner = loss({"w": end}, task.support)
            (grad,) = torch.autograd.grad(inner, end, create_graph=rule is FULL)
            end = end - 0.05 * grad
        if rule is REPTILE:
            total = total + 0.5 * (leaf - end.detach()).square().sum()
        else:
            total = total + loss({"w": end}, task.query)
    (slope,) = torch.autograd.grad(total / 2, leaf)
    same(state.parameters["start"]["w"], start - 0.1 * slope)


@pytest.mark.equation(6)
def test_an_associative_memory_is_the_best_map_from_keys_to_values():
    weight, keys, values = rand(4, 3), rand(9, 3), rand(9, 4)
    problem = sgd_problem(
        "memory",
        {"M": weight},
        lambda own, pair: l2.loss(Matrix(own["M"]), *pair).sum(),
        rate=math.inf,
        solver=minimise(),
    )
    state, _ = NestedSystem([problem]).run([(keys, values)])
    best = torch.linalg.lstsq(keys, values).solution.mT
    torch.testing.assert_close(state.parameters["memory"]["M"].detach(), best, rtol=0, atol=1e-7)


def delta(parameters, contexts, gates):
    """The exact minimiser of `|M k - v|^2 / 2 + |M - M_t|^2 / (2 eta)`, by Sherman-Morrison."""
    ((keys, values),) = contexts
    weight, rate = parameters["M"], gates.rate / (1 + gates.rate * keys.square().sum())
    return {"M": weight + rate * (values - keys @ weight.mT).mT @ keys}


@pytest.mark.equation(98, 99)
@pytest.mark.parametrize("solver", [minimise(), solution(delta)], ids=["search", "closed form"])
def test_a_level_may_solve_its_problem_instead_of_stepping(solver):
    """Not linearised: for one pair and least squares the argmin is the delta rule."""
    weight, item = rand(4, 3), (rand(1, 3), rand(1, 4))

    def loss(own, pair):
        return l2.loss(Matrix(own["M"]), *pair).sum()

    problem = sgd_problem("memory", {"M": weight}, loss, rate=0.7, solver=solver)
    state, _ = NestedSystem([problem]).run([item])
    expected = argmin(lambda m: loss({"M": m}, item) + proximity(m, weight, 0.7), weight)
    torch.testing.assert_close(
        state.parameters["memory"]["M"].detach(), expected, rtol=0, atol=1e-9
    )


@pytest.mark.equation(94, 95, 96, 97)
def test_a_hope_block_is_a_nested_system():
    """Five self-modifying memories inside, a chain of MLPs outside; read before each write."""
    config = configure(
        SelfModifyingConfig, width=6, heads=2, chunk=1, chunk_others=1, residual=False
    )
    mixer = SelfModifying(config)
    levels = [Level(name="fast", chunk=1), Level(name="slow", chunk=2)]
    block, x = Block(mixer, Chain(6, 5, levels)).double(), rand(B, T, 6)
    outputs = []

    def record(y, target):
        outputs.append(y)
        return y.sum()

    problems = hope_block(block, record, batch=B, length=T, rate=0.0, chunks=(1, 2))
    tokens = [Token(x[:, t], x[:, t]) for t in range(T)]
    NestedSystem(problems).run(tokens)
    same(torch.stack(outputs[:T], 1), block(x)[0])
