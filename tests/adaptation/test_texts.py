"""Whole texts: learned in natural steps, measured, refused, undone, exported."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import tiny
from transformers import LlamaConfig, LlamaForCausalLM

import nestling
from nestling.adaptation import DriftWarning, Limits, memory_files
from nestling.adaptation.metric import measure_metric
from nestling.adaptation.own_text import own_texts, sample_text
from nestling.continuum.fast import Reading
from nestling.files import load_record, save_record
from nestling.losses import pair_losses
from tests.scripts import benchmark


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(seed))


def phrase(seed: int = 0, count: int = 130) -> torch.Tensor:
    return tokens(12, seed).repeat(count // 12 + 1)[:count]


def natural(model=None, **options):
    """Steps long enough for models of a few thousand weights, and no limit on forgetting."""
    return nestling.adapt(
        tiny() if model is None else model,
        [16, 64],
        rule="natural",
        rate=[30.0, 0.0],
        rank=6,
        layers=None,
        limits=Limits(forget=math.inf),
        **options,
    )


def test_the_defaults_are_small_and_teach():
    model = tiny(vocab=256)
    learner = nestling.adapt(model)
    assert [level.chunk for level in learner.levels] == [64, 512]
    assert all(slot.name.endswith("down_proj.weight") for slot in learner.continuum.slots)
    report = learner.learn(phrase(), name="phrase")
    assert report.passes == 4
    assert report.text[1] < report.text[0]
    assert report.own[1] - report.own[0] < 0.1
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    sizes = learner.size()
    kept = sum(sizes[level.name] for level in learner.levels) + sizes["undo"]
    assert 0 < kept <= 0.02 * whole
    assert "loss on the text" in str(report)
    assert "on the model's own text" in str(report)


def test_a_saved_memory_takes_two_percent_of_the_model(tmp_path):
    """All files of the folder, after more texts than can be undone."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}
    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, **sizes)
    model = LlamaForCausalLM(config).eval()
    learner = nestling.adapt(model)
    for seed in range(3):
        learner.learn(tokens(600, seed), name=str(seed), passes=1)
    learner.save(tmp_path / "memory")
    kept = sum(path.stat().st_size for path in (tmp_path / "memory").iterdir())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert 0.005 * whole < kept <= 0.02 * whole


def test_a_sample_of_the_models_own_is_the_same_every_time():
    model = tiny()
    one, two = (sample_text(model, rows=3, length=12) for _ in range(2))
    assert one.shape == (3, 12)
    assert torch.equal(one, two)
    assert not torch.equal(one, sample_text(model, rows=3, length=12, seed=1))
    assert bool((one[:, 0] == 1).all())  # BOS
    with pytest.raises(ValueError, match="a row and 2 tokens at least"):
        sample_text(model, rows=0)


def test_a_natural_step_is_the_inverse_moment_and_costs_its_budget():
    """`G A^-1 / s` by matrices, scaled to the budget, is what the pairs make."""
    model = tiny().double()
    engine = nestling.adapt(model, [8], rate=0.1).continuum.engine
    own = own_texts(model).measured
    metric = measure_metric(engine, own, budget=1e-3, size=1000)
    found = []
    for row in own.split(1):
        with torch.enable_grad(), (reading := Reading(engine.live(engine.init(1)), 1, record=True)):
            logits = model(input_ids=row[:, :-1]).logits
        loss = pair_losses(logits, row[:, 1:]).sum()
        found.append(engine.surprises(reading, loss, graph=False, keep=False))
    segment = found[0]
    mapped = metric(segment)
    price, steps = 0.0, []
    for number, (x, surprise) in enumerate(segment):
        inputs = torch.cat([each[number][0][0] for each in found])
        scale = torch.cat([each[number][1][0] for each in found]).square().mean()
        moment = inputs.mT @ inputs / len(inputs)
        moment = moment + 0.1 * moment.diagonal().mean() * torch.eye(len(moment)).double()
        gradient = (surprise[0].mT @ x[0]) / x.shape[1]
        steps.append(gradient @ moment.inverse() / scale)
        price += float((gradient * steps[-1]).sum())
    share = math.sqrt(2 * 1e-3 / price)
    for (x, surprise), step in zip(mapped, steps):
        made = (surprise[0].mT @ x[0]) / x.shape[1]
        assert torch.allclose(made, share * step, rtol=1e-6, atol=1e-12)


