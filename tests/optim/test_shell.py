"""The shell: settings, labels, what it refuses, compiled rules, schedules, import cost."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from nestling.optim import (
    M3,
    AdaMuon,
    DeepMomentum,
    DeltaMomentum,
    Muon,
    compose,
    is_hidden_matrix,
    param_groups,
)
from nestling.rules import Rule, adamuon, multiscale, muon
from nestling.rules.adam import adam
from nestling.rules.aliases import lion


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


BAD = [
    (M3, {"lr": -1.0}, "lr"),
    (M3, {"lr": float("nan")}, "lr"),
    (M3, {"betas": (0.9, 0.9)}, "betas"),
    (M3, {"betas": (0.9, 0.9, 1.0)}, "betas"),
    (M3, {"chunk": 0}, "chunk"),
    (M3, {"chunk": 2.5}, "chunk"),
    (M3, {"slow_weight": -1.0}, "slow_weight"),
    (M3, {"steps": 0}, "steps"),
    (M3, {"adam_lr": -1.0}, "adam_lr"),
    (M3, {"adam_betas": (1.0, 0.9)}, "adam_betas"),
    (M3, {"eps": -1e-8}, "eps"),
    (M3, {"weight_decay": -0.1}, "weight_decay"),
    (M3, {"foreach": "yes"}, "foreach"),
    (Muon, {"momentum": 1.0}, "momentum"),
    (Muon, {"scale": "large"}, "scale"),
    (AdaMuon, {"betas": (0.9, -0.1)}, "betas"),
    (DeltaMomentum, {"rate": 0.0}, "rate"),
    (DeltaMomentum, {"momentum": 1.5}, "momentum"),
    (DeepMomentum, {"hidden": 0}, "hidden"),
    (DeepMomentum, {"gain": 1.0}, "gain"),
    (compose, {"lr": float("inf")}, "lr"),
]


@pytest.mark.parametrize(
    ("build", "options", "word"), BAD, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_wrong_settings_are_refused_by_name(build, options, word) -> None:
    with pytest.raises(ValueError, match=word):
        build(weights((3, 3)), **options)
    good = build(weights((3, 3)))
    with pytest.raises(ValueError, match=word):
        good.add_param_group({"params": weights((3, 3)), **options})
    assert len(good.param_groups) == 1  # nothing half-added


def test_complex_integer_and_sparse_are_refused() -> None:
    with pytest.raises(TypeError, match="complex"):
        M3([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(TypeError, match="int64"):
        compose([nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)], adam())
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = compose(table.parameters(), adam())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    with pytest.raises(TypeError, match="rules after the parameters"):
        compose(weights((2,)), 1e-3)


def test_aliases_have_their_rules_defaults() -> None:
    def defaults(rule: object) -> dict[str, object]:
        return {k: v.default for k, v in inspect.signature(rule).parameters.items()}

    m3, rule = M3(weights((3, 3))).defaults, defaults(multiscale)
    assert m3["betas"] == (rule["beta1"], rule["beta2"], rule["beta3"])
    assert all(m3[k] == rule[k] for k in ("slow_weight", "chunk", "steps", "eps"))
    mu, rule = Muon(weights((3, 3))).defaults, defaults(muon)
    assert mu["momentum"] == rule["decay"]
    assert mu["nesterov"] == rule["nesterov"]
    ada, rule = AdaMuon(weights((3, 3))).defaults, defaults(adamuon)
    assert ada["betas"] == (rule["decay"], rule["second_decay"])


def test_equal_to_torch() -> None:
    """AdamW bit for bit in the settings that matter, Muon up to torch's bfloat16."""
    ours, theirs = weights((6, 5), (4,)), weights((6, 5), (4,))
    for a, b in zip(ours, theirs, strict=True):
        b.data.copy_(a.data)
    pairs = [
        (
            compose(ours, adam(), lr=0.1, weight_decay=0.3, maximize=True),
            torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.3, maximize=True),
        )
    ]
    for mine, torchs in pairs:
        for _ in range(5):
            for a, b in zip(ours, theirs, strict=True):
                a.grad = torch.randn_like(a)
                b.grad = a.grad.clone()
            mine.step()
            torchs.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_lion_in_one_line() -> None:
    (w,) = weights((3,))
    start, memory = w.detach().clone(), torch.zeros(3)
    optimizer = compose([w], lion(0.9, 0.99), lr=0.1, weight_decay=0.5)
    for _ in range(4):
        w.grad = torch.randn(3)
        start = start * (1 - 0.1 * 0.5) - 0.1 * torch.sign(0.9 * memory + 0.1 * w.grad)
        memory = 0.99 * memory + 0.01 * w.grad
        optimizer.step()
    torch.testing.assert_close(w.detach(), start)


