"""Section 5: a sequence model is a memory and the rule that writes it (Eq. 14-18, 61-69)."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from nestling.objectives import Matrix, dot, l2, lp, oja
from nestling.paper.exhibits.gd import argmin
from nestling.paper.exhibits.sequence import (
    Context,
    WindowState,
    adatransformer,
    delta_net,
    hebbian,
    kernel_loss,
    linear_attention_proximal,
    oja_net,
    omega,
    omega_step,
    project_context,
    softmax_attention,
    write_and_read,
)
from nestling.rules.core import Gates, Write, apply
from nestling.scan import scan_naive

T, DI, DO = 7, 3, 4


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def context(*batch, outputs=DO):
    return Context(double(*batch, T, DI), double(*batch, T, outputs), double(*batch, T, DI))


def scanned(memory, flow, rate=1.0, retain=1.0, erase=False):
    """The same recurrence by the scan kernel's reference."""
    gate = torch.ones(*flow.keys.shape[:-1], dtype=torch.float64)
    return scan_naive(memory, *flow[:2], rate * gate, retain * gate, flow.queries, erase=erase)


SQUARE = pytest.mark.parametrize("outputs", [DI, DO], ids=["square", "oblong"])
"""With a square memory an exchange of keys and values changes numbers, not shapes."""


@pytest.mark.equation(14, 15, 16, 17, 18, 61)
@SQUARE
def test_linear_attention_is_descent_on_a_dot_product_with_rate_one(outputs):
    x, w_k, w_v, w_q = double(T, 5), double(DI, 5), double(outputs, 5), double(DI, 5)
    flow = project_context(x, w_k, w_v, w_q)
    for t in range(T):
        close(flow.keys[t], w_k @ x[t])
        close(flow.values[t], w_v @ x[t])
        close(flow.queries[t], w_q @ x[t])
    start = torch.zeros(outputs, DI, dtype=torch.float64)
    reads, memory = write_and_read(hebbian, start, flow)
    scores = torch.tril(flow.queries @ flow.keys.mT)  # linear attention as everyone writes it
    close(reads, scores @ flow.values)
    solved = start
    for k, v in zip(flow.keys, flow.values, strict=True):
        solved = linear_attention_proximal(solved, k, v)
    close(solved, memory)
    close(memory, flow.values.mT @ flow.keys)


@pytest.mark.equation(62)
def test_softmax_attention_is_the_nadaraya_watson_answer_of_a_memory_of_all_pairs():
    flow = Context(double(2, T, DI), double(2, T, DO), double(2, T, DI))
    answers = softmax_attention(flow)
    keys, values, queries = flow
    close(answers, functional.scaled_dot_product_attention(queries, keys, values, is_causal=True))
    for t in range(T):
        pairs = keys[0, : t + 1], values[0, : t + 1]
        start = torch.zeros(DO, dtype=torch.float64)
        solved = argmin(lambda m: kernel_loss(m, queries[0, t], *pairs), start)  # noqa: B023
        close(answers[0, t], solved)


@pytest.mark.equation(62, 63)
@pytest.mark.parametrize("window", [1, 3, T, T + 2])
def test_a_sliding_window_is_the_same_over_the_last_pairs(window):
    flow = context()
    answers = softmax_attention(flow, window=window)
    for t in range(T):
        first = max(0, t + 1 - window)
        keys, values, query = flow.keys[first : t + 1], flow.values[first : t + 1], flow.queries[t]
        weights = torch.softmax(keys @ query / math.sqrt(DI), 0)
        close(answers[t], weights @ values)
        start = torch.zeros(DO, dtype=torch.float64)
        close(answers[t], argmin(lambda m: kernel_loss(m, query, keys, values), start))  # noqa: B023


def test_a_window_that_sees_nothing_is_refused_and_an_empty_context_is_not():
    with pytest.raises(ValueError, match="window must be at least 1, or None for all; got 0"):
        softmax_attention(context(), window=0)
    start, empty = double(DO, DI), Context(double(0, DI), double(0, DO), double(0, DI))
    reads, memory = write_and_read(hebbian, start, empty)
    assert reads.shape == (0, DO)
    assert memory is start


@pytest.mark.equation(64)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_hebbian_memory_with_decay_is_attention_that_fades(batch):
    flow, retain = context(*batch), 0.8
    start = torch.zeros(*batch, DO, DI, dtype=torch.float64)
    reads, memory = write_and_read(hebbian, start, flow, retain=retain)
    age = torch.arange(T)[:, None] - torch.arange(T)
    fade = torch.where(age >= 0, retain ** age.clamp(min=0).double(), 0.0)
    close(reads, (flow.queries @ flow.keys.mT * fade) @ flow.values)  # RetNet's parallel form
    for ours, kernel in zip((reads, memory), scanned(start, flow, 1.0, retain), strict=True):
        close(ours, kernel)


