"""Properties of all classical rules: purity, batches, gradients, precision, refusals."""

from __future__ import annotations

import pytest
import torch

from nestling import rules
from nestling.objectives import dot, l2, lp, oja
from nestling.paper.exhibits.adam import adagrad_memory, adam_literal
from nestling.paper.exhibits.gd import descent
from nestling.paper.exhibits.momentum import generalised_momentum
from nestling.paper.exhibits.precondition import precondition, preconditioned_momentum
from nestling.paper.exhibits.sequence import omega
from nestling.rules.core import Gates, Write, apply
from nestling.rules.momentum import accumulate

ELEMENTWISE = {
    "momentum": rules.momentum(0.9),
    "nesterov": rules.momentum(0.9, nesterov=True),
    "adam": rules.adam(),
    "adam, literal": adam_literal(0.5, 0.5),
    "adamw": rules.adamw(),
    "amsgrad": rules.amsgrad(),
    "nadam": rules.nadam(),
    "radam": rules.radam(),
    "adagrad": rules.adagrad(),
    "second moment": rules.second_moment(0.9),
    "rmsprop": rules.rmsprop(centered=True, follow=0.9),
    "lion": rules.lion(),
    "signum": rules.signum(),
    "weight decay": rules.weight_decay(0.1),
}
MATRIX = {
    "adagrad memory": adagrad_memory(),
    "precondition": precondition(start=3.0),
    "preconditioned momentum": preconditioned_momentum(precondition(start=3.0), 0.5),
    "generalised momentum": generalised_momentum(l2, rate=0.1),
    "hebbian": descent(dot),
    "delta net": descent(l2),
    "l3": descent(lp(3.0)),
    "oja net": descent(oja),
    "omega": omega(l2, window=3),
}
ALL = {**ELEMENTWISE, **MATRIX}


def leaves(state):
    if isinstance(state, torch.Tensor):
        return [state]
    return [leaf for part in state for leaf in leaves(part)]


def writes(steps, *shape, dtype=torch.float64):
    rows, columns = shape[-2:]
    for _ in range(steps):
        x = 0.5 * torch.randn(*shape[:-2], 2, columns, dtype=dtype)
        u = 0.5 * torch.randn(*shape[:-2], 2, rows, dtype=dtype)
        yield Write(-u.mT @ x, x, u)


def run(rule, weight, stream, rate=0.05):
    state = rule.init(weight)
    for step, write in enumerate(stream, start=1):
        weight, state = apply(rule, weight, write, state, Gates(rate, 0.99, step))
    return weight, state


@pytest.mark.parametrize("name", ALL)
def test_a_rule_leaves_what_it_is_given_alone(name):
    rule, weight = ALL[name], torch.randn(4, 3)
    state = rule.init(weight)
    for step, write in enumerate(writes(3, 4, 3, dtype=torch.float32), start=1):
        given = [weight, *write, *leaves(state)]
        copies = [t.clone() for t in given]
        weight, state = apply(rule, weight, write, state, Gates(0.1, 1.0, step))
        assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_leading_dimensions_are_batch(name):
    rule, weight = ALL[name], torch.randn(2, 3, 4, 3, dtype=torch.float64)
    stream = list(writes(5, 2, 3, 4, 3))
    together, _ = run(rule, weight, stream)
    for i in range(2):
        for j in range(3):
            alone, _ = run(rule, weight[i, j], [Write(*(t[i, j] for t in w)) for w in stream])
            torch.testing.assert_close(together[i, j], alone)


@pytest.mark.parametrize("name", ALL)
def test_elementwise_is_declared_where_it_holds(name):
    assert ALL[name].elementwise is (name in ELEMENTWISE)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_rules_may_be_cut_anywhere(name):
    rule, weight = ELEMENTWISE[name], torch.randn(4, 3, dtype=torch.float64)
    stream = list(writes(5, 4, 3))
    whole, state = run(rule, weight, stream)
    assert all(leaf.shape == weight.shape for leaf in leaves(state))
    flat = [Write(w.grad.reshape(-1)[5:]) for w in stream]
    torch.testing.assert_close(run(rule, weight.reshape(-1)[5:], flat)[0], whole.reshape(-1)[5:])