class Net(nn.Module):
    """A little of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.hidden = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 30)


def names(model: nn.Module, group: dict) -> list[str]:
    known = {id(p): n for n, p in model.named_parameters()}
    return sorted(known[id(p)] for p in group["params"])


def test_param_groups_know_embeddings_and_heads() -> None:
    model = Net()
    hidden, rest = param_groups(model)
    assert names(model, hidden) == ["conv.weight", "hidden.weight"]
    assert {"table.weight", "head.weight", "norm.weight"} <= set(names(model, rest))
    (hidden, rest) = param_groups(model, heads=[])
    assert "head.weight" in names(model, hidden)
    model.hidden.weight = model.table.weight  # tied: counts as a table
    assert names(model, param_groups(model)[0]) == ["conv.weight"]
    with pytest.raises(ValueError, match="no module 'top'"):
        param_groups(model, heads=["top"])


def test_groups_are_divided_by_shape_and_can_say_otherwise() -> None:
    shapes = [(8, 8), (8,), (1, 8), (400, 8), (8, 4, 3, 3), (), (8, 128)]
    assert [is_hidden_matrix(torch.zeros(s)) for s in shapes] == [
        True, False, False, False, True, False, True,
    ]  # fmt: skip
    params = weights(*shapes)
    optimizer = M3(params, lr=0.1, adam_lr=0.02)
    (group,) = optimizer.param_groups  # one group stays one group, as ZeRO and torch expect
    kinds = [optimizer.kind(group, p) for p in params]
    assert [kind.hidden for kind in kinds] == [
        False, False, False, False, True, False, False,
    ]  # fmt: skip
    rates = [optimizer.rate(group, kind) for kind in kinds]
    assert rates == pytest.approx([0.02, 0.02, 0.02, 0.02, 0.1, 0.02, 0.02])
    chosen = M3(
        [{"params": params[:2], "orthogonal": False}, {"params": params[3], "orthogonal": True}]
    )
    assert [g["orthogonal"] for g in chosen.param_groups] == [False, True]
    names = ["embed.weight", "b", "c", "long", "conv", "e", "layers.0.up"]
    named = M3(list(zip(names, params, strict=True)))
    (by_name,) = named.param_groups
    assert by_name["hidden"] == [False, False, False, False, True, False, True]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert [optimizer.rate(group, kind) for kind in kinds[3:5]] == pytest.approx([0.01, 0.05])
    groups = [{"params": [p], "orthogonal": yes} for p, yes in zip(params, (True, False))]
    explicit = M3(groups, lr=0.1, adam_lr=0.02)
    assert [g["lr"] for g in explicit.param_groups] == [0.1, 0.02]


def test_orthogonalised_step_has_flat_singular_values() -> None:
    (w,) = weights((12, 6, 1, 2))
    before = w.detach().clone()
    w.grad = torch.randn_like(w)
    Muon([w], lr=1.0, scale="none", steps=12, nesterov=False).step()
    singular = torch.linalg.svdvals((before - w.detach()).flatten(1))
    assert singular.min() > 0.6
    assert singular.max() < 1.3


def test_a_state_that_is_the_gradient_is_copied() -> None:
    """A rule may return its gradient as state; `zero_grad` in place must not reach it."""

    def step(write, state, weight, gates):
        return write._replace(grad=state[0]), (write.grad,)

    delay = Rule(lambda weight: (torch.zeros_like(weight),), step, elementwise=True)
    (w,) = weights((2, 2))
    optimizer = compose([w], delay, lr=1.0, foreach=False)
    w.grad = torch.ones_like(w)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(optimizer.state[w]["0"], torch.ones(2, 2))


def test_tensor_rate_and_late_groups() -> None:
    a, b = weights((4, 4), (4, 4))
    b.data.copy_(a.data)
    one = Muon([a], lr=torch.tensor(0.1), weight_decay=0.1)
    other = Muon([b], lr=0.1, weight_decay=0.1)
    a.grad = torch.randn_like(a)
    b.grad = a.grad.clone()
    one.step()
    other.step()
    torch.testing.assert_close(a, b)
    late = weights((4, 4))
    other.add_param_group({"params": late, "lr": 0.5})
    late[0].grad = torch.ones(4, 4)
    other.step()
    assert int(other.state[late[0]]["step"]) == 1
    assert int(other.state[b]["step"]) == 2


def test_compiled_rule_and_compiled_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", partial(real, backend="aot_eager"))  # no C++ here

    def run(compiled: bool, whole: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        x = torch.randn(5, 6)
        optimizer = M3(model.parameters(), lr=0.01, chunk=2, compile=compiled)

        def train() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        run_one = torch.compile(train) if whole else train
        for _ in range(5):
            run_one()
        return [p.detach() for p in model.parameters()]

    eager = run(False, False)
    counters = torch._dynamo.utils.counters
    counters.clear()
    for a, b in zip(eager, run(True, False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 10
    assert not counters["graph_break"]
    for a, b in zip(eager, run(False, True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_import_is_light() -> None:
    heavy = "print(*(m for m in ('transformers', 'torch._dynamo') if m in sys.modules))"
    found = [
        subprocess.run(
            [sys.executable, "-c", f"import sys, {module}; {heavy}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for module in ("nestling.optim", "torch")
    ]
    assert found[0] == found[1]
