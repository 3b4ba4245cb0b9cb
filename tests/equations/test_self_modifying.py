"""Self-modifying Titans, Eq. 76-93: each stage written out with autograd beside the library."""

from __future__ import annotations

import pytest
import torch

from nestling.norm import unit
from nestling.objectives import dot, l2
from nestling.scan.self_modifying import scan_self_modifying
from nestling.scan.self_modifying.naive import errors, self_modifying_naive, step
from nestling.scan.self_modifying.rule import Inputs, SelfRule, Weights, clip

D, T = 4, 7
G = torch.Generator().manual_seed(3)


def draw(*shape):
    return torch.randn(*shape, generator=G, dtype=torch.float64)


def tokens(*static):
    given = {name: unit(draw(1, T, D)) for name in static}
    bias = torch.tensor([[-0.5, 3.0]], dtype=torch.float64)
    return Inputs(draw(1, T, D), 0.5 * draw(1, 2, D), bias, **given)


def token(inputs, t):
    return inputs._replace(
        x=inputs.x[:, t],
        **{n: getattr(inputs, n)[:, t] for n in ("k", "v", "q") if getattr(inputs, n) is not None},
    )


def gates(rule, inputs, t, eta_seen, alpha_seen):
    look, bias = inputs.readout[0], inputs.bias[0]
    least = 1e-4
    alpha = least + (rule.retain_max - least) * torch.sigmoid(look[1] @ alpha_seen + bias[1])
    return alpha * rule.rate_max * torch.sigmoid(look[0] @ eta_seen + bias[0]), alpha


def gradient(memory, objective, k, target):
    """The gradient of the objective in the memory's weight, by autograd."""
    weight = memory.clone().requires_grad_(True)
    if objective == dot:
        loss = -(weight @ k) @ target
    else:
        loss = 0.5 * (weight @ k - target).square().sum()
    return torch.autograd.grad(loss, weight)[0]


@pytest.mark.equation(76, 77, 78)
def test_stage_1_static_projections():
    """k, v, q, eta, alpha are linear in x; M_t = alpha M - eta grad L(M; k, v); y = M q."""
    rule = SelfRule(adaptive=(), own_values=False, erase=False, objective=l2, clip=100.0)
    inputs = tokens("k", "v", "q")
    memory = draw(1, 1, D, D)
    weights = Weights(memory)
    want = memory[0, 0]
    for t in range(T):
        x, k, v, q = inputs.x[0, t], inputs.k[0, t], inputs.v[0, t], inputs.q[0, t]
        y, weights = step(rule, weights, weights, token(inputs, t))
        torch.testing.assert_close(y[0], want @ q)
        eta, alpha = gates(rule, inputs, t, x, x)
        want = alpha * want - eta * gradient(want, l2, k, v)
        torch.testing.assert_close(weights.first[0, 0], want)


@pytest.mark.equation(79, 80, 81, 82)
def test_stage_2_adaptive_projections_with_shared_values():
    rule = SelfRule(own_values=False, erase=False, objective=l2, clip=100.0)
    inputs = tokens("q")
    weights = Weights(0.5 * draw(1, 5, D, D))
    want = list(weights.first[0])
    for t in range(T):
        mem, m_k, m_v, m_eta, m_alpha = want
        x = inputs.x[0, t]
        k, v = unit(m_k @ x), unit(m_v @ x)
        eta, alpha = gates(rule, inputs, t, m_eta @ x, m_alpha @ x)
        y, weights = step(rule, weights, weights, token(inputs, t))
        torch.testing.assert_close(y[0], mem @ inputs.q[0, t])
        want = [alpha * m - eta * gradient(m, l2, k, v) for m in want]
        torch.testing.assert_close(weights.first[0], torch.stack(want))


@pytest.mark.equation(83, 84, 85, 86, 87, 88)
@pytest.mark.parametrize("objective", [dot, l2], ids=["dot", "l2"])
def test_stage_3_every_memory_makes_its_own_values(objective):
    """M_b <- M_b (alpha I - eta k k^T) - eta grad L(M_b; k, M_b(v)), all at the state before t."""
    rule = SelfRule(objective=objective, clip=100.0)
    inputs = tokens("q")
    weights = Weights(0.5 * draw(1, 5, D, D))
    want = list(weights.first[0])
    eye = torch.eye(D, dtype=torch.float64)
    for t in range(T):
        mem, m_k, m_v, m_eta, m_alpha = want
        x = inputs.x[0, t]
        k, v = unit(m_k @ x), unit(m_v @ x)
        eta, alpha = gates(rule, inputs, t, m_eta @ x, m_alpha @ x)
        y, weights = step(rule, weights, weights, token(inputs, t))
        torch.testing.assert_close(y[0], mem @ inputs.q[0, t])
        want = [
            m @ (alpha * eye - eta * torch.outer(k, k))
            - eta * gradient(m, objective, k, unit(m @ v))
            for m in want
        ]
        torch.testing.assert_close(weights.first[0], torch.stack(want))


