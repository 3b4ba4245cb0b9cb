"""Newton-Schulz: the fast form against the naive one, the naive one against the SVD."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestling import machine
from nestling.rules.newton_schulz import (
    CUBIC,
    QUINTIC,
    newton_schulz,
    newton_schulz_naive,
    orthogonalise,
    quick_precision,
)

module = sys.modules["nestling.rules.newton_schulz"]  # (the package has a function of this name)
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9))
LEADING = st.sampled_from([(), (1,), (3,), (2, 3)])


@given(SHAPES, LEADING, st.integers(0, 13), st.sampled_from([CUBIC, QUINTIC]), st.integers(0, 99))
def test_fast_equals_naive_with_gradients(shape, leading, steps, coefficients, seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(*leading, *shape, dtype=torch.float64, generator=generator)
    matrix.requires_grad_(True)
    fast = newton_schulz(matrix, steps, coefficients)
    naive = newton_schulz_naive(matrix, steps, coefficients)
    torch.testing.assert_close(fast, naive, rtol=1e-9, atol=1e-9)
    probe = torch.randn(fast.shape, dtype=torch.float64, generator=generator)
    (one,) = torch.autograd.grad((fast * probe).sum(), matrix)
    (two,) = torch.autograd.grad((naive * probe).sum(), matrix)
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_cubic_converges_to_the_polar_factor():
    matrix = torch.randn(4, 6, 10, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(newton_schulz(matrix, 30, CUBIC), u @ vh)


def test_quintic_brings_singular_values_near_one():
    matrix = torch.randn(40, 60, dtype=torch.float64)
    values = torch.linalg.svdvals(newton_schulz(matrix))
    assert values.min() > 0.6
    assert values.max() < 1.25


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64), (16, 160)])
@pytest.mark.parametrize("steps", [5, 12])
@pytest.mark.parametrize("spectrum", ["flat", "steep", "low rank"])
def test_float32_stays_near_float64(shape, steps, spectrum):
    matrix = torch.randn(shape, dtype=torch.float64)
    if spectrum == "steep":
        matrix = matrix * torch.logspace(0, -6, shape[1], dtype=torch.float64)
    if spectrum == "low rank":
        matrix = matrix[:, :3] @ torch.randn(3, shape[1], dtype=torch.float64)
    matrix = matrix.float().double()
    coefficients = QUINTIC if steps == 5 else CUBIC
    exact = newton_schulz_naive(matrix, steps, coefficients)
    found = newton_schulz(matrix.float(), steps, coefficients, torch.float32)  # whatever is quicker
    error = (found.double() - exact).abs().max()
    assert error < 2e-4


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e6])
def test_scale_does_not_matter(scale):
    matrix = torch.randn(8, 20)
    torch.testing.assert_close(newton_schulz(matrix * scale), newton_schulz(matrix))


def test_zero_and_empty_matrices():
    zeros = torch.zeros(2, 3, 5)
    assert torch.equal(newton_schulz(zeros), zeros)
    mixed = torch.stack([torch.zeros(3, 5), torch.randn(3, 5)])
    assert torch.equal(newton_schulz(mixed)[0], torch.zeros(3, 5))
    assert newton_schulz(torch.zeros(0, 3, 5)).shape == (0, 3, 5)
    assert newton_schulz(torch.zeros(2, 0, 5)).shape == (2, 0, 5)


def test_half_precision_is_computed_in_float32():
    matrix = torch.randn(8, 20).bfloat16()
    out = newton_schulz(matrix)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, newton_schulz(matrix.float()).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(64, 64), (96, 64), (48, 200), (3, 128, 160)])
def test_bfloat16_stays_near_the_exact_iteration(shape):
    matrix = torch.randn(shape)
    exact = newton_schulz_naive(matrix.double())
    rough = newton_schulz(matrix, precision=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert (rough - exact).norm() < 0.06 * exact.norm()
    singular = torch.linalg.svdvals(rough)
    assert singular.max() < 1.3
    wide = newton_schulz(torch.randn(32, 256), precision=torch.bfloat16)
    assert torch.linalg.svdvals(wide).min() > 0.6
    assert torch.equal(newton_schulz(0 * matrix, precision=torch.bfloat16), 0 * matrix)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 96), (50, 131), (131, 50), (17, 40)])
def test_symmetric_products_in_strips(dtype, shape, monkeypatch):
    """Large matrices on a CPU; the same numbers in another order."""
    matrix = torch.randn(shape, dtype=torch.float64)
    whole = newton_schulz(matrix, precision=dtype)
    shapes = []
    multiply = torch.addmm

    def seen(add, left, right, **options):
        shapes.append(tuple(right.shape))
        return multiply(add, left, right, **options)

    monkeypatch.setattr(torch, "addmm", seen)
    monkeypatch.setattr(module, "EXACT_ROWS", 8)
    monkeypatch.setattr(module, "ROWS", {torch.bfloat16: 8})
    strips = newton_schulz(matrix, precision=dtype)
    size = min(shape)
    count = min(module.STRIPS, size // 8)
    assert {columns for _, columns in shapes} >= {
        min(size, n * -(-size // count)) for n in range(1, count + 1)
    }
    near = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.04}[dtype]
    assert (strips - whole).norm() < near * whole.norm()


def test_strips_are_for_large_matrices_that_are_only_read():
    large = torch.zeros(1024, 1024)
    assert module._strips(large) == 4
    assert module._strips(large.bfloat16()) == 4
    assert module._strips(large[:600].bfloat16()) == 2
    assert module._strips(large[:255]) == 1
    assert module._strips(large.requires_grad_()) == 1
    assert module._strips(large.detach().expand(2, -1, -1)) == 1
    assert module._strips(large.detach().to("meta")) == 1


def test_precision_follows_the_device(monkeypatch):
    assert quick_precision(torch.device("cuda")) == torch.bfloat16
    assert quick_precision(torch.device("mps")) == torch.float32
    seen = []
    for quicker in (True, False):
        monkeypatch.setattr(module, "bf16_is_quicker", lambda quicker=quicker: quicker)
        matrix = torch.randn(130, 140)
        seen.append(newton_schulz(matrix))
        small, wide = torch.randn(30, 40), torch.randn(130, 140, dtype=torch.float64)
        exactly = newton_schulz(small, precision=torch.float32)
        assert torch.equal(newton_schulz(small), exactly)
        torch.testing.assert_close(newton_schulz(wide), newton_schulz_naive(wide))
    torch.testing.assert_close(seen[1], newton_schulz(matrix, precision=torch.float32))
    assert seen[0].dtype == torch.float32


def test_a_cpu_is_asked_only_if_it_has_the_instructions(monkeypatch):
    for has, speed, quicker in [(True, 2.0, True), (True, 1.1, False), (True, None, False)]:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has)
        monkeypatch.setattr(machine, "bf16_speed", lambda speed=speed: speed)
        assert machine.bf16_is_quicker() is quicker
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    monkeypatch.setattr(machine, "bf16_speed", lambda: pytest.fail("measured for nothing"))
    assert machine.bf16_is_quicker() is False


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="needs at least 2 dimensions"):
        newton_schulz(torch.randn(3))
    with pytest.raises(TypeError, match="int64"):
        newton_schulz(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="steps"):
        newton_schulz(torch.randn(3, 3), -1)


def test_as_a_rule():
    from nestling.rules import Gates, Write

    grad = torch.randn(3, 5)
    rule = orthogonalise(steps=3, coefficients=CUBIC)
    write, state = rule.step(Write(grad), rule.init(grad), grad, Gates())
    assert state == ()
    assert torch.equal(write.grad, newton_schulz(grad, 3, CUBIC))


@pytest.mark.parametrize("shape", [(64, 64), (64, 160), (256, 96)])
@pytest.mark.parametrize("many", [1, 3])
def test_bfloat16_is_as_near_as_iterating_the_matrix_itself(shape, many):
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(many, *shape).double(), full_matrices=False)
    spread = torch.logspace(0, -3, min(shape), dtype=torch.float64)
    matrix = ((left * spread) @ right).float()
    exact = newton_schulz_naive(matrix.double())
    plain = newton_schulz_naive((matrix / matrix.norm(dim=(-2, -1), keepdim=True)).bfloat16())
    found = newton_schulz(matrix, precision=torch.bfloat16)
    wrong, usual = ((y.double() - exact).norm() / exact.norm() for y in (found, plain))
    assert wrong < max(1.5 * usual, 0.05)
    assert torch.linalg.svdvals(found.double()).max() < 1.3