def test_natural_steps_forget_less_than_gradient_descent_at_the_same_loss():
    model, text = tiny(seed=3), phrase(5)
    own = own_texts(model).held_out

    def loss(learner):
        return float(pair_losses(learner(own[:, :-1]).logits, own[:, 1:]).mean())

    frozen = loss(nestling.adapt(model, [16], rate=0.0))
    steps = natural(model)
    goal = steps.learn(text, name="a", passes=6).text[1]
    plain = nestling.adapt(model, [16], rate=0.3, matrices="closing")
    for _ in range(60):
        if plain.learn(text, passes=1).text[1] <= goal:
            break
    assert plain.score(text) <= goal
    assert loss(steps) - frozen < loss(plain) - frozen


def test_the_end_of_a_text_is_learned_too():
    """20 tokens in chunks of 16: the last ones used to be dropped."""
    learner = nestling.adapt(tiny(), [16], rate=0.5)
    report = learner.learn(phrase(count=20), name="short", passes=1)
    assert len(report.updates) == 2
    assert learner.state.tokens.shape[1] == 0
    stream = nestling.adapt(tiny(), [16], rate=0.5)
    assert len(stream.learn(phrase(count=20)).updates) == 1


def test_one_text_can_be_undone():
    model, ids = tiny(), tokens(20, 5)
    learner = natural(model)
    learner.learn(phrase(1), name="a")
    after_a = learner(ids[None]).logits
    learner.learn(phrase(2), name="b")
    assert [text.name for text in learner.texts] == ["a", "b"]
    known = learner.score(phrase(2))
    assert learner.undo() == "b"
    assert torch.equal(learner(ids[None]).logits, after_a)  # to the bit: nothing came after it
    learner.learn(phrase(2), name="b")
    frozen = nestling.adapt(model, [16], rate=0.0)
    learned = learner.score(phrase(1))
    learner.undo("a")  # b stays
    assert learner.score(phrase(1)) > (learned + frozen.score(phrase(1))) / 2
    assert learner.score(phrase(2)) < (known + frozen.score(phrase(2))) / 2
    with pytest.raises(ValueError, match="no text 'a' that can be undone; there are 'b'"):
        learner.undo("a")


def test_undo_and_learning_go_on_after_loading(tmp_path):
    model = tiny()
    learner = natural(model)
    learner.learn(phrase(1), name="a")
    before = learner.score(phrase(1))
    learner.learn(phrase(2), name="b")
    learner.save(tmp_path)
    again = nestling.load_learner(model, tmp_path)
    assert torch.equal(again(phrase()[None]).logits, learner(phrase()[None]).logits)
    assert again.undo("b") == "b"
    assert again.score(phrase(1)) == pytest.approx(before, abs=0.02)
    free = Limits(forget=math.inf)
    one, two = (nestling.load_learner(model, tmp_path, limits=free) for _ in range(2))
    for each in (one, two):
        each.learn(phrase(3), name="c")
    assert torch.equal(one(phrase()[None]).logits, two(phrase()[None]).logits)


def test_a_text_whose_learning_was_stopped_is_undone_whole(tmp_path):
    """The part learned before the stop goes, too; it used to stay."""
    model, ids = tiny(), tokens(20, 5)[None]
    learner = nestling.adapt(model, [8], rate=0.1)
    learner.learn(phrase(2), name="first")
    before = learner(ids).logits
    learner.begin_text("second")
    learner.learn(phrase(3, 64))
    learner.save(tmp_path, context=True)  # and here it is stopped
    again = nestling.load_learner(model, tmp_path)
    assert again.begun is not None
    assert again.begun.name == "second"
    assert [text.name for text in again.texts] == ["first"]
    again.begin_text("second", go_on=True)
    again.learn(phrase(3, 64))
    again.end_text(phrase(3, 128))
    assert not torch.allclose(again(ids).logits, before, atol=1e-2)
    assert again.undo() == "second"
    assert torch.allclose(again(ids).logits, before, atol=1e-2)