@pytest.mark.equation(89, 91, 93)
@pytest.mark.parametrize("objective", [dot, l2], ids=["dot", "l2"])
def test_two_layer_memories_learn_layer_by_layer(objective):
    """Unclipped, `error x^T` of each layer is minus the objective's gradient in its weight."""
    rule = SelfRule(objective=objective, clip=1e9)
    first, second = 0.2 * draw(1, 5, 3, D), draw(1, 5, D, 3)
    k, v = unit(draw(1, D)), unit(draw(1, D))
    at = Weights(first, second)
    for slot in range(5):
        w2, w1 = (w[0, slot].clone().requires_grad_(True) for w in (first, second))

        def memory(x, w1=w1, w2=w2):
            return x + w1 @ torch.nn.functional.silu(w2 @ x)

        target = unit(memory(v[0])).detach()
        answer = memory(k[0])
        loss = -answer @ target if objective == dot else 0.5 * (answer - target).square().sum()
        want = torch.autograd.grad(loss, (w2, w1))
        pairs = errors(rule, at, slot, k, v)
        assert pairs[1][0].norm() <= 1  # the second layer's input needs no clipping here
        for (x, u), grad in zip(pairs, want, strict=True):
            torch.testing.assert_close(torch.outer(u[0], x[0]), -grad)


@pytest.mark.equation(90)
@pytest.mark.parametrize("deep", [False, True])
def test_chunks_take_everything_at_their_start(deep):
    """Inside a chunk nothing but the linear recurrence moves; chunk 1 is Eq. 83-88."""
    inputs = tokens("q")
    first = 0.5 * draw(1, 5, D, D)
    weights = Weights(first, 0.5 * draw(1, 5, D, D) if deep else None)
    zero = torch.zeros(1, dtype=torch.int64)
    rule = SelfRule(chunk=3, chunk_others=3, objective=l2)
    at, running, want = weights, weights, []
    for t in range(T):
        at = running if t % 3 == 0 else at
        y, running = step(rule, running, at, token(inputs, t))
        want.append(y)
    for scan, position in ((self_modifying_naive, zero), (scan_self_modifying, 0)):
        y, end, start = scan(rule, inputs, weights, weights, position)
        torch.testing.assert_close(y, torch.stack(want, 1))
        torch.testing.assert_close(end.first, running.first)
        torch.testing.assert_close(start.first, at.first)
    online = SelfRule(chunk=1, chunk_others=1, objective=l2)
    running, want = weights, []
    for t in range(T):
        y, running = step(online, running, running, token(inputs, t))
        want.append(y)
    y, end, _ = scan_self_modifying(online, inputs, weights, weights, 0)
    torch.testing.assert_close(y, torch.stack(want, 1))
    torch.testing.assert_close(end.first, running.first)


@pytest.mark.equation(92, 93)
@pytest.mark.parametrize("objective", [dot, l2], ids=["dot", "l2"])
def test_matrix_memories_written_out(objective):
    """+ eta vhat k^T (deviation 3), or - eta (M k - vhat) k^T with M at the start of the chunk."""
    rule = SelfRule(objective=objective, clip=0.7, chunk=T, chunk_others=T)
    inputs = tokens("q")
    start = 0.5 * draw(1, 5, D, D)
    memory = start[0, 0]
    for t in range(T):
        x = inputs.x[0, t]
        k, v = unit(start[0, 1] @ x), unit(start[0, 2] @ x)
        eta, alpha = gates(rule, inputs, t, start[0, 3] @ x, start[0, 4] @ x)
        target = unit(start[0, 0] @ v)
        error = clip(target if objective == dot else target - start[0, 0] @ k, 0.7)
        memory = memory @ (alpha * torch.eye(D) - eta * torch.outer(k, k)) + eta * torch.outer(
            error, k
        )
    at = Weights(start)
    _, end, _ = scan_self_modifying(rule, inputs, at, at, 0)
    _, naive, _ = self_modifying_naive(rule, inputs, at, at, torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(end.first[0, 0], memory)
    torch.testing.assert_close(naive.first[0, 0], memory)
