"""Torch's demands on a module: masks with rubbish under them, compilers, meta tensors, devices,
`torch.func`, and no waiting for the device where the answer is known."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nestling import memories as m
from nestling.models import NestlingForCausalLM, presets
from nestling.scan.delta.kernel import segments

SIZES = {"width": 12, "heads": 2}
OWN = {**SIZES, "chunk": 4, "chunk_others": 4}


def hope(**options):
    return m.SelfModifying(m.configure(m.SelfModifyingConfig, **{**OWN, **options}))


MEMORIES = {
    "attention": lambda: m.Attention(m.AttentionConfig(**SIZES)),
    "window": lambda: m.Attention(m.AttentionConfig(**SIZES, window=5)),
    "gated delta": lambda: m.LinearMemory(m.GatedDeltaConfig(**SIZES, chunk=4)),
    "oja": lambda: m.LinearMemory(m.OjaConfig(**SIZES, chunk=4)),
    "omega": lambda: m.Omega(m.OmegaConfig(**SIZES, chunk=4, window=3)),
    "titans": lambda: m.Titans(m.TitansConfig(**SIZES, chunk=4)),
    "titans without momentum": lambda: m.Titans(m.TitansConfig(**SIZES, chunk=4, momentum=False)),
    "hope": hope,
    "hope, deep": lambda: hope(expansion=1, residual=False),
    "hope, tied": lambda: hope(retention={"tied": True}),
}
CARRIED = [name for name in MEMORIES if name not in ("attention", "window")]


def build(name, dtype=torch.float64):
    torch.manual_seed(0)
    return MEMORIES[name]().to(dtype)


def tokens(batch, length, seed=1, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 12, generator=g, dtype=torch.float64).to(dtype)


MASK = torch.tensor(
    [[False, False, True, True, True, True], [True, False, True, False, True, False]]
)


@torch.no_grad()
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("name", MEMORIES)
def test_what_stands_at_masked_positions_does_not_matter(name, rubbish):
    memory, x = build(name), tokens(2, 6)
    want, end = memory(x, mask=MASK)
    spoiled = torch.where(MASK.unsqueeze(-1), x, rubbish)
    got, state = memory(spoiled, mask=MASK)
    assert torch.equal(got, want)
    for (part, a), (_, b) in zip(m.tree_leaves(end), m.tree_leaves(state), strict=True):
        assert torch.equal(a, b), part


@pytest.mark.parametrize("name", ["gated delta", "hope", "titans"])
def test_rubbish_under_the_mask_spoils_no_gradient(name):
    memory = build(name)
    x = torch.where(MASK.unsqueeze(-1), tokens(2, 6), torch.nan)
    memory(x, mask=MASK)[0].square().sum().backward()
    for part, parameter in memory.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), part


@torch.no_grad()
@pytest.mark.parametrize("logit", [-80.0, -110.0, -1000.0])
def test_omega_forgets_everything_and_goes_on(logit):
    memory, x = build("omega", torch.float32), tokens(2, 9, dtype=torch.float32)
    memory.gates.retain.bias.fill_(logit)
    y, state = memory(x)
    assert y.isfinite().all()
    assert state.weight.isfinite().all()
    _, late = memory(x[:, -4:], memory(x[:, :5])[1])
    torch.testing.assert_close(late.weight, state.weight)


class Waiting(TorchDispatchMode):
    """Counts how often a number is asked back from the device."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.asked += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("start", [None, "different positions"])
@pytest.mark.parametrize("name", CARRIED)
def test_tokens_of_a_stream_do_not_wait_for_the_device(name, start, monkeypatch):
    """Neither where all sequences stand together, nor where they are known not to."""
    memory, x = build(name), tokens(2, 8)
    _, state = memory(x[:, :6], mask=None if start is None else MASK)
    _, state = memory(x[:, :1], state)  # the first one asks where a mask left it open
    told = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: told.append(self))
    with Waiting() as mode:
        for at in range(4):
            _, state = memory(x[:, at : at + 1], state)
    if name.startswith("titans") and start:
        return  # (its padding is laid out anew, which asks)
    if start and name in ("hope, deep",):
        return
    assert (mode.asked, len(told)) == (0, 0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["hope", "titans", "omega"])
