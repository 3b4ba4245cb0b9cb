"""The steered memory is its equation, starts almost static, and stays bounded."""

from __future__ import annotations

import math

import pytest
import torch

from nestling.memories import Steered, SteeredConfig, configure
from nestling.memories.core import same_position
from nestling.memories.steered import read_then_write
from nestling.norm import rms_norm, unit
from nestling.scan.self_modifying.rule import clip
from nestling.tree import tree_leaves

WIDTH, HEADS, SMALL = 12, 2, 3
ALL = ("k", "v", "q", "eta", "alpha")


def build(**options):
    torch.manual_seed(0)
    sizes = {"width": WIDTH, "heads": HEADS, "steering": SMALL, "chunk": 4}
    memory = Steered(configure(SteeredConfig, **{**sizes, **options})).double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return memory


def gates(rule, raw):
    """`alpha`, `eta` of one token from its read-outs [..., 2]: deviations 7, 24 and 25."""
    write, keep = torch.sigmoid(raw).unbind(-1)
    write = torch.relu(write - rule.shut) / (1 - rule.shut)
    kept = 1e-4 + (rule.retain_max - 1e-4) * keep
    alpha = 1 - write * (1 - kept) if rule.tied else kept
    return alpha, alpha * rule.rate_max * write


def by_the_equation(memory, x):
    """Token by token, as the module's docstring reads."""
    config, small, batch = memory.config, memory.small, x.shape[0]
    main, little = (w.expand(batch, *w.shape) for w in (memory.weight, small.weight))
    opened = memory.shell.open(x, memory.init(batch, dtype=x.dtype).tail, None)
    reads, beside = [], []
    for t in range(x.shape[1]):
        token = opened.x[:, t]
        inner = small.inward(token).unflatten(-1, (len(config.pace), -1))  # [B, h, s + 2]
        raw = inner[..., SMALL:]
        kvq = torch.einsum("hij,bhj->bhi", small.project, inner[..., :SMALL])
        k, v, q = kvq.split(SMALL, -1)
        read = torch.einsum("bhij,bhj->bhi", little, unit(q))
        read = rms_norm(read, small.norm, 1e-6)  # the state before this token
        alpha, eta = gates(memory.config.small_rule, raw)
        write = torch.einsum("bhi,bhj->bhij", clip(v, config.clip), unit(k))
        little = alpha[..., None, None] * little + eta[..., None, None] * write
        sizes = [1 if name in ("eta", "alpha") else WIDTH // HEADS for name in config.moved]
        added = {}
        if sizes:  # the first head moves
            moved = small.outward(read[:, 0]).unflatten(-1, (HEADS, -1))
            added = dict(zip(config.moved, moved.split(sizes, -1), strict=True))
        parts = {}
        for name, part in zip(("k", "v", "q"), opened.parts, strict=True):
            parts[name] = part[:, :, t] + added.get(name, 0.0)
        raw = memory.gates(token).unflatten(-1, (HEADS, 2))
        nothing = torch.zeros(batch, HEADS, 1, dtype=x.dtype)
        both = [added.get("eta", nothing), added.get("alpha", nothing)]
        alpha, eta = gates(memory.rule, raw + torch.cat(both, -1))
        reads.append(torch.einsum("bhij,bhj->bhi", main, unit(parts["q"])))
        k, v = unit(parts["k"]), clip(parts["v"], config.clip)
        kept = alpha[..., None, None] * main
        if config.erase:
            said = torch.einsum("bhij,bhj->bhi", main, k)
            kept = kept - eta[..., None, None] * torch.einsum("bhi,bhj->bhij", said, k)
        main = kept + eta[..., None, None] * torch.einsum("bhi,bhj->bhij", v, k)
        beside.append(small.beside(read.flatten(1)))
    y = memory.shell.close(torch.stack(reads, 2), opened.gate)
    return y + torch.stack(beside, 1), main, little


OPTIONS = {
    "default": {},
    "shut more": {"rates": {"most": 2.0, "shut": 0.3, "start": (0.5, 1.5)}},
    "not tied, rates below retention": {
        "retention": {"tied": False},
        "rates": {"most": 1.0, "start": (0.2, 0.4)},
    },
    "all moved, short values": {"moved": ALL, "clip": 0.4},
    "gates only, one pace, no erasing": {
        "moved": ("eta", "alpha"),
        "pace": (0.2,),
        "erase": False,
    },
    "nothing moved": {"moved": ()},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_it_is_the_equation_with_its_gradients(options):
    memory = build(**options)
    x = torch.randn(2, 11, WIDTH, dtype=torch.float64, requires_grad=True)
    taught = [*(p for p in memory.parameters()), x]

    def derived(y, *states):
        flow = torch.Generator().manual_seed(1)
        total = sum(
            (part * torch.randn(part.shape, generator=flow, dtype=part.dtype)).sum()
            for part in (y, *states)
        )
        return torch.autograd.grad(total, taught, allow_unused=True)

    y, state = memory(x)
    naive, main, little = by_the_equation(memory, x)
    torch.testing.assert_close(y, naive, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state.weight, main, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state.small, little, rtol=1e-9, atol=1e-10)
    fast = derived(y, state.weight, state.small)
    slow = derived(naive, main, little)
    for one, other in zip(fast, slow, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_every_parameter_learns_from_the_start():
    torch.manual_seed(0)
    memory = Steered(SteeredConfig(width=WIDTH, heads=HEADS, steering=SMALL))
    memory(torch.randn(2, 20, WIDTH))[0].square().sum().backward()
    still = [name for name, p in memory.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


def test_it_starts_as_configured_and_almost_static():
    torch.manual_seed(0)
    memory = Steered(SteeredConfig(width=32, heads=2))
    found = memory.rule.gates(memory.gates.bias.detach().view(2, 2))
    kept, rate = torch.tensor([0.9998, 0.9]), torch.tensor([0.3 * 0.9998, 1.0 * 0.9])
    torch.testing.assert_close(found.log_retain.exp(), kept, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.rate, rate, rtol=0, atol=1e-4)
    bias = memory.small.inward.bias.detach().view(2, -1)[:, -2:]
    small = memory.small.rule.gates(bias)  # its rates are shares of its retention
    torch.testing.assert_close(small.rate, torch.tensor([0.02, 0.1]), rtol=1e-3, atol=0)
    read = torch.ones(1, 1, len(memory.config.pace) * memory.config.steering)
    moved = memory.small.additions(read)
    assert all(part.abs().max() < 1 for part in moved.values())
    assert memory.small.beside.weight.abs().max() < 0.05


def test_an_option_of_a_group_leaves_the_others_as_they_are():
    usual = SteeredConfig(width=WIDTH, heads=HEADS)
    config = configure(SteeredConfig, width=WIDTH, heads=HEADS, retention={"tied": False})
    assert config.retention.start == usual.retention.start
    assert (config.retention.tied, usual.retention.tied) == (False, True)


def test_the_state_is_a_matrix_a_head_and_two_small_ones():
    memory = build()
    leaves = dict(tree_leaves(memory.init(1)))
    d = WIDTH // HEADS
    assert leaves["weight"].numel() == HEADS * d * d
    assert leaves["small"].numel() == 2 * SMALL * SMALL
    assert dict(tree_leaves(build(steering=0).init(1))).keys() == {"position", "tail", "weight"}


def test_the_small_memory_tells_the_beginning_from_the_end():
    """Its reads point elsewhere after 300 tokens of the same kind: a gate alone cannot know."""
    torch.manual_seed(0)
    memory = Steered(SteeredConfig(width=WIDTH, heads=HEADS, steering=SMALL)).double()
    x = torch.randn(1, 1, WIDTH, dtype=torch.float64).expand(1, 300, -1)
    other = torch.randn(1, 10, WIDTH, dtype=torch.float64)
    text = torch.cat([other, x], 1)
    read, _ = memory.small.run(text, memory.init(1, dtype=x.dtype).small, None)
    assert (read[:, 12] - read[:, -1]).norm() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"most": 2.0}, {"tied": True}, {"erase": False}])
def test_rows_stay_below_the_bound_against_an_adversary(options):
    """Every write is as strong and as long as allowed, and agrees with the row (deviation 8)."""
    given = {"erase": options.get("erase", True), "clip": 2.0}
    given["rates"] = {"most": options.get("most", 1.0), "start": (0.2, 0.2)}
    given["retention"] = {"most": 0.9, "start": (0.99, 0.99), "tied": options.get("tied", False)}
    memory = build(**given, steering=0)
    with torch.no_grad():
        memory.weight.zero_()
    bound = float(memory.bound())
    state = memory.init(1, dtype=torch.float64).weight
    rule, longest = memory.rule, 0.0
    for t in range(400):
        row = state[0, 0, 0]
        sign = torch.ones(()) if rule.erase and t % 2 == 0 else torch.sign(row.sum() + 1e-9)
        key = torch.zeros(1, HEADS, 1, 6, dtype=torch.float64)
        key[..., t % 6] = 1.0
        if t > 50 and row.norm() > 0:
            key[0, 0, 0] = row / row.norm()
            sign = torch.ones(())
        value = torch.zeros(1, HEADS, 1, 6, dtype=torch.float64)
        value[..., 0] = given["clip"] * sign
        found = rule.rate_and_retain(torch.full((1, HEADS, 1, 2), 50.0).double())
        _, state = read_then_write(memory.config, rule.erase, state, key, value, key, *found)
        longest = max(longest, float(state.norm(dim=-1).max()))
    assert 0 < longest <= bound * (1 + 1e-9)
    assert not rule.erase or math.isfinite(bound)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moved": ("v", "k")}, "moved must be some of"),
        ({"moved": ("x",)}, "moved must be some of"),
        ({"pace": (1.5,)}, r"pace must be rates between 0 and 1; got \(1.5,\)"),
        ({"pace": ()}, "pace must be rates between 0 and 1"),
        ({"steering": -1}, "steering must be a whole number of at least 0"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"backend": "gpu"}, "backend must be one of"),
        ({"rate": 1}, "SteeredConfig has no option rate; it has .*steering"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        configure(SteeredConfig, width=WIDTH, heads=HEADS, **options)


TOKEN_OPTIONS = OPTIONS | {
    "one tap, no gate": {"conv": 1, "gate": False},
    "no small memory": {"steering": 0},
}


@torch.no_grad()
@pytest.mark.parametrize("options", TOKEN_OPTIONS.values(), ids=list(TOKEN_OPTIONS))
def test_a_token_read_alone_is_a_token_of_the_whole(options):
    memory = build(**options)
    memory.weight.add_(0.3)
    memory.shell.norm.mul_(torch.rand_like(memory.shell.norm) + 0.5)
    if memory.small is not None:
        memory.small.norm.mul_(torch.rand_like(memory.small.norm) + 0.5)
        memory.small.inward.bias.add_(torch.randn_like(memory.small.inward.bias))
    reader = memory.token_reader()
    x = 3 * torch.randn(2, 7, WIDTH, dtype=torch.float64)  # (values are clipped, too)
    onto = torch.randn_like(x)
    whole, end = memory(x)
    state, parts = memory.init(2, dtype=x.dtype), []
    for t in range(7):
        y, state = reader(x[:, t : t + 1], onto[:, t].clone(), state)
        parts.append(y)
    torch.testing.assert_close(torch.stack(parts, 1), onto + whole, rtol=1e-9, atol=1e-10)
    assert same_position(state.position) == 7
    for (_, found), (_, wanted) in zip(tree_leaves(state), tree_leaves(end), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


def test_options_that_leave_a_token_no_shorter_way():
    assert build().token_reader() is not None
    assert build(backend="naive").token_reader() is None
    assert build(conv_each=True).token_reader() is None
    assert build(clip=math.inf).token_reader() is None
