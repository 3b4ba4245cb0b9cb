"""Every memory keeps the contract of `memories.core`: streaming, causality, isolation, padding."""

from __future__ import annotations

import copy

import pytest
import torch

from nestling import memories as m

SIZES = {"width": 12, "heads": 2}
MEMORIES = {
    "attention": lambda: m.Attention(m.AttentionConfig(**SIZES)),
    "attention with convolution": lambda: m.Attention(m.AttentionConfig(**SIZES, conv=3)),
    "window": lambda: m.Attention(m.AttentionConfig(**SIZES, window=5)),
    "window of one": lambda: m.Attention(m.AttentionConfig(**SIZES, window=1)),
    "linear attention": lambda: m.LinearMemory(m.LinearAttentionConfig(**SIZES, chunk=4)),
    "retention": lambda: m.LinearMemory(m.RetentionConfig(**SIZES, chunk=4)),
    "deltanet": lambda: m.LinearMemory(m.DeltaNetConfig(**SIZES, chunk=4, negative=True)),
    "gated delta": lambda: m.LinearMemory(m.GatedDeltaConfig(**SIZES, chunk=4)),
    "oja": lambda: m.LinearMemory(m.OjaConfig(**SIZES, chunk=4)),
    "omega": lambda: m.Omega(m.OmegaConfig(**SIZES, chunk=4, window=3)),
    "titans": lambda: m.Titans(m.TitansConfig(**SIZES, chunk=4)),
    "self-modifying": lambda: m.SelfModifying(_self()),
    "self-modifying l2": lambda: m.SelfModifying(_self(objective="l2", negative=True)),
    "self-modifying deep": lambda: m.SelfModifying(_self(expansion=1, objective="l2")),
    "self-modifying momentum": lambda: m.SelfModifying(_self(momentum=True)),
    "self-modifying two chunks": lambda: m.SelfModifying(_self(chunk=2, chunk_others=8)),
    "self-modifying adaptive q": lambda: m.SelfModifying(
        _self(adaptive=("k", "v", "eta", "alpha", "q"), gate=False, conv=1)
    ),
    "gated delta, convolutions apart": lambda: m.LinearMemory(
        m.GatedDeltaConfig(**SIZES, chunk=4, conv_each=True)
    ),
    "self-modifying, convolutions apart": lambda: m.SelfModifying(_self(conv_each=True)),
    "self-modifying, a head that adds": lambda: m.SelfModifying(_self(adding=1, negative=True)),
    "titans, features": lambda: m.Titans(
        m.TitansConfig(**SIZES, chunk=4, expansion=2, momentum=False, features=True)
    ),
    "titans without momentum": lambda: m.Titans(m.TitansConfig(**SIZES, chunk=4, momentum=False)),
    "self-modifying, tied": lambda: m.SelfModifying(_self(retention={"tied": True})),
    "self-modifying, gates that shut": lambda: m.SelfModifying(
        _self(retention={"tied": True}, rates={"shut": 0.3})
    ),
    "steered": lambda: m.Steered(_steered()),
    "steered, all moved": lambda: m.Steered(_steered(moved=("k", "v", "q", "eta", "alpha"))),
    "steered, one pace, adding": lambda: m.Steered(_steered(pace=(0.2,), erase=False, conv=1)),
    "steered, convolutions apart": lambda: m.Steered(_steered(conv_each=True, gate=False)),
    "steered, static": lambda: m.Steered(_steered(steering=0)),
    "steered, tied": lambda: m.Steered(
        _steered(retention={"tied": True}, rates={"shut": 0.3, "most": 2.0})
    ),
    "stage 2": lambda: m.SelfModifying(_self(own_values=False, read_start=True)),
}


def _self(**options):
    sizes = {**SIZES, "chunk": 4, "chunk_others": 4}
    return m.configure(m.SelfModifyingConfig, **{**sizes, **options})


def _steered(**options):
    return m.configure(m.SteeredConfig, **{**SIZES, "chunk": 4, "steering": 3, **options})