def test_a_known_position_is_the_position(name):
    memory, x = build(name), tokens(3, 7)
    _, state = memory(x)
    for part in (state, m.state_select(state, torch.tensor([2, 0])), copy.deepcopy(state)):
        _, after = memory(x[: part.position.shape[0], :2], part)
        assert after.position.tolist() == [9] * part.position.shape[0]
    mixed = m.state_stack([m.state_select(state, torch.tensor([0])), memory(x[:1, :2])[1]])
    y, after = memory(x[:2], mixed)
    assert after.position.tolist() == [14, 9]
    torch.testing.assert_close(y[1], memory(x[1:2], memory(x[:1, :2])[1])[0][0])


@torch.no_grad()
def test_generation_with_two_chunks_stays_on_its_device():
    """A tensor made without a device ended it on any but the CPU; meta tensors tell that too."""
    memory = hope(chunk=2, chunk_others=4).to("meta")
    state = memory.init(2)
    for _ in range(5):
        y, state = memory(torch.empty(2, 1, 12, device="meta"), state)
    assert y.is_meta
    assert state.start.first.is_meta


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_segments_are_cut_for_a_cache_on_cpus_only(device):
    cut = list(segments(torch.empty(64, 2048, 64, device=device), 64, 64))
    assert sum(segment.chunks for segment in cut) == 32
    assert len(cut) == (32 if device == "cpu" else 1)


@pytest.mark.parametrize("name", ["hope", "titans", "deltanet"])
def test_a_model_runs_on_the_meta_device(name):
    with torch.device("meta"):
        model = NestlingForCausalLM(presets.tiny(model=name))
    ids = torch.zeros(2, 100, dtype=torch.int64, device="meta")
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits
    assert logits.shape == (2, 100, model.config.vocab_size)
    assert logits.is_meta
    logits.sum().backward()
    assert model(ids, labels=ids).loss.is_meta  # where nothing is known, no level learns
    assert model.eval()(ids).logits.is_meta


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["hope", "titans", "titans without momentum", "hope, deep"])
def test_one_graph_for_a_whole_memory(name, masked):
    """fullgraph=True raises where the graph would break; values and gradients are eager's."""
    memory, x = build(name), tokens(2, 6)
    mask = MASK if masked else None
    compiled = torch.compile(memory, fullgraph=True, backend="aot_eager")
    found, grads = [], []
    for function in (memory, compiled):
        memory.zero_grad()
        y, state = function(x, None, mask)
        (y.square().sum() + state.weights.first.sum()).backward()
        found.append(y.detach())
        grads.append([parameter.grad.clone() for parameter in memory.parameters()])
    torch.testing.assert_close(*found)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["hope", "hope_printed"])
def test_one_graph_for_a_model_with_an_attention_mask(name):
    torch.manual_seed(0)
    chunks = {"chunk": 4, "chunk_others": 4} if name == "hope_printed" else {"chunk": 4}
    options = {presets.MODELS[name]["mixer"]: chunks}
    config = presets.tiny(model=name, num_hidden_layers=1, mixer_options=options, learning="plain")
    model = NestlingForCausalLM(config)  # (levels that learn break the graph: docs/models.md)
    ids, mask = torch.randint(0, 200, (2, 6)), MASK.long()
    want = model(ids, attention_mask=mask, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = compiled(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[MASK], want[MASK])


@pytest.mark.parametrize("name", CARRIED)
def test_transforms_of_torch_func(name):
    """`grad` and `vmap(grad)` of a memory are what autograd finds, one sequence at a time."""
    memory, x = build(name), tokens(3, 6)
    parameters = dict(memory.named_parameters())

    def loss(given, one):
        return torch.func.functional_call(memory, given, (one.unsqueeze(0),))[0].square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        want = torch.autograd.grad(loss(parameters, x[i]), list(parameters.values()))
        found = torch.func.grad(loss)(parameters, x[i])
        for (part, grads), a in zip(each.items(), want, strict=True):
            torch.testing.assert_close(found[part], a, msg=lambda t, n=part: f"{n}: {t}")
            torch.testing.assert_close(grads[i], a, msg=lambda t, n=part: f"{n}: {t}")
