"""Retaining as an optimizer: ridge regression on the whole stream, its clock, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nestling.optim import Retaining, capture


def learn(layer: nn.Linear, optimizer: Retaining, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    (0.5 * (layer(x) - y).square().sum(1).mean()).backward()
    optimizer.step()


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_squared_error_gives_ridge_regression_on_the_whole_stream(chunk):
    """Batch by batch, or four batches at once from the same weights: nothing is forgotten."""
    x, y = torch.randn(96, 6).double(), torch.randn(96, 2).double()
    layer = nn.Linear(6, 2, bias=False).double()
    nn.init.zeros_(layer.weight)
    optimizer = Retaining(layer.parameters(), inputs=capture(layer), keep=5.0, chunk=chunk)
    for rows, target in zip(x.split(8), y.split(8), strict=True):
        learn(layer, optimizer, rows, target)
    ridge = torch.linalg.solve(5.0 * torch.eye(6).double() + x.T @ x, x.T @ y).T
    assert torch.allclose(layer.weight, ridge, atol=1e-9)


def test_a_chunk_waits():
    layer = nn.Linear(3, 2, bias=False)
    optimizer = Retaining(layer.parameters(), inputs=capture(layer), chunk=2)
    before = layer.weight.clone()
    for expected in (True, False):
        learn(layer, optimizer, torch.randn(4, 3), torch.randn(4, 2))
        assert torch.equal(layer.weight, before) is expected


def test_wrong_settings_are_refused():
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="must belong to a captured"):
        Retaining(layer.parameters(), inputs=capture(layer))  # the bias is not a linear map
    with pytest.raises(TypeError, match="inputs must be capture"):
        Retaining([layer.weight], inputs=layer)  # type: ignore[arg-type]
    for wrong in ({"lr": -1.0}, {"keep": 0.0}, {"chunk": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Retaining([layer.weight], inputs=capture(layer), **wrong)


def test_a_long_float32_stream_of_skewed_inputs_stays_exact():
    """Directions of very different size, a weak prior: a float32 memory would drift off."""
    size = torch.logspace(0, -3, 12)
    x = torch.randn(4096, 12) * size + 3.0 * size  # a common mean, as features have
    y = x @ torch.randn(12, 2) / size[0] + 0.1 * torch.randn(4096, 2)
    layer = nn.Linear(12, 2, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = Retaining(layer.parameters(), inputs=capture(layer), keep=1e-4)
    for rows, target in zip(x.split(16), y.split(16), strict=True):
        learn(layer, optimizer, rows, target)
    a = x.double()
    ridge = torch.linalg.solve(1e-4 * torch.eye(12).double() + a.T @ a, a.T @ y.double()).T
    read = layer(x).double() - a @ ridge.T
    assert read.abs().max() < 1e-3