@pytest.fixture(params=list(MEMORIES))
def memory(request):
    """A memory in float64 whose parameters are nowhere special, so that every part matters."""
    torch.manual_seed(0)
    module = MEMORIES[request.param]().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def tokens(batch, length, seed=1):
    return torch.randn(
        batch, length, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def close(a, b, name, tolerance=1e-10):
    torch.testing.assert_close(
        a, b, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )


def equal_states(a, b, tolerance=1e-10):
    for (name, x), (_, y) in zip(m.tree_leaves(a), m.tree_leaves(b), strict=True):
        close(x, y, name, tolerance)


@torch.no_grad()
def test_any_split_of_a_stream_gives_the_same_outputs_and_state(memory):
    x = tokens(2, 23)
    whole, end = memory(x)
    g = torch.Generator().manual_seed(0)
    for _ in range(30):  # 30 partitions of each of the memories: more than 500 in all
        state, reads, at = None, [], 0
        while at < x.shape[1]:
            step = int(torch.randint(1, 11, (), generator=g))
            y, state = memory(x[:, at : at + step], state)
            reads.append(y)
            at += step
        torch.testing.assert_close(torch.cat(reads, 1), whole, rtol=1e-10, atol=1e-10)
        equal_states(state, end)


def test_parameters_get_a_gradient_also_from_a_carried_state(memory):
    """Trained starts get none but zero; processes that share the work wait for it (DDP, FSDP2)."""
    state = m.state_detach(memory(tokens(2, 9))[1])
    memory(tokens(2, 9, seed=2), state)[0].sum().backward()
    assert [name for name, p in memory.named_parameters() if p.grad is None] == []


@torch.no_grad()
def test_outputs_before_a_changed_token_are_bit_identical(memory):
    x = tokens(2, 13)
    before, _ = memory(x)
    for t in range(13):
        changed = x.clone()
        changed[:, t] += 1.0
        after, _ = memory(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        if t < 12 or not getattr(memory, "rule", None):
            assert not torch.equal(after[:, t:], before[:, t:])


@torch.no_grad()
def test_a_batch_is_its_sequences_one_by_one(memory):
    x = tokens(3, 11)
    whole, end = memory(x)
    singles = [memory(x[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(torch.cat([y for y, _ in singles]), whole, rtol=1e-10, atol=1e-12)
    equal_states(m.state_stack([state for _, state in singles]), end)
    equal_states(m.state_select(end, torch.tensor([2])), singles[2][1])


@torch.no_grad()
@pytest.mark.parametrize("where", ["left", "right", "anywhere"])
def test_padding_changes_nothing_for_real_tokens(memory, where):
    """Rows of different lengths, then more tokens at different positions, then a ragged step."""
    lengths, total = [9, 3, 0, 6], 9
    mask = torch.zeros(4, total, dtype=torch.bool)
    for row, n in enumerate(lengths):
        if where == "left":
            mask[row, total - n :] = True
        elif where == "right":
            mask[row, :n] = True
        else:
            mask[row, torch.randperm(total, generator=torch.Generator().manual_seed(row))[:n]] = (
                True
            )
    x, more = tokens(4, total), tokens(4, 7, seed=2)
    again = torch.arange(7) >= torch.tensor([0, 6, 2, 3])[:, None]
    y, state = memory(x, mask=mask)
    y2, state2 = memory(more, state)
    y3, state3 = memory(more, state2, again)
    assert state3.position.tolist() == [n + 7 + k for n, k in zip(lengths, [7, 1, 5, 4])]
    assert not y[~mask].any()
    rows = []
    for row in range(4):
        real = torch.cat([x[row, mask[row]], more[row], more[row, again[row]]])
        want, end = memory(real[None])
        got = torch.cat([y[row, mask[row]], y2[row], y3[row, again[row]]])
        torch.testing.assert_close(got, want[0], rtol=1e-9, atol=1e-10)
        rows.append(end)
    joined = m.state_stack(rows)
    if isinstance(memory, m.Attention) and memory.config.window is None:
        for row, n in enumerate(joined.position):  # what lies behind the position does not count
            torch.testing.assert_close(state3.keys[row, :, :n], joined.keys[row, :, :n])
    else:
        equal_states(state3, joined, 1e-9)


@pytest.mark.parametrize("name", MEMORIES)
def test_every_parameter_gets_a_gradient(name):
    """At the very start of training, where a dead part would stay dead."""
    torch.manual_seed(0)
    fresh = MEMORIES[name]().double()
    y, _ = fresh(tokens(2, 19))
    (y * tokens(2, 19, seed=3)).sum().backward()
    for name, parameter in fresh.named_parameters():
        assert parameter.grad is not None, name
        live = parameter.grad.abs() > 0
        assert live.flatten(1).any(1).all() if parameter.dim() > 1 else live.any(), name


def test_gradients_of_a_split_stream_and_of_padding_are_those_of_the_whole(memory):
    x, weights = tokens(2, 11), tokens(2, 11, seed=5)
    names = [name for name, _ in memory.named_parameters()]

    def gradients(run):
        memory.zero_grad()
        (run() * weights).sum().backward()
        return [parameter.grad.clone() for parameter in memory.parameters()]

    def split():
        first, state = memory(x[:, :5])
        return torch.cat([first, memory(x[:, 5:], state)[0]], 1)

    def padded():
        mask = torch.tensor([[False] * 3 + [True] * 11, [True] * 11 + [False] * 3])
        wide = torch.zeros(2, 14, 12, dtype=torch.float64)
        wide[mask] = x.flatten(0, 1)
        return memory(wide, mask=mask)[0][mask].view(2, 11, 12)

    whole = gradients(lambda: memory(x)[0])
    for other in (split, padded):
        for name, a, b in zip(names, whole, gradients(other), strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-8, atol=1e-9, msg=lambda t, n=name: f"{n}: {t}"
            )


@torch.no_grad()
def test_float32_streams_like_float32(memory):
    memory = copy.deepcopy(memory).float()
    x = tokens(2, 23).float()
    whole, end = memory(x)
    first, state = memory(x[:, :7])
    second, state = memory(x[:, 7:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-5, atol=1e-5)
    equal_states(state, end, 1e-5)


@torch.no_grad()
def test_reading_changes_nothing_and_needs_no_order(memory):
    _, state = memory(tokens(2, 9))
    before = m.tree_map(torch.clone, state)
    x = tokens(2, 5, seed=4)
    y = memory.read(x, state)
    torch.testing.assert_close(memory.read(x.flip(1), state).flip(1), y)
    equal_states(state, before)
    assert y.shape == x.shape
    empty, same = memory(x[:, :0], state)
    assert empty.shape == (2, 0, 12)
    equal_states(same, state)


@torch.no_grad()
def test_bfloat16_tokens_keep_a_float32_memory(memory):
    memory = copy.deepcopy(memory).bfloat16()
    y, state = memory(tokens(2, 9).bfloat16())
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()
    weight = getattr(state, "weights", None)
    if weight is not None:
        assert weight.first.dtype == torch.float32


def test_wrong_inputs_are_named(memory):
    with pytest.raises(ValueError, match=r"takes x of shape \[batch, tokens, 12\]"):
        memory(torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="mask must be bool of shape"):
        memory(tokens(2, 3), mask=torch.ones(2, 3))
    _, state = memory(tokens(2, 3))
    with pytest.raises(ValueError, match="the state holds 2 sequences, x has 3"):
        memory(tokens(3, 3), state)


def test_convolutions_apart_are_the_one_before_if_all_channels_have_its_taps():
    options = {**SIZES, "chunk": 4, "gate": False}  # gates would look at other tokens
    torch.manual_seed(0)
    one = m.LinearMemory(m.LinearAttentionConfig(**options)).double()
    apart = m.LinearMemory(m.LinearAttentionConfig(**options, conv_each=True)).double()
    taps = torch.randn(4, 1, dtype=torch.float64)
    same = {**one.state_dict(), "shell.conv.weight": taps.expand(4, 36)}
    apart.load_state_dict(same)
    with torch.no_grad():
        one.shell.conv.weight.copy_(taps.expand(4, 12))
    x = tokens(2, 11)
    close(one(x)[0], apart(x)[0], "taps of all channels alike")
    with torch.no_grad():
        apart.shell.conv.weight[:, :12] = 0.0  # the first part only: every part has its own
    assert not torch.allclose(one(x)[0], apart(x)[0])
