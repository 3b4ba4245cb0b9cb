"""DGD: the closed forms against a numerical argmin that knows nothing of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nestling.paper.exhibits.dgd import delta_rate, delta_step, dgd_step
from nestling.rules import Gates, Write, apply
from nestling.rules.dgd import dgd, dgd_direction


def argmin(weight: Tensor, x: Tensor, u: Tensor, rate: float, c: float = 1.0) -> Tensor:
    """`argmin_W c sum_n |W x_n - u_n / c|^2 / 2 + |W - W_t|^2 / (2 rate)` by least squares."""
    tall = torch.cat([x * c**0.5, torch.eye(x.shape[-1], dtype=x.dtype) / rate**0.5])
    right = torch.cat([u / c**0.5, weight.mT / rate**0.5])
    return torch.linalg.lstsq(tall, right).solution.mT


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 9),
    st.floats(1e-3, 1e2), st.floats(1e-2, 30.0), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_batch_step_is_the_argmin(outputs, inputs, rows, rate, norm, mean, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    weight, x, u = draw(outputs, inputs), norm * draw(rows, inputs), draw(rows, outputs)
    gates = Gates(rate=rate)
    new, _ = apply(dgd(mean=mean), weight, Write(u.mT @ x, x, u), (), gates)
    expected = argmin(weight, x, u, rate, 1.0 / rows if mean else 1.0)
    torch.testing.assert_close(new, expected, rtol=1e-6, atol=1e-7)


@given(st.floats(0.0, 1.0), st.floats(1e-3, 50.0), st.floats(0.0, 20.0), st.integers(0, 99))
def test_single_step_is_the_batch_of_one(retain, rate, norm, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    x = norm * torch.randn(2, 4, dtype=torch.float64, generator=generator)
    u = torch.randn(2, 3, dtype=torch.float64, generator=generator)
    one = dgd_step(weight, x, u, rate, retain)
    write = Write(weight, x[:, None], u[:, None])
    batch, _ = apply(dgd(), weight, write, (), Gates(rate=rate, retain=retain))
    torch.testing.assert_close(one, batch, rtol=1e-9, atol=1e-9)
    moved = torch.stack([argmin(retain * weight[i], x[i, None], u[i, None], rate) for i in (0, 1)])
    torch.testing.assert_close(one, moved, rtol=1e-6, atol=1e-7)


def test_rates_per_matrix_and_solving_on_either_side():
    weight = torch.randn(3, 2, 4, dtype=torch.float64)
    rate = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    for rows in (3, 7):
        x = torch.randn(3, rows, 4, dtype=torch.float64)
        u = torch.randn(3, rows, 2, dtype=torch.float64)
        together = dgd_direction(weight, x, u, rate[:, None, None])
        alone = [dgd_direction(weight[i], x[i], u[i], float(rate[i])) for i in range(3)]
        torch.testing.assert_close(together, torch.stack(alone))


def test_delta_step_with_tensor_gates():
    weight, x, u = torch.randn(5, 2, 3), torch.randn(5, 3), torch.randn(5, 2)
    rate, retain = torch.rand(5), torch.rand(5)
    out = delta_step(weight, x, u, rate, retain)
    for i in range(5):
        erase = retain[i] * torch.eye(3) - rate[i] * torch.outer(x[i], x[i])
        torch.testing.assert_close(out[i], weight[i] @ erase + rate[i] * torch.outer(u[i], x[i]))
    assert torch.equal(delta_rate(torch.zeros(3), 0.5), torch.tensor(0.5))


def test_without_erasing_the_loss_keeps_its_fixed_points():
    """At a minimum (u = 0) erase=0 stays; erase=1 shrinks the outputs (deviation 5)."""
    weight, x = torch.randn(2, 3), torch.randn(4, 3)
    still, _ = apply(dgd(erase=0.0), weight, Write(weight, x, torch.zeros(4, 2)), (), Gates())
    assert torch.equal(still, weight)
    shrunk, _ = apply(dgd(), weight, Write(weight, x, torch.zeros(4, 2)), (), Gates())
    assert (x @ shrunk.mT).norm() < (x @ weight.mT).norm()


def test_squared_error_converges_to_half_the_target_unless_erase_is_zero():
    x = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q[:3]  # three orthonormal rows
    target = torch.randn(3, 2, dtype=torch.float64)
    for erase, share in ((1.0, 0.5), (0.0, 1.0)):
        weight = torch.zeros(2, 4, dtype=torch.float64)
        for _ in range(200):
            surprise = x @ weight.mT - target
            write = Write(surprise.mT @ x, x, -surprise)
            weight, _ = apply(dgd(erase=erase), weight, write, (), Gates(rate=0.5))
        torch.testing.assert_close(x @ weight.mT, share * target)


def test_zero_inputs_and_zero_rows_write_nothing():
    weight = torch.randn(2, 3)
    for rows in (0, 2):
        x, u = torch.zeros(rows, 3), torch.ones(rows, 2)
        new, _ = apply(dgd(mean=True), weight, Write(weight, x, u), (), Gates(rate=0.3))
        assert torch.equal(new, weight)


def test_not_a_number_passes_through_like_in_any_optimizer():
    weight, x = torch.randn(2, 3), torch.full((1, 3), torch.nan)
    new, _ = apply(dgd(), weight, Write(weight, x, torch.ones(1, 2)), (), Gates())
    assert new.isnan().all()


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="dgd learns from a layer's pairs"):
        apply(dgd(), torch.ones(2, 2), Write(torch.ones(2, 2)), (), Gates())
    with pytest.raises(ValueError, match=r"erase .* got 2"):
        dgd(erase=2)
