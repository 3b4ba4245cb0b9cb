"""The Triton self-modifying scan in the interpreter: outputs, weights and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nestling.memories import SelfModifying, SelfModifyingConfig
from nestling.objectives import l2
from nestling.scan import any_order, scan_self_modifying
from nestling.scan.self_modifying import triton as kernels
from nestling.scan.self_modifying.api import choose
from nestling.scan.self_modifying.rule import SelfRule, Weights
from tests.kernels.cases import ALL, SHAPES, close, outcome, reference, self_case
from tests.kernels.interpreter import hurry

hurry()
MEMORIES = ("k", "v", "eta", "alpha")


def compare(rule: SelfRule, tokens: int, d: int, position: int = 0, **options: Any) -> None:
    case = self_case(rule, tokens, d, **options)
    expected = reference(rule, case, position)
    found = outcome(kernels.scan_triton, rule, case, position)
    for name, value in expected.items():
        close(found[name], value, name)


RULES: dict[str, tuple[SelfRule, int, int, dict[str, Any]]] = {
    # rule, tokens, position, options: ragged ends, starts in mid-chunk
    "Hope's own": (SelfRule(chunk=16, chunk_others=16), 21, 0, {}),
    "as printed": (SelfRule(chunk=16, chunk_others=16), 19, 3, {"residual": False}),
    "rates up to 2": (SelfRule(chunk=16, chunk_others=16, rate_max=2.0), 20, 5, {}),
    "equal keys": (SelfRule(chunk=16, chunk_others=16, rate_max=2.0), 16, 0, {"equal_keys": True}),
    "l2, clipped": (
        SelfRule(chunk=16, chunk_others=16, objective=l2, clip=0.5), 18, 2, {},
    ),
    "adaptive q, heads that add": (
        SelfRule(adaptive=(*MEMORIES, "q"), chunk=16, chunk_others=16), 18, 1,
        {"batch": 2, "adding": True},
    ),
    "some static": (
        SelfRule(adaptive=("v", "alpha"), objective=l2, chunk=16, chunk_others=16), 18, 1,
        {"residual": False},
    ),
    "all static": (SelfRule(adaptive=(), own_values=False, chunk=16, chunk_others=16), 18, 1, {}),
    "shared values, no erasing": (
        SelfRule(own_values=False, erase=False, chunk=16, chunk_others=16), 18, 1, {},
    ),
    "steered": (
        SelfRule(adaptive=(), tied=True, chunk=16, chunk_others=16), 20, 5,
        {"batch": 2, "adding": True},
    ),
    "slow others": (SelfRule(chunk=8, chunk_others=16), 20, 5, {}),
    "slow memory": (SelfRule(chunk=16, chunk_others=8, objective=l2), 20, 5, {}),
    "tied retention": (SelfRule(chunk=16, chunk_others=16, tied=True), 20, 5, {}),
    "gates that shut": (SelfRule(chunk=16, chunk_others=16, tied=True, shut=0.4), 20, 5, {}),
    "read at the start": (SelfRule(chunk=16, chunk_others=16, read_start=True), 20, 5, {}),
    "padding": (SelfRule(chunk=8, chunk_others=16), 20, 5, {"batch": 2, "counts": (20, 6)}),
    "a width that is no power of two": (SelfRule(chunk=16, chunk_others=16), 18, 0, {"d": 12}),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_every_option_equals_the_naive_form(name: str) -> None:
    rule, tokens, position, options = RULES[name]
    options = dict(options)
    compare(rule, tokens, options.pop("d", 16), position, **options)


@pytest.mark.parametrize(("d", "chunk"), SHAPES if ALL else [(32, 32), (64, 16)])
def test_widths_and_chunks(d: int, chunk: int) -> None:
    rule = SelfRule(adaptive=("k", "alpha"), chunk=chunk, chunk_others=chunk)
    compare(rule, chunk + 3, d, 1)


def test_chunks_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a chunk of 64 tokens is two tiles; a window without gradients is shorter still."""
    monkeypatch.setattr(kernels, "longest", lambda: 16)
    rule = SelfRule(adaptive=("k", "alpha"), chunk=24, chunk_others=48)
    compare(rule, 52, 16, 7)
    monkeypatch.setattr(kernels, "WINDOW", 20)
    case = self_case(rule, 52, 16)
    with torch.no_grad():
        found = kernels.scan_triton(rule, *case, 7)
        expected = scan_self_modifying(rule, *case, 7, backend="chunk")
    for left, right in zip(found, expected, strict=True):
        left, right = (part.first if isinstance(part, Weights) else part for part in (left, right))
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_the_backward_pass_computes_again_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TOGETHER", 1)  # one segment at a time
    compare(SelfRule(adaptive=("k", "alpha"), chunk=16, chunk_others=16), 35, 16)