def test_a_text_that_spoils_what_was_known_is_refused():
    learner = nestling.adapt(tiny(), [8], rate=0.5, limits=Limits(forget=0.3))
    learner.learn(phrase(1), name="mine")
    mine = learner.score(phrase(1))
    with pytest.warns(DriftWarning, match="loss of an earlier text.*the text 'poison' is not"):
        report = learner.learn(tokens(250, 9), name="poison")
    assert report.refused
    assert learner.score(phrase(1)) == mine
    assert [text.name for text in learner.texts] == ["mine"]
    twin = nestling.adapt(tiny(), [8], rate=0.5, limits=Limits(forget=0.3))  # never saw the poison
    twin.learn(phrase(1), name="mine")
    for each in (learner, twin):  # and goes on from the last good state
        each.learn(phrase(1), name="mine again")
    assert learner.score(phrase(1)) == twin.score(phrase(1))


def test_a_poisoned_text_is_undone_within_five_percent():
    learner = nestling.adapt(tiny(), [8], rate=0.5, limits=Limits(forget=math.inf))
    learner.learn(phrase(1), name="mine")
    mine = learner.score(phrase(1))
    learner.learn(tokens(250, 9), name="poison")
    assert learner.score(phrase(1)) > mine + 0.3
    learner.undo("poison")
    assert learner.score(phrase(1)) == pytest.approx(mine, rel=0.05)


def test_a_stream_that_spoils_what_was_known_is_refused():
    """250 tokens without a name used to spoil a memory without an alarm."""
    alarms = []
    free, learner = (
        nestling.adapt(tiny(), [8], rate=0.5, limits=Limits(forget=limit), on_alarm=alarms.append)
        for limit in (math.inf, 0.3)
    )
    for each in (free, learner):
        each.learn(phrase(1), name="mine")
    mine, position = learner.score(phrase(1)), learner.position
    free.learn(tokens(250, 9))
    assert free.score(phrase(1)) > mine + 0.3
    with pytest.warns(DriftWarning, match="loss of an earlier text.* rolled back to position"):
        report = learner.learn(tokens(250, 9))
    assert report.refused
    assert alarms == report.alarms
    assert learner.score(phrase(1)) == mine
    assert learner.position == position
    learner.learn(phrase(1))  # and goes on from the last good state
    assert learner.score(phrase(1)) < mine


