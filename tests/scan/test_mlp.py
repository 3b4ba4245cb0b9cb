"""The two-layer scan: fast against naive, naive against autograd, cut anywhere, bounded."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestling.activations import gelu, linear, relu, silu, tanh
from nestling.objectives import dot, l2
from nestling.scan import MLPState, mlp_naive, scan_mlp


class Case(NamedTuple):
    """Random inputs of the scan, in its order."""

    w1: Tensor
    w2: Tensor
    x: Tensor
    v: Tensor
    rate: Tensor
    retain: Tensor
    queries: Tensor
    momentum: Tensor


def case(
    lead: tuple[int, ...] = (2,), tokens: int = 11, width: int = 3, hidden: int = 5,
    dtype: torch.dtype = torch.float64, scale: float = 0.5,
) -> Case:  # fmt: skip
    normal = lambda *shape: scale * torch.randn(*lead, *shape, dtype=dtype)  # noqa: E731
    uniform = lambda: torch.rand(*lead, tokens, dtype=dtype)  # noqa: E731
    inputs = [normal(width, hidden), normal(hidden, width)]
    inputs += [normal(tokens, width), normal(tokens, width), uniform(), uniform()]
    inputs += [normal(tokens, width), uniform()]
    return Case(*(tensor.requires_grad_() for tensor in inputs))


def run(function: Any, c: Case, momentum: bool = False, **options: Any) -> list[Tensor]:
    """Reads, end weights, and the gradients of a random function of them."""
    queries = c.queries if options.pop("reads", True) else None
    theta = c.momentum if momentum else None
    y, state = function(
        MLPState(c.w1, c.w2), c.x, c.v, c.rate, c.retain, queries, momentum=theta, **options
    )
    out = [state.w1, state.w2] + ([y] if y is not None else [])
    torch.manual_seed(1)
    weigh = [torch.randn(part.shape, dtype=torch.float64).to(part) for part in out]
    loss = torch.stack([(a * b).sum() for a, b in zip(out, weigh, strict=True)]).sum()
    used = c[: 6 + (queries is not None)] + ((c.momentum,) if momentum else ())
    return out + list(torch.autograd.grad(loss, used, materialize_grads=True))


def close(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        scale = b.abs().max().clamp_min(1e-3) if b.numel() else 1.0
        torch.testing.assert_close(a / scale, b / scale, rtol=0, atol=tolerance, msg=f"part {i}")


VARIANTS = st.fixed_dictionaries(
    {
        "objective": st.sampled_from([l2, dot]),
        "erase": st.booleans(),
        "read": st.sampled_from(["after", "before"]),
        "clip": st.sampled_from([None, 0.4]),
        "bound_inputs": st.booleans(),
        "sigma": st.sampled_from([silu, gelu, tanh, relu, linear]),
        "recompute": st.booleans(),
        "momentum": st.booleans(),
        "reads": st.booleans(),
        "chunk": st.integers(1, 9),
    }
)


@settings(max_examples=150)
@given(
    options=VARIANTS,
    lead=st.sampled_from([(), (1,), (2, 3)]),
    tokens=st.integers(0, 13),
    width=st.integers(1, 4),
    hidden=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_fast_equals_naive(options, lead, tokens, width, hidden, seed):
    torch.manual_seed(seed)
    c = case(lead, tokens, width, hidden)
    close(run(scan_mlp, c, **options), run(mlp_naive, c, **options), 1e-10)


@pytest.mark.parametrize("objective", [l2, dot])
def test_float32_at_real_size(objective):
    c = case((2,), 150, 16, 32, torch.float32, scale=0.2)
    wide = Case(*(part.detach().double().requires_grad_() for part in c))
    options: dict[str, Any] = {"objective": objective, "clip": 1.0}
    close([p.double() for p in run(scan_mlp, c, **options)], run(scan_mlp, wide, **options), 1e-5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("objective", "erase", "clip"), [(l2, True, 0.4), (dot, False, None)])
def test_gradcheck(objective, erase, clip, recompute):
    c = case((1,), 5, 2, 3)
    options: dict[str, Any] = {"objective": objective, "erase": erase, "clip": clip, "chunk": 2}

    def function(w1: Tensor, w2: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        y, state = scan_mlp(MLPState(w1, w2), *inputs, recompute=recompute, check=False, **options)
        return y, state.w1, state.w2

    assert torch.autograd.gradcheck(function, c[:7])


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("function", [scan_mlp, mlp_naive])
def test_split_anywhere(function, momentum, erase):
    c = case(tokens=13)
    theta = c.momentum if momentum else None
    how: dict[str, Any] = {"chunk": 4, "clip": 0.7, "erase": erase}
    whole, end = function(MLPState(c.w1, c.w2), *c[2:6], c.queries, momentum=theta, **how)
    for cuts in ([0, 1, 13], [0, 3, 4, 5, 13], [0, 6, 7, 12, 13], list(range(14))):
        state, reads = MLPState(c.w1, c.w2), []
        for a, b in itertools.pairwise(cuts):
            part = [t[:, a:b] for t in (c.x, c.v, c.rate, c.retain, c.queries)]
            gate = theta[:, a:b] if theta is not None else None
            y, state = function(state, *part, momentum=gate, **how)
            reads.append(y)
        assert state.position == 13
        assert (state.velocity1 is None) == (not momentum)
        ours = [t for t in (torch.cat(reads, 1), *state[:6]) if t is not None]
        theirs = [t for t in (whole, *end[:6]) if t is not None]
        close(ours, theirs, 1e-12)
        weights = torch.autograd.grad(ours[0].square().sum(), c.w1, retain_graph=True)[0]
        expected = torch.autograd.grad(theirs[0].square().sum(), c.w1, retain_graph=True)[0]
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("objective", [l2, dot])
def test_naive_online_is_autograd_step(objective):
    """One token at chunk 1: retain W - rate (grad + W k k^T), the gradient by autograd."""
    c = case((), 1)
    _, end = mlp_naive(
        MLPState(c.w1, c.w2), *c[2:6], objective=objective, chunk=1, bound_inputs=False
    )
    h = torch.nn.functional.silu(c.x @ c.w2.mT)
    prediction = c.x + h @ c.w1.mT
    loss = objective.measure(prediction, c.v).sum()
    grads = torch.autograd.grad(loss, (c.w1, c.w2), retain_graph=True)
    for new, old, grad, key in zip(end[:2], c[:2], grads, (h, c.x), strict=True):
        erased = old @ key.mT @ key
        torch.testing.assert_close(new, c.retain * old - c.rate * (grad + erased))


def test_identity_and_zero_keys():
    c = case(tokens=9)
    zero = torch.zeros_like(c.rate)
    y, end = scan_mlp(MLPState(c.w1, c.w2), c.x, c.v, zero, zero + 1, c.queries, chunk=4)
    assert torch.equal(end.w1, c.w1)
    assert torch.equal(end.w2, c.w2)
    torch.testing.assert_close(y, c.queries + silu(c.queries @ c.w2.mT) @ c.w1.mT)
    nothing = torch.zeros_like(c.x)
    out = run(scan_mlp, c._replace(x=nothing.requires_grad_(), queries=c.queries), clip=1.0)
    assert all(part.isfinite().all() for part in out)


def test_retain_of_zero_has_exact_gradients():
    c = case(tokens=7)
    retain = c.retain.detach().clone()
    retain[:, 2:4] = 0.0
    retain[:, 5] = 1e-4
    c = c._replace(retain=retain.requires_grad_())
    close(run(scan_mlp, c, chunk=5), run(mlp_naive, c, chunk=5), 1e-12)


def test_leading_dimensions_are_independent():
    c = case((2, 3), 9)
    y, end = scan_mlp(MLPState(c.w1, c.w2), *c[2:6], c.queries, chunk=4)
    one = Case(*(part[1, 2] for part in c))
    y1, end1 = scan_mlp(MLPState(one.w1, one.w2), *one[2:6], one.queries, chunk=4)
    torch.testing.assert_close(y[1, 2], y1)
    torch.testing.assert_close(end.w1[1, 2], end1.w1)


@pytest.mark.parametrize(("factor", "objective"), [(1.0, l2), (1.0, dot), (2.0, l2)])
def test_bound_under_adversarial_stream(factor, objective):
    """deviation 8: rows stay bounded for any stream when |x| <= 1, errors clipped, retain <= a."""
    a, c, width, tokens = 0.9, 1.0, 4, 400
    w1, w2 = torch.randn(2, 3, width, 8, dtype=torch.float64)
    state = MLPState(w1, w2.mT.contiguous())
    rate = torch.full((3, 1), factor * a, dtype=torch.float64)
    limit = a * c / (1 - a**2) ** 0.5 if factor == 1.0 else 2 * a * c / (1 - a)
    limits = [w.norm(dim=-1).clamp_min(limit) for w in state[:2]]
    for _ in range(tokens):
        _, _, right = torch.linalg.svd(state.w2)
        x = right[:, :1]  # the direction the memory amplifies most
        v = 100.0 * torch.randn(3, 1, width, dtype=torch.float64)
        _, state = scan_mlp(
            state, x, v, rate, torch.full_like(rate, a), clip=c, chunk=7, objective=objective
        )
        for weight, most in zip(state[:2], limits, strict=True):
            assert (weight.norm(dim=-1) <= most * (1 + 1e-9)).all()


def test_low_precision_reads_keep_their_dtype():
    c = Case(*(part.detach().bfloat16() for part in case(tokens=6)))
    y, end = scan_mlp(MLPState(c.w1, c.w2), *c[2:6], c.queries, chunk=4)
    assert y.dtype == torch.bfloat16
    assert end.w1.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"rate": torch.full((2, 11), -0.1, dtype=torch.float64)}, ValueError, "rate must be"),
        ({"retain": torch.full((2, 11), 1.5, dtype=torch.float64)}, ValueError, "retain must be"),
        ({"v": torch.zeros(2, 11, 4, dtype=torch.float64)}, ValueError, "v must have shape"),
        ({"x": torch.zeros(2, 11, 3, dtype=torch.int64)}, TypeError, "x must be a floating"),
        ({"erase": "dgd"}, TypeError, "erase must be True .* got .dgd."),
        ({"objective": "l2"}, ValueError, "objective must be"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1"),
        ({"clip": 0.0}, ValueError, "clip must be a positive"),
        ({"position": 3}, ValueError, "lies inside a chunk"),
        ({"w1": torch.zeros(2, 3, 6, dtype=torch.float64)}, ValueError, "state.w2 must have shape"),
    ],
)
def test_bad_input_is_named(change, error, words):
    c = case()
    state = MLPState(change.pop("w1", c.w1), c.w2, position=change.pop("position", 0))
    names = ("x", "v", "rate", "retain", "queries")
    inputs = [change.pop(name, getattr(c, name)) for name in names]
    with pytest.raises(error, match=words):
        scan_mlp(state, *inputs, **change)
