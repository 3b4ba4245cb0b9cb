"""Eq. 69-70, 74, 94-97: the blocks against the equations written out with torch."""

from __future__ import annotations

import pytest
import torch

from nestling.continuum import Block, Chain, InContext, Parallel
from nestling.levels import Level
from nestling.memories import (
    Attention,
    AttentionConfig,
    SelfModifying,
    SelfModifyingConfig,
)
from nestling.memories.adaptive import AdaptiveMLP

LEVELS = (Level(name="fast", chunk=4), Level(name="slow", chunk=16), Level(name="last", chunk=64))
WIDTH, HEADS = 8, 2


def norm(module, x):
    return module.weight * x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt()


def mlp(module, x):
    return torch.nn.functional.gelu(x @ module.up.weight.T) @ module.down.weight.T


def chain_by_hand(channel, x):
    for before, level in zip(channel.norms, channel.mlps, strict=True):
        x = x + mlp(level, norm(before, x))
    return x


def tokens(batch=2, length=11):
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


@pytest.mark.equation(70)
def test_a_chain_feeds_each_level_with_the_one_before():
    chain, x = Chain(WIDTH, 12, LEVELS).double(), tokens()
    y, state = chain(x)
    assert state == ()
    torch.testing.assert_close(y, chain_by_hand(chain, x))
    with torch.no_grad():
        for level in chain.mlps:
            level.down.weight.zero_()
    assert torch.equal(chain(x)[0], x)  # levels that know nothing pass their input on


@pytest.mark.equation(74)
def test_independent_levels_are_summed_with_learned_weights():
    parallel, x = Parallel(WIDTH, 12, LEVELS).double(), tokens()
    with torch.no_grad():
        parallel.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
    seen = norm(parallel.norm, x)
    expected = x + sum(w * mlp(m, seen) for w, m in zip((0.5, -1.0, 2.0), parallel.mlps))
    y, _ = parallel(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert parallel.weight.grad.abs().min() > 0


@pytest.mark.equation(69)
def test_an_adaptive_transformer_writes_its_mlp_in_context():
    attention = Attention(AttentionConfig(width=WIDTH, heads=HEADS))
    memory = AdaptiveMLP(WIDTH, 12, HEADS)
    block, x = Block(attention, InContext(memory)).double(), tokens()
    after = x + attention(norm(block.norm, x))[0]
    seen = norm(block.channel.norm, after)
    k, q = (
        torch.nn.functional.normalize((seen @ w.weight.T).unflatten(-1, (HEADS, -1)), dim=-1)
        for w in (memory.key, memory.query)
    )
    v = (seen @ memory.value.weight.T).unflatten(-1, (HEADS, -1))
    weight = memory.weight.expand(2, *memory.weight.shape)
    reads = []
    for t in range(x.shape[1]):
        weight = weight + v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)  # M_t = M_{t-1} + v k^T
        reads.append((weight @ q[:, t].unsqueeze(-1)).squeeze(-1))
    read = norm(memory.norm, torch.stack(reads, 1)).flatten(2)
    y, state = block(x)
    torch.testing.assert_close(y, after + read @ memory.out.weight.T)
    torch.testing.assert_close(state.channel.weight, weight)
    asked = memory.read(seen[:, -1:], state.channel)
    torch.testing.assert_close(asked, read[:, -1:] @ memory.out.weight.T)


@pytest.mark.equation(94, 95, 96, 97)
def test_hope_is_self_modifying_titans_and_then_a_continuum_memory():
    titans = SelfModifying(SelfModifyingConfig(width=WIDTH, heads=HEADS, chunk=4, chunk_others=4))
    block, x = Block(titans, Chain(WIDTH, 12, LEVELS)).double(), tokens()
    y, state = block(x)
    reads, memory = titans(norm(block.norm, x))  # Eq. 94-96: o_t and the memories after all tokens
    torch.testing.assert_close(y, chain_by_hand(block.channel, x + reads))  # Eq. 97
    torch.testing.assert_close(state.mixer.weights.first, memory.weights.first)
    torch.testing.assert_close(state.mixer.position, torch.tensor([11, 11]))