def test_a_stream_is_judged_by_where_it_began_however_it_is_cut():
    """Pieces that each spoil less than the limit do not add up to more."""
    learner = nestling.adapt(tiny(), [8], rate=0.1, limits=Limits(forget=0.3))
    learner.learn(phrase(1), name="mine")
    probe = learner.probes[0]
    known, rises, refused = learner.score(probe), [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        for piece in tokens(1600, 9).split(16):
            before = learner.score(probe)
            refused += learner.learn(piece).refused
            rises.append(learner.score(probe) - before)
    assert refused
    assert max(rises) < 0.3
    assert learner.score(probe) <= known + 0.3
    learner.new_text()  # the user goes on: another text, with a limit of its own
    assert not learner.learn(phrase(1)).refused


def test_a_text_of_the_users_own_is_watched(tmp_path):
    """Who only streams has no earlier texts: what is watched is not learned, and guards."""
    model, mine = tiny(), phrase(1)
    learner = nestling.adapt(model, [8], rate=0.5, limits=Limits(forget=0.3))
    learner.learn(mine)
    assert not learner.learn(tokens(100, 8)).refused  # nothing to judge it by
    learner.rollback(1)
    before = learner(mine[None]).logits
    loss = learner.watch(mine[:100])
    assert loss == learner.score(mine[:100])
    assert torch.equal(learner(mine[None]).logits, before)
    learner.save(tmp_path)
    again = nestling.load_learner(model, tmp_path, limits=Limits(forget=0.3))
    for each in (learner, again):
        with pytest.warns(DriftWarning, match="loss of a text that is watched"):
            assert each.learn(tokens(250, 9)).refused
        with pytest.warns(DriftWarning, match="watched.*the text 'poison' is not learned"):
            assert each.learn(tokens(250, 9), name="poison").refused
        assert each.score(mine[:100]) == pytest.approx(loss, abs=1e-6)
        for seed in range(9):  # texts come and go, what is watched stays
            each.limits = Limits(forget=math.inf)
            each.learn(phrase(seed, 30), name=str(seed), passes=1)
        assert torch.equal(each.probes[0], mine[:100])
        assert len(each.probes) == 9
    for _ in range(7):
        learner.watch(mine)
    with pytest.raises(ValueError, match="at most 8 texts can be watched"):
        learner.watch(mine)
    learner.reset()
    assert not learner.watched
    assert not learner.probes
    with pytest.raises(ValueError, match="at least 2 tokens"):
        learner.watch(mine[:1])


@pytest.mark.parametrize(
    "probes", [(torch.zeros(3, 4).long(),), (torch.zeros(5),), (None,), torch.zeros(5).long()]
)
def test_a_memory_with_texts_that_are_none_is_refused(tmp_path, probes):
    """A right checksum, but what should be token ids is not: learning used to fail later."""
    model = tiny()
    learner = nestling.adapt(model, [8], rate=0.1)
    learner.learn(phrase(1), name="mine")
    learner.save(tmp_path)
    where = tmp_path, memory_files.NAME, memory_files.KIND
    tree, facts = load_record(*where, memory_files._types(learner.continuum))
    save_record(*where, tree._replace(probes=probes), facts)
    with pytest.raises(ValueError, match=r"not token ids|no list of texts"):
        nestling.load_learner(model, tmp_path)
    save_record(*where, tree, facts | {"watched": 2})
    with pytest.raises(ValueError, match="its texts and its description do not agree"):
        nestling.load_learner(model, tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_loads_an_export_with_equal_logits(family, tmp_path):
    peft = pytest.importorskip("peft")
    model, ids = tiny(family), tokens(30, 5)[None]
    learner = natural(model)
    with pytest.raises(ValueError, match="nothing was learned yet"):
        learner.export_peft(tmp_path)
    learner.learn(phrase(), name="a")
    learner.export_peft(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(tiny(family), tmp_path).eval()
    with torch.no_grad():
        found = loaded(ids).logits
    assert torch.allclose(found, learner(ids).logits, atol=2e-5)
    assert not torch.allclose(found, model(ids).logits, atol=1e-2)
    full = nestling.adapt(model, [8], rate=0.1)
    full.learn(phrase())
    with pytest.raises(ValueError, match="full matrices, which no LoRA can hold"):
        full.export_peft(tmp_path)


def test_second_order_learns_on_after_loading(tmp_path):
    """It used to raise "does not require grad"."""
    model, ids = tiny(), tokens(20, 5)[None]
    learner = nestling.adapt(model, [8, 32], rate=0.1, transfer="second_order")
    learner.learn(tokens(50))
    learner.save(tmp_path)
    again = nestling.load_learner(model, tmp_path)
    assert torch.equal(again(ids).logits, learner(ids).logits)
    report = again.learn(tokens(100, 1))
    assert report.updates
    assert not torch.equal(again(ids).logits, learner(ids).logits)


def test_jobs_in_threads_equal_jobs_in_turn():
    """All kinds at once, second order included; `benchmarks/users.py` runs a thousand."""
    assert benchmark("users").jobs(16) == []


def test_poisoned_streams_stay_where_they_are():
    """`benchmarks/users.py` runs five hundred."""
    ends, failures = benchmark("users").poisoned(12, seed=1)
    assert not failures, failures
    assert ends["undone"] + ends["rolled back"] + ends["refused"] >= 3


def test_a_refused_stream_goes_back_to_before_its_harm():
    """The last snapshot lay inside the poison: the memory kept most of the harm (20 to 60%).

    Rounding decides which of the two streams are refused, and which are rolled back before.
    """
    users, ends = benchmark("users"), []
    for number in (54, 339):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DriftWarning)
            found = users.attack(users.shared(users.FAMILIES[number % 6]), number, seed=0)
        assert found.right, found
        ends.append(found.how)
    assert "refused" in ends


def test_names_a_newcomer_finds():
    assert nestling.load_learner is nestling.adaptation.load_learner
    assert {"adapt", "load_learner"} <= set(nestling.__all__)
    source = Path(nestling.adaptation.__file__).parent
    assert not (source / "watch.py").exists()