STEPPED = ("lion", "signum", "adagrad memory")  # signs, and eigenvectors of repeated eigenvalues


@pytest.mark.parametrize("name", [n for n in ALL if n not in STEPPED])
def test_rules_can_be_learned_through(name):
    rule, weight = ALL[name], torch.randn(4, 3, dtype=torch.float64)
    stream = [Write(*(t.requires_grad_() for t in w)) for w in writes(3, 4, 3)]

    def end(start, *grads):
        parts = [grads[3 * i : 3 * i + 3] for i in range(3)]
        return run(rule, start, [Write(*part) for part in parts])[0]

    inputs = [weight.requires_grad_(), *(t for w in stream for t in w)]
    outputs = end(*inputs)
    slopes = torch.autograd.grad(outputs.sum(), inputs, allow_unused=True)
    assert slopes[0].isfinite().all()
    direction = [torch.randn_like(t) for t in inputs]
    analytic = sum((s * d).sum() for s, d in zip(slopes, direction, strict=True) if s is not None)
    step = 1e-6
    with torch.no_grad():
        ahead = end(*(t + step * d for t, d in zip(inputs, direction, strict=True))).sum()
        behind = end(*(t - step * d for t, d in zip(inputs, direction, strict=True))).sum()
    torch.testing.assert_close(analytic, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_and_shape_are_kept_and_zero_gradients_are_harmless(name, dtype):
    rule, weight = ALL[name], torch.zeros(4, 3, dtype=dtype)
    shapes = ((4, 3), (2, 3), (2, 4))
    zero = Write(*(torch.zeros(shape, dtype=dtype) for shape in shapes))
    after, state = run(rule, weight, [zero, zero])
    assert after.dtype == dtype
    assert after.shape == weight.shape
    assert after.isfinite().all()
    assert all(leaf.dtype == dtype and leaf.isfinite().all() for leaf in leaves(state))


@pytest.mark.parametrize(
    ("retain", "rate"), [(1.0, 0.3), (0.7, 1.0), (0.9, 0.1), (0.5, 0.2), (0.0, 1.0)]
)
def test_accumulate_is_one_formula_in_every_branch(retain, rate):
    memory, new = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    expected = retain * memory + rate * new
    torch.testing.assert_close(accumulate(memory, new, retain=retain, rate=rate), expected)
    gates = torch.tensor(retain, dtype=torch.float64), torch.tensor(rate, dtype=torch.float64)
    ours = accumulate(memory, new, retain=gates[0], rate=gates[1])
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", ["generalised momentum", "hebbian", "omega"])
def test_rules_that_need_pairs_say_so(name):
    rule, weight = MATRIX[name], torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"no x and u: pass Write\(grad, x, u\)"):
        rule.step(Write(weight), rule.init(weight), weight, Gates())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rules.momentum(1.5), r"decay must be in \[0, 1\]; got 1.5"),
        (lambda: rules.momentum(0.9, dampening=0.1, nesterov=True), "dampening 0, got 0.1"),
        (lambda: rules.adam(1.0), r"beta1 must be in \[0, 1\); got 1.0"),
        (lambda: rules.adamw(0.9, -0.1), r"beta2 must be in \[0, 1\); got -0.1"),
        (lambda: rules.second_moment(2.0), "decay must be in"),
        (lambda: rules.adagrad(start=-1.0), "start must be at least 0; got -1.0"),
        (lambda: adagrad_memory(0.0), "beta1 must be positive; got 0.0"),
        (lambda: precondition(rate=2.0), r"rate must be in \(0, 2\); got 2.0"),
        (lambda: precondition(floor=0.0), "floor must be positive; got 0.0"),
        (lambda: omega(window=0), "window must be at least 1; got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
