"""Natural steps: the gradient times the inverse second moment of a slot's inputs."""

from __future__ import annotations

import copy

import pytest
import torch

from nestling.continuum import Continuum, naive, own_slots
from nestling.continuum.natural import DAMPING, PACE, InputMoments, natural_step
from nestling.models import NestlingConfig, NestlingForCausalLM
from nestling.tree import tree_leaves

LEVELS = (
    {"name": "fast", "chunk": 4, "rate": 0.5},
    {"name": "slow", "chunk": 8, "rate": 0.3, "retain": 0.9},
)


def model_of(natural=True, topology="parallel", dtype=torch.float64, **fields):
    torch.manual_seed(0)
    config = NestlingConfig(
        vocab_size=13,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=6,
        mixer="deltanet",
        levels=[dict(level) for level in LEVELS],
        topology=topology,
        natural=natural,
        pad_token_id=0,
        **fields,
    )
    return NestlingForCausalLM(config).to(dtype)


def tokens(batch=2, length=23, seed=1):
    return torch.randint(1, 13, (batch, length), generator=torch.Generator().manual_seed(seed))


def taught(**options):
    """A model that has seen some text in training, so that its moments are not white."""
    model = model_of(**options).train()
    for seed in range(3):
        ids = tokens(seed=seed)
        model(ids, labels=ids)
    return model.eval()


def test_the_inverse_is_that_of_the_damped_relative_moment():
    moments = InputMoments(5, 3, 2, shared=False).double()
    x = torch.randn(40, 5, dtype=torch.float64) * torch.tensor([3.0, 1.0, 1.0, 0.1, 0.1])
    moments.observe("inputs", 1, x)
    eye = torch.eye(5, dtype=torch.float64)
    want = (1 - PACE) * eye + PACE * sum(row[:, None] * row[None] for row in x) / 40
    torch.testing.assert_close(moments.inputs[1], want)
    relative = want / want.diagonal().mean() + DAMPING * eye
    torch.testing.assert_close(moments.inverse("inputs", 1) @ relative, eye)
    torch.testing.assert_close(moments.inverse("inputs", 0), eye / (1 + DAMPING))
    torch.testing.assert_close(moments.inputs[0], eye)


def test_moments_of_numbers_that_are_not_finite_are_left_out():
    moments = InputMoments(3, 3, 1, shared=True)
    before = moments.inputs.clone()
    moments.observe("inputs", 0, torch.tensor([[1.0, float("nan"), 2.0]]))
    assert torch.equal(moments.inputs, before)


@pytest.mark.parametrize("topology", ["chain", "parallel"])
def test_the_model_is_the_continuum_outside_and_the_naive_loops(topology):
    model, ids = taught(topology=topology), tokens(seed=9)
    levels = model.config.memory_levels
    slots = own_slots(model)
    with torch.no_grad():
        out = model(ids, use_cache=True)
    outside = Continuum(model, levels, slots, natural=True)(ids)
    assert torch.equal(out.logits, outside.logits)
    plain = Continuum(model, levels, slots)(ids)
    assert not torch.allclose(plain.logits, out.logits)
    (state,) = out.past_key_values.learned.states
    for row in range(2):
        alone = naive(
            model, levels, slots, ids[row : row + 1], natural=lambda name: natural_step(model, name)
        )
        torch.testing.assert_close(out.logits[row : row + 1], alone.logits.detach())
        for level, fasts in zip(state.levels, alone.fast, strict=True):
            for mine, its in zip(level.fast, fasts, strict=True):
                torch.testing.assert_close(mine[row], its.detach())


def test_training_learns_the_moments_and_reading_does_not():
    model = model_of().train()
    channel = model.model.layers[0].channel
    before = channel.moments.inputs.clone()
    ids = tokens()
    model.eval()(ids)
    assert torch.equal(channel.moments.inputs, before)
    model.train()(ids, labels=ids).loss.backward()
    seen = channel.moments.inputs.clone()
    assert not torch.equal(seen, before)
    # the first segment's normed inputs, by hand
    twin = model_of()
    normed = []
    hook = twin.model.layers[0].channel.norm.register_forward_hook(
        lambda module, given, made: normed.append(made.detach())
    )
    twin(ids[:, :4], learn=False)
    hook.remove()
    rows = normed[0].flatten(0, 1)
    want = (1 - PACE) * before[0] + PACE * rows.mT @ rows / len(rows)
    torch.testing.assert_close(seen[0], want)


def test_the_outer_gradient_is_that_of_the_naive_loops():
    model, ids = taught(), tokens(seed=9)
    twin = copy.deepcopy(model)
    slots = own_slots(twin)
    count = ids[:, 1:].numel()
    total = 0.0
    for row in range(len(ids)):
        run = naive(
            twin, twin.config.memory_levels, slots, ids[row : row + 1], outer=True,
            natural=lambda name: natural_step(twin, name).detach(),
        )  # fmt: skip
        total = total + run.losses.sum() / count
    total.backward()
    channels = [layer.channel.moments for layer in model.model.layers]
    kept = [(m.inputs.clone(), m.hidden.clone()) for m in channels]
    model.train()
    for moments in channels:
        moments.observe = lambda *args: None  # the loops do not observe either
    model(ids, labels=ids).loss.backward()
    assert all(
        torch.equal(m.inputs, i) and torch.equal(m.hidden, h)
        for m, (i, h) in zip(channels, kept, strict=True)
    )
    for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, msg=name)


def test_any_split_of_a_stream_gives_the_same():
    model, ids = taught(), tokens(length=40, seed=5)
    with torch.no_grad():
        whole = model(ids, use_cache=True)
        cache, logits = None, []
        for part in ids.split([1, 2, 9, 4, 24], 1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits)
    mine, its = (tree_leaves(c.learned.states) for c in (cache, whole.past_key_values))
    for (name, one), (_, two) in zip(mine, its, strict=True):
        torch.testing.assert_close(one, two, msg=name)


def test_a_saved_model_keeps_its_moments(tmp_path):
    model = taught(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    again = NestlingForCausalLM.from_pretrained(tmp_path)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, again.get_buffer(name)), name
    ids = tokens(seed=9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again.eval()(ids).logits)


def test_a_channel_without_moments_says_so():
    with pytest.raises(ValueError, match="natural=False"):
        natural_step(model_of(natural=False), "model.layers.0.channel.mlps.0.up.weight")
    plain = model_of(natural=False)
    with pytest.raises(ValueError, match="natural=False"):
        Continuum(plain, plain.config.memory_levels, own_slots(plain), natural=True)
