"""DGD as an optimizer: what is captured, when it equals SGD and the exact step, what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nestling.optim import DGD, capture
from nestling.paper.exhibits.dgd import dgd_step
from nestling.rules import Gates, Write, apply, dgd


def model_of(*widths: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def grads_of(model: nn.Module, *losses: Callable[[], Tensor]) -> None:
    for loss in losses:
        loss().backward()


def test_small_rate_is_sgd() -> None:
    """To first order in the rate every erase-free DGD step is SGD's; exactly so for the bias."""
    model = model_of(5, 4, 3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = DGD(model.parameters(), lr=1e-6, inputs=capture(model))
    model(torch.randn(7, 5, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close((old - p.detach()) / 1e-6, p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.equation(57, 58)
def test_one_row_is_the_exact_delta_rule() -> None:
    model = nn.Linear(4, 3, bias=False).double()
    x, target = torch.randn(1, 4).double(), torch.randn(1, 3).double()
    optimizer = DGD(model.parameters(), lr=0.7, erase=1.0, inputs=capture(model))
    start = model.weight.detach().clone()
    y = model(x)
    loss = (y - target).square().sum()
    (delta,) = torch.autograd.grad(loss, y, retain_graph=True)
    loss.backward()
    optimizer.step()
    expected = dgd_step(start, x[0], -delta[0], 0.7)
    torch.testing.assert_close(model.weight.detach(), expected)


@pytest.mark.parametrize("erase", [0.0, 1.0])
@pytest.mark.parametrize("rows", [3, 40])
def test_exact_batch_step(erase: float, rows: int) -> None:
    """The step solves its proximal problem: the gradient of the objective there is zero."""
    model = nn.Linear(5, 2, bias=False).double()
    x, target = torch.randn(rows, 5).double(), torch.randn(rows, 2).double()
    rate, old = 0.9, model.weight.detach().clone()
    optimizer = DGD(model.parameters(), lr=rate, erase=erase, inputs=capture(model))
    (model(x) - target).square().sum(-1).mean().backward()
    optimizer.step()
    surprise = 2 * (x @ old.T - target)
    values = -surprise + (1 - erase) * x @ old.T
    new = model.weight.detach().requires_grad_(True)
    objective = (x @ new.T - values).square().sum(-1).mean() / 2
    objective = objective + (new - old).square().sum() / (2 * rate)
    (slope,) = torch.autograd.grad(objective, new)
    assert slope.abs().max() < 1e-10


def test_accumulation_sequences_and_shared_layers_equal_one_batch() -> None:
    """Micro-batches, [B, T, D] inputs and two calls of one layer are all just rows."""
    x = torch.randn(8, 4).double()

    def step(run: Callable[[nn.Linear], None]) -> Tensor:
        torch.manual_seed(1)
        layer = nn.Linear(4, 3).double()
        optimizer = DGD(layer.parameters(), lr=0.5, erase=1.0, inputs=capture(layer))
        for _ in range(2):  # the second step must not see the first one's rows
            optimizer.zero_grad()
            run(layer)
            optimizer.step()
        return layer.weight.detach()

    whole = step(lambda layer: layer(x).square().mean().backward())
    twice = step(lambda layer: [layer(h).square().mean().div(2).backward() for h in x.chunk(2)])
    cubes = step(lambda layer: layer(x.view(2, 4, 4)).square().mean().backward())
    calls = step(lambda layer: torch.cat([layer(x[:3]), layer(x[3:])]).square().mean().backward())
    for other in (twice, cubes, calls):
        torch.testing.assert_close(other, whole)


def test_clipping_scaling_and_model_zero_grad() -> None:
    """The pairs follow the gradient: clipped, unscaled, or cleared through the model."""

    def step(change: Callable[[nn.Module], None], scale: float = 1.0) -> Tensor:
        torch.manual_seed(1)
        model = model_of(4, 3)
        optimizer = DGD(model.parameters(), lr=0.5, inputs=capture(model))
        for _ in range(2):
            model.zero_grad()
            (scale * model(torch.ones(2, 4).double()).square().mean()).backward()
            change(model)
            optimizer.step()
        return model[0].weight.detach()

    def unscale(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad /= 1024.0

    plain = step(lambda model: None)
    torch.testing.assert_close(step(unscale, 1024.0), plain)
    clipped = step(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    assert (clipped - plain).norm() > 0.01


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    x = torch.randn(6, 4).double().requires_grad_(True)
    results = []
    for wrap in (False, True):
        torch.manual_seed(1)
        model = model_of(4, 5, 2)
        optimizer = DGD(model.parameters(), lr=0.5, inputs=capture(model))
        y = checkpoint(model, x, use_reentrant=reentrant) if wrap else model(x)
        y.square().mean().backward()
        optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_other_parameters_take_gradient_descent() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Flatten(), nn.Linear(6, 2))
    conv = model[0].weight.detach().clone()
    optimizer = DGD(model.parameters(), lr=0.5, inputs=capture(model), weight_decay=0.1)
    model(torch.randn(3, 2, 3)).square().mean().backward()
    optimizer.step()
    grad = model[0].weight.grad
    torch.testing.assert_close(model[0].weight.detach(), conv * (1 - 0.05) - 0.5 * grad)


def test_removed_capture_leaves_no_hooks() -> None:
    model = model_of(3, 2)
    with capture(model) as inputs:
        assert inputs.covers(model[0].weight)
        assert not inputs.covers(model[0].bias)
    assert not model[0]._forward_hooks


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        capture(nn.Conv1d(1, 1, 1))
    with pytest.raises(TypeError, match="capture"):
        DGD(model_of(2, 2).parameters(), inputs=None)
    compiled = torch.compile(model_of(2, 2), backend="eager")
    with pytest.raises(ValueError, match="compiled"):
        capture(compiled)

    model = model_of(3, 2, dtype=torch.float32)
    x = torch.randn(2, 3)
    optimizer = DGD(model.parameters(), inputs=capture(model))
    nn.functional.linear(x, model[0].weight).sum().backward()  # not through the layer
    with pytest.raises(RuntimeError, match=r"no input was captured for 0\.weight"):
        optimizer.step()
    optimizer.zero_grad()
    (model(x).sum() + model[0].weight.square().sum()).backward()
    with pytest.raises(RuntimeError, match="do not explain the gradient"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.vmap(model)(x)


def test_tied_embedding_is_refused() -> None:
    table, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    optimizer = DGD(model.parameters(), inputs=capture(model))
    nn.functional.cross_entropy(model(torch.arange(5)), torch.tensor([1, 2, 0, 4, 4])).backward()
    with pytest.raises(RuntimeError, match="tied"):
        optimizer.step()


def test_autocast_and_half_precision() -> None:
    model = model_of(8, 6, 2, dtype=torch.float32)
    optimizer = DGD(model.parameters(), lr=0.2, inputs=capture(model))
    x, losses = torch.randn(16, 8), []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_changed_in_place_are_erased_as_they_were(bias: bool) -> None:
    """The step takes `x W^T` from the forward pass; an activation in place must not spoil it."""

    def step(inplace: bool) -> Tensor:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 5, bias=bias), nn.ReLU(inplace), nn.Linear(5, 2))
        model = model.double()
        optimizer = DGD(model.parameters(), lr=0.5, erase=1.0, inputs=capture(model))
        model(torch.randn(3, 6).double()).square().mean().backward()
        expected = _exact_step(model[0], optimizer)
        optimizer.step()
        torch.testing.assert_close(model[0].weight.detach(), expected)
        return model[0].weight.detach()

    torch.testing.assert_close(step(True), step(False))


def _exact_step(layer: nn.Linear, optimizer: DGD) -> Tensor:
    """The rule itself, on the pairs the optimizer is about to use."""
    x, u = optimizer.inputs.pairs(layer.weight)
    weight = layer.weight.detach().clone()
    write = Write(torch.zeros_like(weight), x, u)
    return apply(dgd(mean=True), weight, write, (), Gates(rate=0.5))[0]
