"""Learning to learn: the initial states of in-context memories, and levels across steps."""

from __future__ import annotations

import pytest
import torch

from nestling.continuum import Continuum, MemoryLevel, Part, Slot, level_parts, meta_loss, own_slots
from nestling.optim import M3, NestedOptimizer

LEVELS = [MemoryLevel(name="fast", chunk=4, rate=1.0), MemoryLevel(name="slow", chunk=8, rate=1.0)]


def repeated(seed, batch=4):
    """Each sequence repeats two tokens of its own: what was read helps, if it is learned."""
    word = torch.randint(0, 32, (batch, 2), generator=torch.Generator().manual_seed(seed))
    return word.repeat(1, 16)


@pytest.mark.parametrize("meta", ["frozen", "first_order", "reptile"])
def test_hope_is_trained_through_its_in_context_learning(make, meta):
    model = make("hope")
    continuum = Continuum(model, LEVELS, own_slots(model))
    slots = {slot.name for slot in continuum.slots}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss, out = meta_loss(continuum, repeated(step), meta=meta)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        assert len(out.updates) == 7 + 3
    assert losses[-1] < losses[0]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, start[name])}
    assert "model.embed_tokens.weight" in moved
    assert slots <= moved if meta != "frozen" else not (slots & moved)


def test_reptile_pulls_the_initial_weights_to_the_adapted_ones(make, layout):
    model = make("gpt2")
    continuum = Continuum(model, LEVELS, layout["share"](model, 2))
    loss, out = meta_loss(continuum, repeated(1), meta="reptile")
    loss.backward()
    plain, _ = meta_loss(continuum, repeated(1), meta="frozen")
    torch.testing.assert_close(loss, plain)
    for slot in continuum.slots:
        grad = dict(model.named_parameters())[slot.name].grad
        torch.testing.assert_close(grad.mT, -continuum.delta(out.state, slot.name).mean(0))


def test_learned_rates_grow_where_learning_helps(make, layout):
    model = make("gpt2", attn_implementation="eager")
    levels = [MemoryLevel(name=f"l{chunk}", chunk=chunk, rate=0.03) for chunk in (4, 8)]
    continuum = Continuum(model, levels, layout["share"](model, 2), learn_rates=True)
    assert "log_rate" in dict(continuum.named_parameters())
    loss, _ = meta_loss(continuum, repeated(2), meta="second_order")
    loss.backward()
    assert (continuum.log_rate.grad < 0).all()


def test_levels_across_steps_are_the_same_levels(make):
    model = make("hope")
    parts = level_parts(model, LEVELS, own_slots(model), lambda p: M3(p, lr=1e-3))
    assert [level.name for level, _, _ in parts] == ["fast", "slow", "rest"]
    assert sum(len(own) for _, own, _ in parts) == len(list(model.parameters()))
    optimizer = NestedOptimizer(parts)
    changed = {level.name: [] for level, _, _ in parts}
    for step in range(1, 9):
        before = {level.name: own[0].detach().clone() for level, own, _ in parts}
        ids = repeated(step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for level, own, _ in parts:
            if not torch.equal(own[0], before[level.name]):
                changed[level.name].append(step)
    assert changed == {"fast": [4, 8], "slow": [8], "rest": list(range(1, 9))}


def test_across_steps_a_parameter_has_one_level(make, layout):
    model = make("llama")
    with pytest.raises(ValueError, match="belongs to one level, as a whole"):
        level_parts(model, LEVELS, layout["share"](model, 2), torch.optim.SGD)
    with pytest.raises(ValueError, match="does not fit this model"):
        level_parts(model, LEVELS, [Slot("nothing.weight", (Part(0),))], torch.optim.SGD)
