"""One test for all optimizers: they converge, continue exactly, and equal a naive reference."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nestling.levels import Level
from nestling.optim import (
    DGD,
    M3,
    AdaMuon,
    DeepMomentum,
    DeltaMomentum,
    Muon,
    NestedOptimizer,
    RuleOptimizer,
    capture,
    compose,
)
from nestling.optim.batch import matrix
from nestling.rules import Gates, Write, apply
from nestling.rules.adam import adam
from nestling.rules.aliases import lion, rmsprop, sgd

Make = Callable[..., torch.optim.Optimizer]

SHELLS: dict[str, tuple[Make, float]] = {
    "M3": (M3, 0.03),
    "M3 literal": (lambda p, **k: M3(p, literal=True, **k), 0.03),
    "Muon": (Muon, 0.03),
    "AdaMuon": (AdaMuon, 0.03),
    "DeltaMomentum": (DeltaMomentum, 0.1),
    "DeepMomentum": (DeepMomentum, 0.1),
    "AdamW": (lambda p, **k: compose(p, adam(), **k), 0.03),
    "Lion": (lambda p, **k: compose(p, lion(), **k), 0.005),
    "RMSprop": (lambda p, **k: compose(p, rmsprop(), **k), 0.01),
    "momentum": (lambda p, **k: compose(p, sgd(0.9), **k), 0.05),
}


def nested(params: list[nn.Parameter], lr: float, **options: object) -> NestedOptimizer:
    """Two levels of M3, the slow one every three steps."""
    params = list(params)
    return NestedOptimizer(
        [
            (Level(name="fast", chunk=1), params[::2], lambda p: M3(p, lr=lr, **options)),
            (Level(name="slow", chunk=3), params[1::2], lambda p: M3(p, lr=lr, **options)),
        ]
    )


QUADRATIC = {"M3": 5, "M3 literal": 10, "Muon": 5, "AdaMuon": 5, "Lion": 10, "nested M3": 5}
"""How much larger a rate the quadratic needs, where steps have a fixed size."""

ALL = {**SHELLS, "nested M3": (nested, 0.03)}
every = pytest.mark.parametrize("name", [*ALL, "DGD"])
every_shell = pytest.mark.parametrize("name", list(SHELLS))


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
    ).to(dtype)


def make(name: str, model: nn.Module, **options: object) -> torch.optim.Optimizer:
    if name == "DGD":
        return DGD(model.parameters(), **{"lr": 0.2, **options}, inputs=capture(model))
    build, lr = ALL[name]
    return build(model.parameters(), **{"lr": lr, **options})


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0
) -> list[float]:
    """Full-batch regression of a product; returns the losses."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    x = torch.randn(64, 8, generator=generator).to(dtype)
    y = x[:, :1] * x[:, 1:2]
    losses = []
    for step in range(first, first + steps):
        rows = slice(16 * (step % 4), 16 * (step % 4) + 16)  # four batches in turn
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = (model(x[rows]) - y[rows]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@every
def test_small_mlp_converges(name: str) -> None:
    model = mlp()
    losses = train(model, make(name, model), 200)
    start, end = sum(losses[:4]), sum(losses[-4:])
    assert end < 0.5 * start, f"{start / 4:.3f} -> {end / 4:.3f}"


@pytest.mark.parametrize("name", list(ALL))
def test_quadratic_converges(name: str) -> None:
    torch.manual_seed(0)
    target = torch.randn(6, 4)
    weight, offset = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.ones(3))
    build, lr = ALL[name]
    groups = [{"params": [weight], "orthogonal": True}, {"params": [offset], "orthogonal": False}]
    optimizer = build(groups, lr=lr * QUADRATIC.get(name, 1.0))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=300)

    def loss() -> Tensor:
        return (weight - target).square().sum() + 5 * offset.square().sum()

    start = loss().item()
    for _ in range(300):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()
    bound = 0.1 if name == "M3 literal" else 0.02  # as printed, its step only ever shrinks
    assert loss().item() < bound * start


def test_dgd_solves_a_linear_problem() -> None:
    torch.manual_seed(0)
    model, truth = nn.Linear(5, 3, bias=False), torch.randn(3, 5)
    x = torch.randn(40, 5) * torch.tensor([3.0, 1.0, 0.3, 1.0, 2.0])
    optimizer = DGD(model.parameters(), lr=2.0, inputs=capture(model))  # SGD diverges at 0.5
    for _ in range(200):
        optimizer.zero_grad()
        (model(x) - x @ truth.T).square().sum(-1).mean().backward()
        optimizer.step()
    assert torch.allclose(model.weight, truth, atol=1e-3)


