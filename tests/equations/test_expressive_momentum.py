"""Delta, deep, feature-map and nonlinear momentum and their test surface (Eq. 45, 48-53)."""

from __future__ import annotations

import pytest
import torch

from nestling.paper.exhibits.gd import argmin, proximity
from nestling.paper.exhibits.tasks import SURFACE_START, OrthogonalTasks, surface
from nestling.rules import Gates, Write, apply, newton_schulz
from nestling.rules.deep_momentum import DeepMomentumState, deep_momentum, deep_momentum_loss
from nestling.rules.delta_momentum import DeltaMomentumState, delta_momentum, delta_momentum_literal
from nestling.rules.momentum import feature_momentum, momentum, nonlinear, polynomial, power, squash
from nestling.rules.muon import muon


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.equation(45)
def test_orthogonal_tasks():
    tasks = OrthogonalTasks(tasks=3, width=2, outputs=2, noise=0.0)
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(tasks.outputs, tasks.inputs, requires_grad=True)
    slopes = [torch.autograd.grad(tasks.loss(weight, i), weight)[0] for i in range(3)]
    for i in range(3):
        for j in range(i):
            assert (slopes[i] @ slopes[j].mT).abs().max() < 1e-5
        x, y = tasks.sample(i, 20000, generator)
        sampled = (x @ weight.mT - y).square().sum(-1).mean()
        assert abs(sampled / tasks.loss(weight, i) - 1) < 0.05


@pytest.mark.equation(49)
def test_literal_delta_momentum():
    weight, memory, g, value = draw(3, 5), draw(3, 5), draw(3, 5), draw(3, 3)
    alpha, eta = 0.9, 0.1
    rule = delta_momentum_literal(decay=alpha, value=value)
    new, state = apply(rule, weight, Write(g), DeltaMomentumState(memory / -eta), Gates(rate=eta))
    expected = memory @ (alpha * torch.eye(5, dtype=torch.float64) - g.mT @ g) - eta * value @ g
    torch.testing.assert_close(-eta * state.memory, expected)
    torch.testing.assert_close(new, weight + expected)


@pytest.mark.equation(48, 49)
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (1, 4)])
def test_delta_momentum_solves_its_objective(shape):
    memory, g = draw(*shape), 10 * draw(*shape)
    value, alpha, eta = draw(shape[0], shape[0]), 0.9, 2.0
    rule = delta_momentum(decay=alpha, rate=eta, value=value)
    _, state = rule.step(Write(g), DeltaMomentumState(memory), memory, Gates())
    key, goal = g / g.norm(), g.norm() * value

    def loss(m):
        return (m @ key.mT - goal).square().sum() / 2 + proximity(m, alpha * memory, eta)

    torch.testing.assert_close(state.memory, argmin(loss, memory))


@pytest.mark.equation(48, 49)
def test_delta_momentum_on_one_row_and_on_entries():
    memory, g = draw(1, 4), draw(1, 4)
    _, state = delta_momentum(rate=0.5).step(Write(g), DeltaMomentumState(memory), memory, Gates())
    key, kept = g / g.norm(), 0.9 * memory
    expected = kept + 0.5 / 1.5 * (g.norm() - (kept * key).sum()) * key
    torch.testing.assert_close(state.memory, expected)

    _, state = delta_momentum(rate=0.5).step(
        Write(g[0]), DeltaMomentumState(memory[0]), memory[0], Gates()
    )
    size = g.square().mean().sqrt()
    kept, key = kept[0], g[0] / size

    def loss(m):
        return (m * key - size).square().sum() / 2 + proximity(m, kept, 0.5)

    torch.testing.assert_close(state.memory, argmin(loss, kept))