@pytest.mark.equation(65)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_delta_net_descends_the_l2_loss_and_takes_out_what_it_replaces(batch):
    flow, rate = context(*batch), 0.4
    start = double(*batch, DO, DI)
    reads, memory = write_and_read(delta_net, start, flow, rate=rate)
    expected = start
    for t in range(T):
        k, v = flow.keys[..., t, :, None], flow.values[..., t, :, None]
        eye = torch.eye(DI, dtype=torch.float64)
        leaf = expected.clone().requires_grad_()
        (grad,) = torch.autograd.grad(0.5 * (leaf @ k - v).square().sum(), leaf)
        expected = expected @ (eye - rate * k @ k.mT) + rate * v @ k.mT
        close(expected, leaf.detach() - rate * grad)
    close(memory, expected)
    for ours, kernel in zip((reads, memory), scanned(start, flow, rate, erase=True), strict=True):
        close(ours, kernel)
    unit = functional.normalize(flow.keys, dim=-1)
    last = Context(unit, flow.values, unit)
    close(
        write_and_read(delta_net, start, last)[0], flow.values
    )  # a unit key recalls its value exactly


@pytest.mark.equation(66, 67)
@SQUARE
def test_oja_net_descends_oja_s_objective(outputs):
    flow, rate, retain = context(outputs=outputs), 0.1, 0.95
    reads, memory = write_and_read(oja_net, double(outputs, DI), flow, rate=rate, retain=retain)
    assert reads.shape == (T, outputs)
    memory = start = double(outputs, DI)
    for k, v in zip(flow.keys, flow.values, strict=True):
        leaf = memory.clone().requires_grad_()
        printed = -2.0 * (leaf @ k) @ v + (leaf.mT @ v).square().sum()
        close(2.0 * oja.loss(Matrix(leaf), k[None], v[None])[0], printed)
        (grad,) = torch.autograd.grad(printed, leaf)
        memory = retain * memory + rate * torch.outer(v, k - memory.mT @ v)
        close(memory, retain * leaf.detach() - rate / 2 * grad)
    close(write_and_read(oja_net, start, flow, rate=rate, retain=retain)[1], memory)


@pytest.mark.equation(66, 67)
def test_oja_s_rule_finds_the_first_principal_direction():
    spread = torch.tensor([3.0, 1.0, 0.5, 0.2], dtype=torch.float64)
    basis, _ = torch.linalg.qr(double(4, 4))
    keys = double(4000, 4) * spread @ basis.mT
    memory = 0.1 * double(1, 4)
    for k in keys.unbind():  # the memory's own answer is the value: Oja's neuron
        v = (memory @ k)[None]
        memory, _ = apply(oja_net, memory, Write(memory, k[None], v), (), Gates(0.005))
    assert abs((memory[0] @ basis[:, 0]).item()) > 0.99
    assert 0.9 < memory.norm() < 1.1  # no weight decay, and yet bounded


@pytest.mark.equation(68)
@pytest.mark.parametrize("objective", [dot, l2, lp(3.0), oja], ids=["dot", "l2", "l3", "oja"])
@pytest.mark.parametrize("window", [1, 3, T + 2])
def test_the_omega_rule_descends_the_sum_over_a_window(window, objective):
    flow, rate, retain = context(), 0.05, 0.9
    rule = omega(objective, window=window)
    memory = expected = 0.3 * double(DO, DI)
    state = rule.init(memory)
    for t in range(T):
        k, v = flow.keys[t : t + 1], flow.values[t : t + 1]
        gates = Gates(rate, retain, t + 1)
        memory, state = apply(rule, memory, Write(-v.mT @ k, k, v), state, gates)
        first = max(0, t + 1 - window)
        past = WindowState(flow.keys[first : t + 1], flow.values[first : t + 1])
        leaf = expected.clone().requires_grad_()
        (grad,) = torch.autograd.grad(objective.loss(Matrix(leaf), *past).sum(), leaf)
        stepped = omega_step(expected, past, objective, rate=rate, retain=retain)
        expected = retain * expected - rate * grad
        close(stepped, expected)
        close(memory, expected)


@pytest.mark.equation(65, 68)
def test_a_window_of_one_is_the_rule_itself():
    flow, start = context(2), double(2, DO, DI)
    windowed = write_and_read(omega(l2, window=1), start, flow, rate=0.3)
    for ours, plain in zip(windowed, write_and_read(delta_net, start, flow, rate=0.3), strict=True):
        close(ours, plain)


@pytest.mark.equation(69)
def test_an_adatransformer_block_writes_its_memory_in_context():
    flow, again = context(), [double(DI, DO), double(5, DO), double(DI, DO)]
    start = double(5, DI)
    ours = adatransformer(flow, lambda y: project_context(y, *again), start)
    attended = functional.scaled_dot_product_attention(
        flow.queries[None], flow.keys[None], flow.values[None], is_causal=True
    )[0]
    keys, values, queries = (attended @ w.mT for w in again)
    memory = start
    for t in range(T):
        memory = memory + torch.outer(values[t], keys[t])
        close(ours[t], memory @ queries[t])
