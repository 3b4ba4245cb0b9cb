"""Any module with a loss: streams of (input, target) pairs, and chunks that grow."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call

from nestling.continuum import Continuum, MemoryLevel, Part, Slot, naive, shared_slots
from nestling.levels import Level

ROOT = Path(__file__).resolve().parents[2]


def squared(outputs, targets):
    return (outputs - targets).square()


def stack(*chunks, rate=0.3):
    return [MemoryLevel(name=f"l{c}", chunk=c, rate=rate / n) for n, c in enumerate(chunks, 1)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def stream_of(batch=2, length=21):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, length, 3, dtype=torch.float64, generator=generator)
    return x, torch.randn(batch, length, 2, dtype=torch.float64, generator=generator)


def by_loops(model, levels, x, y):
    """One stream, weights in the open: every level steps by its chunk's mean gradient."""
    names = [name for name, _ in model.named_parameters() if name.endswith("weight")]
    fast = {
        (n, level.name): torch.zeros_like(model.get_parameter(n)) for n in names for level in levels
    }
    sums = {key: torch.zeros_like(value) for key, value in fast.items()}
    last, outputs = {level.name: 0 for level in levels}, []
    for t in range(len(x)):
        weights = {
            n: (model.get_parameter(n) + sum(fast[n, level.name] for level in levels)).detach()
            for n in names
        }
        leaves = [weight.requires_grad_() for weight in weights.values()]
        out = functional_call(model, weights, (x[t : t + 1],))
        grads = torch.autograd.grad(squared(out, y[t : t + 1]).mean(), leaves)
        outputs.append(out.detach())
        for n, grad in zip(names, grads, strict=True):
            for level in levels:
                sums[n, level.name] += grad
        for level in levels:
            if level.due(t + 1):
                for n in names:
                    mean = sums[n, level.name] / (t + 1 - last[level.name])
                    fast[n, level.name] = level.retain * fast[n, level.name] - level.rate * mean
                    sums[n, level.name] = torch.zeros_like(mean)
                last[level.name] = t + 1
    return torch.cat(outputs), fast


@pytest.mark.parametrize("early", [(), ((4, 2), (8, 4))])
def test_levels_of_any_module_are_the_loops(early):
    model = network()
    levels = stack(4, 6)
    levels[1] = MemoryLevel(name="slow", chunk=8, rate=0.2, retain=0.9, early=early)
    continuum = Continuum(model, levels, shared_slots(model, 2), loss=squared)
    x, y = stream_of()
    out = continuum(x, targets=y)
    for row in range(2):
        outputs, fast = by_loops(model, levels, x[row], y[row])
        torch.testing.assert_close(out.logits[row], outputs)
        for slot in continuum.slots:
            total = sum(fast[slot.name, level.name] for level in levels)
            torch.testing.assert_close(continuum.delta(out.state, slot.name)[row], total)
    state, pieces = None, []
    for a, b in ((0, 3), (3, 4), (4, 15), (15, 21)):
        piece = continuum(x[:, a:b], state, targets=y[:, a:b])
        state = piece.state
        pieces.append(piece)
    torch.testing.assert_close(torch.cat([p.logits for p in pieces], 1), out.logits)
    torch.testing.assert_close(torch.cat([p.losses for p in pieces], 1), out.losses)
    for slot in continuum.slots:
        assert torch.equal(continuum.delta(state, slot.name), continuum.delta(out.state, slot.name))
    frozen = continuum(x, state, targets=y, learn=False)
    assert not frozen.updates
    assert int(frozen.state.start[0]) == 42


def test_images_and_losses_of_any_shape():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 4))
    slots = [Slot("2.weight", (Part(0),))]
    loss = nn.CrossEntropyLoss(reduction="none")
    continuum = Continuum(model, stack(5, rate=0.5), slots, loss=loss)
    x, y = (
        torch.randn(1, 5, 1, 8, 8).repeat(1, 12, 1, 1, 1),
        torch.arange(5).remainder(4).repeat(1, 12),
    )
    out = continuum(x, targets=y)
    assert out.losses[0, -5:].mean() < 0.5 * out.losses[0, :5].mean()
    with torch.no_grad():
        again = continuum(x[:, :5], out.state, targets=y[:, :5], learn=False)
    assert again.losses.mean() < out.losses[0, :5].mean()


def test_second_order_goes_through_every_update():
    model = network()
    continuum = Continuum(model, stack(3), shared_slots(model, 1), loss=squared)
    x, y = stream_of(1, 8)
    names = [slot.name for slot in continuum.slots]
    start = [model.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def loss(*weights):
        given = {f"model.{n}": w for n, w in zip(names, weights, strict=True)}
        options = {"targets": y, "meta": "second_order"}
        return functional_call(continuum, given, (x,), options).losses.mean()

    assert torch.autograd.gradcheck(loss, start)


def test_mistakes_are_named():
    model = network()
    slots = shared_slots(model, 1)
    with pytest.raises(ValueError, match="Sequential is no language model: give a loss"):
        Continuum(model, stack(4), slots)
    with pytest.raises(ValueError, match="context and segment belong to token streams"):
        Continuum(model, stack(4), slots, loss=squared, context=8)
    continuum, (x, y) = Continuum(model, stack(4), slots, loss=squared), stream_of()
    with pytest.raises(ValueError, match="give targets="):
        continuum(x)
    with pytest.raises(ValueError, match=r"\[batch, pairs, ...\]"):
        continuum(x, targets=y[:, :3])
    reduced = Continuum(model, stack(4), slots, loss=nn.MSELoss())
    with pytest.raises(ValueError, match=r"one loss per example .* got the shape \(\)"):
        reduced(x, targets=y)
    with pytest.raises(ValueError, match="has no linear layer"):
        shared_slots(nn.Conv2d(1, 1, 1), 1)


def test_chunks_that_grow():
    level = Level(name="a", chunk=16, early=((8, 2), (16, 4)))
    due = [p for p in range(65) if level.due(p)]
    assert due == [2, 4, 6, 8, 12, 16, 32, 48, 64]
    at = 0
    for want in due:
        at = level.next_due(at)
        assert at == want
    for wrong in (((8, 3),), ((8, 2), (4, 2)), ((0, 1),)):
        with pytest.raises(ValueError, match="early"):
            Level(name="a", chunk=16, early=wrong)
    levels = [MemoryLevel(name="a", chunk=2, early=((4, 1),)), MemoryLevel(name="b", chunk=4)]
    model = network()
    with pytest.raises(ValueError, match="no early"):
        Continuum(model, levels, shared_slots(model, 2), loss=squared, transfer="reptile")


def test_tokens_with_chunks_that_grow_are_the_naive_loops(make, layout, ids):
    model = make("llama", num_hidden_layers=1).double()
    levels = [
        MemoryLevel(name="fast", chunk=8, rate=0.5, early=((8, 2), (16, 4))),
        MemoryLevel(name="slow", chunk=16, rate=0.3),
    ]
    slots = layout["share"](model, 2)
    out, want = Continuum(model, levels, slots)(ids), naive(model, levels, slots, ids)
    torch.testing.assert_close(out.logits, want.logits.detach())
    assert [u.position for u in out.updates if u.level == "fast"] == [
        2,
        4,
        6,
        8,
        12,
        16,
        24,
        32,
        40,
    ]


def test_the_example_shows_levels_that_follow_and_levels_that_keep():
    example = runpy.run_path(str(ROOT / "examples" / "drifting_regression.py"))
    losses = example["run"](steps=400)
    assert losses["two levels"] < 0.8 * losses["frozen"]