@pytest.mark.equation(50)
def test_deep_momentum_trains_its_memory_and_descends():
    rule = deep_momentum(hidden=3, decay=0.9, rate=0.2, gain=0.8)
    g = draw(2, 6, 5)
    state = DeepMomentumState(draw(2, 3, 5), draw(2, 5, 3))
    out, after = rule.step(Write(g), state, g, Gates())
    rows = g / g.norm(dim=-1, keepdim=True)
    inner, outer = (t.clone().requires_grad_(True) for t in state)
    loss = deep_momentum_loss(DeepMomentumState(inner, outer), rows).sum()
    slopes = torch.autograd.grad(loss, (inner, outer))
    torch.testing.assert_close(after.inner, 0.9 * state.inner - 0.2 * slopes[0])
    torch.testing.assert_close(after.outer, 0.9 * state.outer - 0.2 * slopes[1])
    along = (out.grad * g).sum(-1) / g.square().sum(-1)
    assert along.min() >= 0.2
    answer = torch.nn.functional.silu(rows @ after.inner.mT) @ after.outer.mT
    answer = answer / answer.norm(dim=-1, keepdim=True).clamp(min=1.0)
    torch.testing.assert_close(out.grad, g.norm(dim=-1, keepdim=True) * (rows + 0.8 * answer))


@pytest.mark.equation(50)
def test_deep_momentum_learns_what_repeats():
    rule, seen = deep_momentum(hidden=8, decay=1.0, rate=0.3), draw(4, 6)
    state = rule.init(seen)
    rows = seen / seen.norm(dim=-1, keepdim=True)
    before = deep_momentum_loss(state, rows)
    for _ in range(200):
        _, state = rule.step(Write(seen), state, seen, Gates())
    assert deep_momentum_loss(state, rows) < 0.1 * before


@pytest.mark.equation(51)
def test_feature_momentum():
    g, h = draw(3, 4), draw(3, 4)
    rule = feature_momentum(polynomial(1.0, 0.5), decay=0.8)
    _, state = rule.step(Write(g), rule.init(g), g, Gates())
    out, _ = rule.step(Write(h), state, g, Gates(step=2))

    def phi(grad):
        size = grad.square().mean().sqrt()
        return grad + 0.5 * grad**3 / size**2

    torch.testing.assert_close(out.grad, 0.8 * phi(g) + phi(h))
    torch.testing.assert_close(power(1.0)(g), g)
    assert (power(0.5)(g).sign() == g.sign()).all()


@pytest.mark.equation(52)
def test_newton_schulz_on_the_output_of_momentum_is_muon():
    g = draw(2, 3, 4)
    weight = torch.zeros_like(g[0])
    ours = nonlinear(momentum(0.95, nesterov=True), newton_schulz)
    theirs = muon(scale="none")
    one, two = ours.init(weight), theirs.init(weight)
    for grad in g:
        out, one = ours.step(Write(grad), one, weight, Gates())
        expected, two = theirs.step(Write(grad), two, weight, Gates())
        assert torch.equal(out.grad, expected.grad)


@pytest.mark.equation(52)
def test_the_step_is_a_nonlinearity_of_what_the_memory_answers():
    g = draw(3, 3, 4)
    strength, decay = 0.7, 0.9
    rule = nonlinear(momentum(decay), squash(strength))
    state, total = rule.init(g[0]), torch.zeros_like(g[0])
    for grad in g:
        out, state = rule.step(Write(grad), state, g[0], Gates())
        total = decay * total + grad  # the memory keeps what it was told, not the bounded answer
        size = total.square().mean().sqrt()
        torch.testing.assert_close(out.grad, size * torch.tanh(total / size / strength))


@pytest.mark.equation(53)
def test_surface():
    r, theta = SURFACE_START
    k, a, w = 3.0, 0.5, 2.0
    point = torch.tensor([[r, theta], [0.0, 0.0]], dtype=torch.float64)
    values = surface(point, k=k, a=a, w=w)
    sine = torch.sin(torch.tensor(w * r, dtype=torch.float64))
    expected = r**2 + k * (r - theta + a * sine) ** 2
    torch.testing.assert_close(values[0], expected)
    assert values[1] == 0.0
