"""Ordinary models and optimizers, run as nested systems by the engine, equal the originals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nestling.activations import gelu
from nestling.objectives import l2
from nestling.paper.nested import NestedSystem
from nestling.paper.nested.sequences import (
    Token,
    ada_transformer_block,
    linear_attention,
    transformer_block,
)
from nestling.paper.nested.training import (
    adam_problems,
    layer_problems,
    momentum_problems,
    sgd_problem,
)
from nestling.rules import Gates

TIGHT = {"rtol": 0, "atol": 1e-10}
B, D, K, V, T = 2, 3, 4, 5, 6


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64) * 0.4


def close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value.detach(), **TIGHT)


# ------------------------------------------------------------------ training


def mlp():
    return {"first": rand(7, D), "second": rand(6, 7), "third": rand(V, 6)}


def mlp_loss(weights, item):
    x, target = item
    for name in ("first", "second"):
        x = gelu(x @ weights[name].mT)
    return 0.5 * (x @ weights["third"].mT - target).square().mean(0).sum()


def batches(n=12):
    return [(rand(8, D), rand(8, V)) for _ in range(n)]


def trained(weights, data, make, loss=mlp_loss):
    """The ordinary way: parameters, autograd, a torch optimizer."""
    own = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
    optimizer = make(own.values())
    for item in data:
        optimizer.zero_grad()
        loss(own, item).backward()
        optimizer.step()
    return own


def test_an_mlp_trained_by_sgd_is_one_level_of_associative_memories():
    weights, data = mlp(), batches()

    def error(y, target):
        return (y - target) / len(y)

    system = NestedSystem(layer_problems(weights, gelu, error, rate=0.3))
    assert [[p.name for p in level] for level in system.levels] == [["first", "second", "third"]]
    state, _ = system.run(data)
    found = {name: own["weight"] for name, own in state.parameters.items()}
    close(found, trained(weights, data, lambda p: torch.optim.SGD(p, lr=0.3)))


OPTIMIZERS = {
    "sgd": (
        lambda problem: (problem,),
        lambda p: torch.optim.SGD(p, lr=0.1),
        [["mlp"]],
    ),
    "momentum": (
        lambda problem: momentum_problems(problem, decay=0.9, rate=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        [["mlp"], ["mlp.momentum"]],
    ),
    "adamw": (
        lambda problem: adam_problems(problem, rate=0.01, decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        [["mlp"], ["mlp.exp_avg", "mlp.exp_avg_sq"]],
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_mlp_with_a_torch_optimizer(name):
    decompose, optimizer, levels = OPTIMIZERS[name]
    weights, data = mlp(), batches()
    system = NestedSystem(decompose(sgd_problem("mlp", weights, mlp_loss, rate=0.1)))
    assert [[p.name for p in level] for level in system.levels] == levels
    state, _ = system.run(data)
    close(state.parameters["mlp"], trained(weights, data, optimizer))


# ------------------------------------------------------------------ sequences


def squares(y, target):
    return 0.5 * (y - target).square().sum()


def projections():
    return {"key": rand(K, D), "value": rand(V, D), "query": rand(K, D), "gate": rand(1, D)}


def sequences(n=3):
    """n training sequences [B, T, D] with targets, whole and cut into tokens."""
    whole = [(rand(B, T, D), rand(B, T, V)) for _ in range(n)]
    tokens = [Token(x[:, t], y[:, t]) for x, y in whole for t in range(T)]
    return whole, tokens


def linear_attention_loss(own, item):
    """The parallel form: y = (Q K^T masked) V."""
    x, target = item
    k, v, q = (x @ own[name].mT for name in ("key", "value", "query"))
    return squares((q @ k.mT).tril() @ v, target)


def delta_net_loss(own, item):
    """The recurrent form of the delta rule, one token after another."""
    x, target = item
    k, v, q = (x @ own[name].mT for name in ("key", "value", "query"))
    eta = torch.sigmoid(x @ own["gate"].mT)[..., None]  # [B, T, 1, 1]
    memory, outputs = torch.zeros(B, V, K, dtype=torch.float64), []
    for t in range(T):
        error = v[:, t, :, None] - memory @ k[:, t, :, None]
        memory = memory + eta[:, t] * error * k[:, t, None, :]
        outputs.append((memory @ q[:, t, :, None])[..., 0])
    return squares(torch.stack(outputs, 1), target)


def token_rate(view):
    return Gates(rate=torch.sigmoid(view.item.x @ view["projections"]["gate"].mT)[..., None])


def attention_system(weights, **options):
    return linear_attention(weights, squares, batch=B, length=T, rate=0.05, **options)


def test_linear_attention_trained_by_sgd_has_two_levels():
    weights, (whole, tokens) = projections(), sequences()
    system = NestedSystem(attention_system(weights))
    assert [[p.name for p in level] for level in system.levels] == [["projections"], ["memory"]]
    state, _ = system.run(tokens)
    ordinary = trained(weights, whole, lambda p: torch.optim.SGD(p, lr=0.05), linear_attention_loss)
    close(state.parameters["projections"], ordinary)


def test_delta_net_differs_in_objective_and_rate_only():
    weights, (whole, tokens) = projections(), sequences()
    system = NestedSystem(attention_system(weights, objective=l2, gates=token_rate))
    state, _ = system.run(tokens)
    ordinary = trained(weights, whole, lambda p: torch.optim.SGD(p, lr=0.05), delta_net_loss)
    close(state.parameters["projections"], ordinary)
    assert not torch.allclose(ordinary["gate"], weights["gate"])  # the gate learns through updates


def test_linear_attention_trained_with_momentum_has_three_levels():
    weights, (whole, tokens) = projections(), sequences(4)
    memory, outer = attention_system(weights)
    system = NestedSystem((memory, *momentum_problems(outer, decay=0.9, rate=0.02)))
    names = [[p.name for p in level] for level in system.levels]
    assert names == [["projections"], ["projections.momentum"], ["memory"]]
    state, _ = system.run(tokens)

    def optimizer(p):
        return torch.optim.SGD(p, lr=0.02, momentum=0.9)

    close(
        state.parameters["projections"], trained(weights, whole, optimizer, linear_attention_loss)
    )


def block_parameters():
    return {
        "key": rand(K, D),
        "value": rand(V, D),
        "query": rand(K, D),
        "up": rand(7, V),
        "down": rand(V, 7),
        "memory_key": rand(K, V),
        "memory_value": rand(V, V),
        "memory_query": rand(K, V),
        "start": rand(V, K),
    }


def attended(own, x):
    k, v, q = (x @ own[name].mT for name in ("key", "value", "query"))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def transformer_loss(own, item):
    a = attended(own, item[0])
    return squares(torch.relu(a @ own["up"].mT) @ own["down"].mT, item[1])


def ada_transformer_loss(own, item):
    a = attended(own, item[0])
    k, v, q = (a @ own[f"memory_{name}"].mT for name in ("key", "value", "query"))
    return squares(q @ own["start"].mT + (q @ k.mT).tril() @ v, item[1])


@pytest.mark.parametrize(
    ("block", "loss", "levels"),
    [
        (transformer_block, transformer_loss, [["block"], ["attention"]]),
        (ada_transformer_block, ada_transformer_loss, [["block"], ["memory"], ["attention"]]),
    ],
)
def test_transformer_and_ada_transformer_blocks(block, loss, levels):
    weights, (whole, tokens) = block_parameters(), sequences()
    system = NestedSystem(block(weights, squares, batch=B, length=T, rate=0.05))
    assert [[p.name for p in level] for level in system.levels] == levels
    state, _ = system.run(tokens)
    ordinary = trained(weights, whole, lambda p: torch.optim.SGD(p, lr=0.05), loss)
    for name, value in weights.items():  # what this block does not use has no gradient
        if ordinary[name].grad is None:
            torch.testing.assert_close(state.parameters["block"][name].detach(), value)
        else:
            assert not torch.equal(ordinary[name], value)
    close(state.parameters["block"], ordinary)
