"""Titans whose last layer alone learns: the gated delta rule on features, against the loop."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from nestling.memories import Titans, TitansConfig, configure
from nestling.norm import unit


def build(**options):
    torch.manual_seed(0)
    sizes = {"width": 8, "heads": 2, "expansion": 3, "chunk": 4, "conv": 1, "gate": False}
    memory = Titans(
        configure(TitansConfig, **sizes, features=True, momentum=False, **options)
    ).double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return memory


def by_tokens(memory, x):
    """The loop of the module's docstring, head by head and token by token."""
    parts = memory.shell.project(x).unflatten(-1, (4, 2, 4))  # [B, T, (x k v q), H, d]
    outs = []
    for head in range(2):
        seen, k, v, q = parts[:, :, :, head].unbind(2)
        raw = seen @ memory.readout[head].mT + memory.bias[head]
        write, keep = torch.sigmoid(raw).unbind(-1)
        alpha = 1e-4 + (memory.config.retention.most - 1e-4) * keep
        eta = alpha * memory.config.rates.most * write
        theta = memory.first[head, 0]
        weight = memory.second[head, 0].expand(x.shape[0], -1, -1)
        reads = []
        for t in range(x.shape[1]):
            phi, asked = (unit(silu(unit(part[:, t]) @ theta.mT)) for part in (k, q))
            reads.append((weight @ asked.unsqueeze(-1)).squeeze(-1))
            surprise = unit(v[:, t]) - (weight @ phi.unsqueeze(-1)).squeeze(-1)
            # W (alpha I - eta phi phi^T) + eta v phi^T
            weight = alpha[:, t, None, None] * weight + (
                eta[:, t, None, None] * surprise.unsqueeze(-1) * phi.unsqueeze(-2)
            )
        outs.append(torch.stack(reads, 1))
    return memory.shell.close(torch.stack(outs, 1), None)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"rates": {"most": 2.0}}])
@pytest.mark.parametrize("tokens", [1, 8, 11])
def test_it_is_the_delta_rule_on_features(tokens, options):
    memory, x = build(**options), torch.randn(3, tokens, 8, dtype=torch.float64)
    results = []
    for run in (lambda x: memory(x)[0], lambda x: by_tokens(memory, x)):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        inputs = [leaf, *memory.parameters()]
        results.append([y, *torch.autograd.grad(y.sin().sum(), inputs, allow_unused=True)])
    for fast, naive in zip(*results, strict=True):
        if fast is None:  # (one token reads before anything was written)
            assert naive is None or not naive.any()
        else:
            torch.testing.assert_close(fast, naive if naive is not None else fast * 0)


def test_reading_asks_the_layer_that_learns():
    memory, x = build(), torch.randn(2, 9, 8, dtype=torch.float64)
    _, state = memory(x)
    later, _ = memory(x[:, :1], state)
    torch.testing.assert_close(memory.read(x[:, :1], state), later)


@torch.no_grad()
def test_rows_stay_under_the_bound():
    memory = build(retention={"most": 0.9, "start": [0.8, 0.8]})
    _, state = memory(5 * torch.randn(2, 2000, 8, dtype=torch.float64))
    assert (state.weights.first.norm(dim=-1).max() <= memory.bound()).all()


def test_momentum_is_refused():
    with pytest.raises(ValueError, match=r"features=True .* needs momentum=False"):
        TitansConfig(width=8, heads=2, features=True)


def test_a_back_end_is_for_features():
    assert TitansConfig(width=8, heads=2, features=True, momentum=False, backend="chunk")
    with pytest.raises(ValueError, match=r"backend='chunk' is for features=True"):
        TitansConfig(width=8, heads=2, backend="chunk")
    with pytest.raises(ValueError, match="backend must be one of auto, naive"):
        TitansConfig(width=8, heads=2, features=True, momentum=False, backend="cuda")