@every
def test_save_and_load_in_mid_run_is_bit_exact(name: str) -> None:
    model = mlp()
    optimizer = make(name, model)
    train(model, optimizer, 10)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    straight = train(model, optimizer, 10, first=10)

    saved.seek(0)
    state = torch.load(saved)  # weights_only: nothing but tensors and numbers inside
    again = mlp()
    resumed = make(name, again, lr=123.0)  # the saved settings win
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert train(again, resumed, 10, first=10) == straight
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@every_shell
def test_matches_a_naive_reference(name: str) -> None:
    """`apply` of the rule, parameter by parameter, as the rules' own docstring says."""
    model = mlp(torch.float64)
    optimizer = make(name, model, weight_decay=0.1)
    assert isinstance(optimizer, RuleOptimizer)
    weights, states, rules, group_of = {}, {}, {}, {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            group_of[p] = group
            rules[p] = optimizer.rule(group, optimizer.kind(group, p))
            weights[p] = matrix(p.detach().clone())
            states[p] = rules[p].init(weights[p])
    for step in range(1, 20):
        train(model, optimizer, 1, first=step)
        for p, group in group_of.items():
            gates = Gates(group["lr"], 1 - group["lr"] * 0.1, step)
            weights[p], states[p] = apply(
                rules[p], weights[p], Write(matrix(p.grad)), states[p], gates
            )
    for p, weight in weights.items():
        torch.testing.assert_close(matrix(p.detach()), weight, rtol=1e-9, atol=1e-11)


@every_shell
def test_foreach_equals_loop(name: str) -> None:
    models = [mlp(torch.float64) for _ in range(2)]
    for model, foreach in zip(models, (True, False), strict=True):
        model.append(nn.Linear(1, 1)).append(nn.Linear(1, 1)).double()
        torch.manual_seed(3)
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        train(model, make(name, model, foreach=foreach), 12)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@every_shell
def test_awkward_parameters(name: str) -> None:
    """Every rank, empty, one entry, transposed, unused: finite, and moved by a gradient."""
    torch.manual_seed(0)
    shapes = [(), (1,), (5,), (1, 5), (5, 1), (3, 4), (2, 3, 3, 3), (2, 1, 4), (0, 3), (40, 2)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    params += [nn.Parameter(torch.randn(4, 6).T), nn.Parameter(torch.randn(4, 3, 2, 2))]
    params[-1].data = params[-1].data.to(memory_format=torch.channels_last)
    unused = nn.Parameter(torch.ones(3, 3))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    build, lr = ALL[name]
    optimizer = build([*params, unused, frozen], lr=lr)
    before = [p.detach().clone() for p in params]
    for _ in range(3):
        optimizer.zero_grad()
        sum((p * p).sum() for p in params).backward()
        optimizer.step()
    for p, old in zip(params, before, strict=True):
        assert torch.isfinite(p).all()
        assert p.numel() == 0 or not torch.equal(p, old), tuple(p.shape)
    assert torch.equal(unused, torch.ones(3, 3))
    assert torch.equal(frozen, torch.ones(2))
    zero = [torch.zeros_like(p) for p in params]
    for p, grad in zip(params, zero, strict=True):
        p.grad = grad
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in params)


@every_shell
def test_bfloat16_parameters_keep_float32_state(name: str) -> None:
    model = mlp(torch.bfloat16)
    optimizer = make(name, model, master_weights=True)
    losses = train(model, optimizer, 60)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    tensors = [v for state in optimizer.state.values() for v in state.values()]
    assert all(v.dtype == torch.float32 for v in tensors)
    twin = mlp(torch.bfloat16)
    other = make(name, twin, master_weights=True)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(twin, other, 3) == train(model, optimizer, 3)
    assert all(v.dtype == torch.float32 for s in other.state.values() for v in s.values())


@every
def test_maximize_closure_and_clipping(name: str) -> None:
    up, down = mlp(), mlp()
    climber, descender = make(name, up, maximize=True), make(name, down)
    x = torch.ones(4, 8)

    def closure_of(model: nn.Module, sign: float) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            model.zero_grad()
            loss = sign * model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        return closure

    for _ in range(3):
        a = climber.step(closure_of(up, -1.0))
        b = descender.step(closure_of(down, 1.0))
        torch.testing.assert_close(-a, b)
    for a, b in zip(up.parameters(), down.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@every
def test_schedulers_and_deepcopy(name: str) -> None:
    model = mlp()
    optimizer = make(name, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, 2)
    schedule.step()
    assert all(group["lr"] < group["initial_lr"] for group in optimizer.param_groups)
    if name not in ("DGD", "nested M3"):
        twin_model, twin = copy.deepcopy((model, optimizer))
        assert train(twin_model, twin, 3) == train(model, optimizer, 3)


@pytest.mark.parametrize("foreach", [True, False])
def test_m3_does_not_depend_on_the_scale_of_gradients(foreach: bool) -> None:
    def run(scale: float, literal: bool) -> list[Tensor]:
        model = mlp()
        optimizer = M3(model.parameters(), lr=0.01, foreach=foreach, literal=literal, chunk=3)
        start = [p.detach().clone() for p in model.parameters()]
        generator = torch.Generator().manual_seed(2)
        for _ in range(10):
            for p in model.parameters():
                p.grad = scale * torch.randn(p.shape, generator=generator)
            optimizer.step()
        return [p.detach() - s for p, s in zip(model.parameters(), start, strict=True)]

    for one, thousand in zip(run(1.0, False), run(1000.0, False), strict=True):
        assert (one - thousand).norm() <= 1e-3 * one.norm()
    literal = zip(run(1.0, True), run(1000.0, True), strict=True)
    assert any((one - thousand).norm() > 0.1 * one.norm() for one, thousand in literal)