def test_bf16_inputs() -> None:
    rule = SelfRule(adaptive=("k", "alpha"), chunk=16, chunk_others=16)
    inputs, weights, start = self_case(rule, 18, 16)
    names = ("x", "k", "v", "q", "gates", "readout", "bias")
    half = inputs._replace(**{name: getattr(inputs, name).bfloat16() for name in names})
    full = half._replace(**{name: getattr(half, name).float() for name in names})
    found = kernels.scan_triton(rule, half, weights, start, 0)
    expected = kernels.scan_triton(rule, full, weights, start, 0)
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found[0], expected[0].bfloat16())
    torch.testing.assert_close(found[1].first, expected[1].first)


def test_a_memory_asks_for_it() -> None:
    """From the configuration to the scan, with padding in front: the same as the chunked form."""
    results = []
    for backend in ("triton", "chunk"):
        torch.manual_seed(0)
        config = SelfModifyingConfig(width=16, heads=1, chunk=8, chunk_others=8, backend=backend)
        memory = SelfModifying(config)
        x = torch.randn(2, 11, 16)
        mask = torch.ones(2, 11, dtype=torch.bool)
        mask[0, :3] = False
        y, state = memory(x, mask=mask)
        memory.zero_grad()
        (y.square().sum() + state.weights.first.sum()).backward()
        results.append([y, state.weights.first, *(p.grad for p in memory.parameters())])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_which_back_end() -> None:
    assert choose("auto", any_order=False, refusal=None) == "triton"
    assert choose("auto", any_order=False, refusal="not here") == "chunk"
    assert choose("auto", any_order=True, refusal=None) == "chunk"
    assert choose("chunk", any_order=False, refusal=None) == "chunk"
    with pytest.raises(ValueError, match="cannot run this scan: not here; use backend='chunk'"):
        choose("triton", any_order=False, refusal="not here")


def test_what_it_refuses() -> None:
    rule = SelfRule(chunk=16, chunk_others=16)
    inputs, weights, start = self_case(rule, 4, 16)
    asked = {"backend": "triton"}
    with pytest.raises(ValueError, match="matrix memories without momentum only"):
        scan_self_modifying(rule, inputs, Weights(weights.first, weights.first), start, 0, **asked)
    with pytest.raises(ValueError, match="at the same position"):
        scan_self_modifying(rule, inputs, weights, start, torch.zeros(1), **asked)
    double = inputs._replace(x=inputs.x.double())
    with pytest.raises(ValueError, match=r"an input is torch\.float64"):
        scan_self_modifying(rule, double, weights, start, 0, **asked)
    with pytest.raises(ValueError, match=r"once; inside any_order\(\) use 'chunk'"), any_order():
        scan_self_modifying(rule, inputs, weights, start, 0, **asked)
    with pytest.raises(ValueError, match="backend must be one of auto, chunk, triton"):
        SelfModifyingConfig(width=16, heads=1, backend="cuda")


def test_second_derivatives_are_refused() -> None:
    rule = SelfRule(adaptive=(), own_values=False, chunk=16, chunk_others=16)
    inputs, weights, start = self_case(rule, 4, 16)
    y, _, _ = kernels.scan_triton(
        rule, inputs._replace(x=inputs.x.requires_grad_()), weights, start, 0
    )
    (grad,) = torch.autograd.grad(y.sum(), inputs.x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        grad.sum().backward()


def test_compiled() -> None:
    """One node of a compiled graph."""
    rule = SelfRule(adaptive=("k",), chunk=16, chunk_others=16)
    inputs, weights, start = self_case(rule, 18, 16)

    def run(x: torch.Tensor) -> torch.Tensor:
        y, _, _ = scan_self_modifying(
            rule, inputs._replace(x=x), weights, start, 0, backend="triton"
        )
        return y.square().sum()

    expected, found = run(inputs.x), torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(found(inputs.x), expected)
