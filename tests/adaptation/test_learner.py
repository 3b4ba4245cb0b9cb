"""One memory per user over a shared model: exact at rate 0, isolated, repeatable, reversible."""

from __future__ import annotations

import gzip
import math
import threading

import pytest
import torch
from tiny_models import FAMILIES, tiny

import nestling
from nestling import rules
from nestling.adaptation import DriftWarning, Limits, fingerprint, load_pretrained
from nestling.models import NestlingForCausalLM, presets

OPTIONS = {"chunks": [8, 16, 32], "rate": 0.5}


def tokens(count: int, seed: int = 0, vocab: int = 64) -> torch.Tensor:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def repeated(count: int, seed: int = 0) -> torch.Tensor:
    """A stream with something to learn: one phrase again and again."""
    return tokens(12, seed).repeat(count // 12 + 1)[:count]


@pytest.mark.parametrize("family", FAMILIES)
def test_rate_0_is_the_base_model_to_the_bit(family):
    model, ids = tiny(family), tokens(40)
    learner = nestling.adapt(model, [8, 16, 32], rate=0.0)
    learner.learn(tokens(70, 1))
    assert torch.equal(learner(ids[None]).logits, model(ids[None]).logits)
    made = [m.generate(ids[None, :5], max_new_tokens=8, do_sample=False) for m in (learner, model)]
    assert torch.equal(*made)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_is_learned_and_the_base_stays(family):
    model, stream = tiny(family), repeated(200)
    before = fingerprint(model)
    learner = nestling.adapt(model, **OPTIONS)
    frozen = learner.score(stream[:60])
    report = learner.learn(stream)
    assert learner.score(stream[:60]) < frozen - 0.3
    assert fingerprint(model) == before
    assert report.tokens == 200
    assert {u.level: 0 for u in report.updates}.keys() == {"fast", "middle", "slow"}
    assert [u.position for u in report.updates if u.level == "middle"] == list(range(16, 200, 16))


@pytest.mark.parametrize("assign", ["share", "split", "layers"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_levels_divide_the_mlps_as_asked(family, assign):
    learner = nestling.adapt(tiny(family), **OPTIONS, assign=assign)
    frozen = learner.score(repeated(60))
    learner.learn(repeated(200))
    assert learner.score(repeated(60)) < frozen
    sizes = learner.size()
    whole = sum(p.numel() * 4 for p in _mlp(learner.model))
    total = sum(sizes[level.name] for level in learner.levels)
    assert total == whole * (3 if assign == "share" else 1)


def _mlp(model):
    return [p for name, p in model.named_parameters() if ".mlp." in name and p.dim() == 2]


def test_a_slow_level_that_only_receives_brings_a_text_back():
    """A, B, and the slow level alone: A is still there; without it, it is not."""
    a, b = repeated(257), tokens(257, 9)
    options = {"rate": [0.5, 0.0], "retain": [0.8, 1.0], "transfer": "move", "transfer_rate": 0.2}
    learner = nestling.adapt(tiny(), [8, 16], **options)
    frozen = learner.score(a)
    learner.learn(a)
    learner.new_text()
    learner.learn(b)
    learner.reset("fast")
    kept = learner.score(a)
    learner.reset("slow")
    assert kept < frozen
    assert learner.score(a) == frozen


def test_what_a_slow_level_receives_stays_within_its_limit():
    options = {"rate": [0.2, 0.0], "retain": [0.5, 1.0], "transfer": "move"}
    free = nestling.adapt(tiny(), [8, 16], **options, limits=Limits(drift=math.inf))
    bound = nestling.adapt(tiny(), [8, 16], **options, limits=Limits(drift=0.12))
    free.learn(repeated(1025))
    report = bound.learn(repeated(1025))
    assert free.drift[1].drift > 0.12
    assert 0.1 < bound.drift[1].drift <= 0.12 * (1 + 1e-6)
    assert not report.alarms


def test_our_own_models_can_be_adapted_too():
    torch.manual_seed(0)
    config = presets.tiny(model="hope", hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = NestlingForCausalLM(config).eval().requires_grad_(False)
    learner = nestling.adapt(model, [8, 16, 32, 64], rate=0.5, assign="own")
    frozen = learner.score(repeated(60))
    learner.learn(repeated(160))
    assert learner.score(repeated(60)) < frozen
    ids = repeated(600)[None]  # longer than the chunks of its own levels, which rest here
    assert torch.equal(learner(ids).logits, learner(ids, learn=False).logits)
    assert not torch.equal(model(ids).logits, model(ids, learn=False).logits)


@pytest.mark.parametrize("transfer", [None, "move", "reptile"])
@pytest.mark.parametrize("rule", ["gd", "momentum"])
def test_any_cut_of_a_stream_gives_the_same_memory(transfer, rule):
    stream, ids = tokens(150), tokens(20, 5)
    logits = []
    for cuts in ([150], [1, 7, 33, 64, 65, 150], [31, 33, 97, 150]):
        options = {"rate": 0.1, "rule": rule, "transfer": transfer, "retain": 0.9}
        learner = nestling.adapt(tiny(), [8, 16, 32], **options)
        start = 0
        for stop in cuts:
            learner.learn(stream[start:stop])
            start = stop
        logits.append(learner(ids[None]).logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_an_iterator_of_anything_is_one_stream():
    stream = tokens(100)
    whole, single, mixed = (nestling.adapt(tiny(), **OPTIONS) for _ in range(3))
    whole.learn(stream)
    single.learn(int(token) for token in stream)
    mixed.learn(iter([stream[:30].tolist(), stream[None, 30:64], stream[64:]]))
    for other in (single, mixed):
        assert torch.equal(whole(stream[None]).logits, other(stream[None]).logits)


def test_learners_on_one_model_do_not_touch_each_other():
    model, ids = tiny(), tokens(30)
    one, two = (nestling.adapt(model, **OPTIONS) for _ in range(2))
    two.learn(repeated(100, 1))
    before = two(ids[None]).logits
    one.learn(repeated(300, 2))
    assert torch.equal(two(ids[None]).logits, before)
    assert not torch.equal(one(ids[None]).logits, before)


def test_concurrent_learners_equal_learners_in_turn():
    streams = [repeated(160, seed) for seed in range(4)]
    alone = []
    for stream in streams:
        learner = nestling.adapt(tiny(), **OPTIONS)
        learner.learn(stream)
        alone.append(learner(stream[None, :20]).logits)
    model = tiny()
    learners = [nestling.adapt(model, **OPTIONS) for _ in streams]
    plain = model(streams[0][None, :20]).logits
    threads = [threading.Thread(target=_learn_slowly, args=pair) for pair in zip(learners, streams)]
    for thread in threads:
        thread.start()
    during = [model(streams[0][None, :20]).logits for _ in range(20)]
    for thread in threads:
        thread.join()
    assert all(torch.equal(logits, plain) for logits in during)
    for learner, stream, logits in zip(learners, streams, alone):
        assert torch.equal(learner(stream[None, :20]).logits, logits)


def _learn_slowly(learner, stream):
    for start in range(0, len(stream), 20):
        learner.learn(stream[start : start + 20])


def test_a_rank_is_exact_until_it_is_exceeded_and_small():
    stream, ids = repeated(33), tokens(20, 5)
    full = nestling.adapt(tiny(), [8, 16], rate=0.5)
    exact = nestling.adapt(tiny(), [8, 16], rate=0.5, rank=16)
    small = nestling.adapt(tiny(), [8, 16], rate=0.5, rank=1)
    for learner in (full, exact, small):
        learner.learn(stream)
    assert torch.allclose(full(ids[None]).logits, exact(ids[None]).logits, atol=1e-4)
    assert small.size()["fast"] * 4 < full.size()["fast"]
    assert small.score(stream) < nestling.adapt(tiny(), [8], rate=0.0).score(stream)


def test_moving_keeps_what_is_read_and_slow_levels_keep_it():
    stream, ids = repeated(97), tokens(20, 5)
    plain = nestling.adapt(tiny(), [8, 32], rate=[0.5, 0.0])
    moved = nestling.adapt(tiny(), [8, 32], rate=[0.5, 0.0], transfer="move")  # only receives
    assert repr(moved).count("receives only") == 1  # not a rate of 0 beside updates
    assert "receives" not in repr(nestling.adapt(tiny(), [8, 32], rate=0.0))
    for learner in (plain, moved):
        report = learner.learn(stream)
    received = [update for update in report.updates if update.level == "slow"]
    assert [update.position for update in received] == [32, 64, 96]
    assert moved.drift[1].updates == 3
    base = sum(float(w.square().sum()) for w in _mlp(moved.model)) ** 0.5
    assert received[-1].distance / base == pytest.approx(moved.drift[1].drift)
    assert torch.allclose(plain(ids[None]).logits, moved(ids[None]).logits, atol=1e-4)
    assert moved.drift[1].drift == pytest.approx(plain.drift[0].drift, rel=1e-3)
    assert moved.drift[0].drift == 0.0  # position 96 is a multiple of 32: all has just moved


def test_rollback_returns_bit_for_bit():
    learner, ids = nestling.adapt(tiny(), **OPTIONS), tokens(20, 5)
    learner.learn(repeated(100))
    learner.snapshot("good")
    good, position = learner(ids[None]).logits, learner.position
    learner.learn(tokens(100, 3))
    worse = learner(ids[None]).logits
    learner.learn(tokens(30, 4))
    learner.rollback(1)
    assert torch.equal(learner(ids[None]).logits, worse)
    learner.rollback("good")
    assert torch.equal(learner(ids[None]).logits, good)
    assert learner.position == position
    with pytest.raises(ValueError, match="no snapshot 'bad'; there are"):
        learner.rollback("bad")


def test_snapshots_are_bounded_and_named_ones_stay():
    learner = nestling.adapt(tiny(), **OPTIONS, snapshots=3)
    learner.snapshot("first")
    for seed in range(6):
        learner.learn(tokens(64, seed))
        assert len(learner.snapshots) <= 3
    assert "first" in learner.snapshots
    learner.snapshot("second")
    learner.snapshot("third")
    with pytest.raises(ValueError, match="already 3 named snapshots"):
        learner.snapshot("fourth")
    learner.drop("second")
    learner.snapshot("fourth")
    assert learner.size()["snapshots"] > 0


@pytest.mark.parametrize(
    ("limits", "measure"),
    [
        (Limits(grad_norm=1e-6), "grad_norm"),
        (Limits(loss=1e-3), "loss"),
    ],
)
def test_a_text_past_a_limit_is_refused(limits, measure):
    heard = []
    learner = nestling.adapt(tiny(), **OPTIONS, limits=limits, on_alarm=heard.append)
    ids = tokens(20, 5)
    before = learner(ids[None]).logits
    with pytest.warns(DriftWarning, match=f"{measure} .* > .*rolled back to position 0"):
        report = learner.learn(repeated(64))
    assert torch.equal(learner(ids[None]).logits, before)
    assert heard == report.alarms
    assert heard[0].measure == measure
    assert report.refused


def test_at_its_drift_limit_a_memory_goes_on_learning():
    """It used to roll back for ever; now its difference is scaled back to the limit."""
    learner = nestling.adapt(tiny(), [8], rate=0.5, limits=Limits(drift=0.05))
    first = learner.learn(tokens(200, 3))
    assert not first.alarms
    assert learner.drift[0].drift <= 0.05 * (1 + 1e-5)
    frozen = learner.score(repeated(60))
    report = learner.learn(repeated(400))
    assert not report.alarms
    assert len(report.updates) == 50
    assert learner.score(repeated(60)) < frozen - 0.05
    assert learner.drift[0].drift <= 0.05 * (1 + 1e-5)


def test_one_update_moves_no_further_than_its_trust_region():
    base = sum(float(w.square().sum()) for w in _mlp(tiny())) ** 0.5
    for rank in (None, 4):
        learner = nestling.adapt(tiny(), [8], rate=5.0, rank=rank, limits=Limits(step=0.01))
        report = learner.learn(tokens(100))
        assert report.updates
        assert all(update.step <= 0.01 * base * (1 + 1e-4) for update in report.updates)
        assert max(update.distance for update in report.updates) <= 12 * 0.011 * base


@pytest.mark.parametrize("rank", [None, 2])
def test_what_is_not_finite_is_refused(rank):
    """A nan in one gradient: with a rank the decomposition used to raise LinAlgError."""
    model, ids = tiny(), tokens(20, 5)
    learner = nestling.adapt(model, [8], rate=0.5, rank=rank)
    learner.learn(repeated(64))
    before, head = learner(ids[None]).logits, model.lm_head.weight.data.clone()
    model.lm_head.weight.data[5] = math.nan
    with pytest.warns(DriftWarning, match="is not finite"):
        report = learner.learn(repeated(64, 2))
    assert report.refused
    model.lm_head.weight.data.copy_(head)
    assert torch.equal(learner(ids[None]).logits, before)


def test_a_reset_in_the_alarm_is_a_reset():
    learner = nestling.adapt(tiny(), **OPTIONS, limits=Limits(loss=1e-3))
    learner.on_alarm = lambda alarm: learner.reset()
    for _ in range(2):
        with pytest.warns(DriftWarning):
            learner.learn(repeated(64))
        assert learner.position == 0
    assert learner.snapshots == ["@0"] or learner.snapshots == []


def test_snapshot_names_that_look_unnamed_are_refused():
    """They used to be dropped in silence when room was needed."""
    learner = nestling.adapt(tiny(), **OPTIONS)
    for name in ("@1024", ""):
        with pytest.raises(ValueError, match="snapshot's name must not be empty or begin with @"):
            learner.snapshot(name)


@pytest.mark.parametrize("options", [OPTIONS, {"chunks": [8, 16], "rule": "adam", "rate": 0.02}])
def test_learning_under_autocast(options):
    learner = nestling.adapt(tiny(), **options)
    frozen = learner.score(repeated(60))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = learner.learn(repeated(200))
    assert not report.alarms
    assert learner.score(repeated(60)) < frozen - 0.3


def test_merge_writes_a_level_into_the_base():
    for family in ("llama", "gpt2"):
        model, ids = tiny(family), tokens(20, 5)
        learner = nestling.adapt(model, **OPTIONS)
        learner.learn(repeated(100))
        read = learner(ids[None]).logits
        learner.merge("slow")
        assert torch.allclose(learner(ids[None]).logits, read, atol=1e-4)
        assert learner.drift[2].drift == 0.0
        assert learner.drift[0].drift > 0.0
        learner.merge()
        assert torch.allclose(model(ids[None]).logits, read, atol=1e-4)
        assert torch.equal(learner(ids[None]).logits, model(ids[None]).logits)


def test_reset_forgets_one_level_or_all():
    model, ids = tiny(), tokens(20, 5)
    learner = nestling.adapt(model, **OPTIONS)
    learner.learn(repeated(100))
    learner.reset("fast")
    assert [drift.drift > 0 for drift in learner.drift] == [False, True, True]
    learner.reset()
    assert learner.position == 0
    assert torch.equal(learner(ids[None]).logits, model(ids[None]).logits)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunks": []}, "at least one level"),
        ({"chunks": [1024, 256]}, r"rising order; got \[1024, 256\]: write \[256, 1024\]"),
        ({"chunks": "fast"}, "one number per level, such as"),
        ({"rank": "low"}, "rank must be 'auto', None or a whole number"),
        ({"matrices": "up"}, "matrices must be one of auto, closing, all; got 'up'"),
        ({"rule": ["natural", "gd", "gd"], "rate": 1.0}, "'natural' is for all levels or for none"),
        ({"chunks": [0]}, "chunk must be a whole number"),
        ({"rate": [0.1, 0.2]}, "rate: one for all levels or 3"),
        ({"rate": -1.0}, "rate must be"),
        ({"rule": "sdg"}, "rule must be one of natural, gd, momentum"),
        ({"assign": "shared"}, "assign must be one of share, split, layers, own"),
        ({"layers": 7}, "layers 0 to 2"),
        ({"layers": [0], "assign": "layers"}, "3 levels need as many layers"),
        ({"transfer": "moved"}, "transfer must be one of None, move, frozen"),
        ({"transfer": "move", "assign": "split"}, "needs levels on the same weights"),
        ({"transfer": "move", "transfer_rate": 2.0}, "a share in"),
        ({"rank": 2, "rule": rules.adam(), "rate": 0.1}, "rank=2 needs a rule"),
        ({"rule": ["gd", "gd", "adam"]}, "rule 'adam' needs a number"),
        ({"snapshots": 0}, "snapshots must be a whole number of at least 1"),
    ],
)
def test_wrong_settings_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        nestling.adapt(tiny(), **{"chunks": [8, 16, 32], **options})


def test_one_number_is_one_level():
    assert [level.chunk for level in nestling.adapt(tiny(), 256).levels] == [256]


def test_wrong_inputs_are_named():
    learner = nestling.adapt(tiny(), **OPTIONS)
    with pytest.raises(ValueError, match="in training mode"):
        nestling.adapt(tiny().train(), **OPTIONS)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        learner.learn("some text")
    with pytest.raises(ValueError, match="knows tokens 0 to 63"):
        learner.learn([1, 2, 64])
    with pytest.raises(ValueError, match="one stream of token ids"):
        learner.learn(torch.ones(2, 5, dtype=torch.long))
    with pytest.raises(TypeError, match="learn takes text"):
        learner.learn(3.5)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        learner.score([5])
    with pytest.raises(ValueError, match="no level 'slowest'"):
        learner.reset("slowest")
    assert learner.position == 0


def test_a_real_model_learns_a_book(shared_data):
    model, tokenizer = load_pretrained(shared_data / "stories260k" / "stories260K.bin")
    with gzip.open(shared_data / "gutenberg_books" / "moby_dick_or_the_whale.txt.gz", "rt") as file:
        text = file.read()[30000:36000]
    learner = nestling.adapt(model, [64, 256, 1024], rate=0.1, tokenizer=tokenizer)
    ids = tokenizer(text).input_ids
    frozen = learner.score(ids[2048:])
    exact = nestling.adapt(model, [64, 256], rate=0.0)
    exact.learn(ids[:200])
    x = torch.tensor([ids[:100]])
    assert torch.equal(exact(x).logits, model(x).logits)
    learner.learn(ids[:2048])
    assert learner.score(ids[2048:]) < frozen - 0.2
    assert isinstance(learner.generate("Call me", max_new_tokens=5, do_sample=False), str)
    assert "Learner over LlamaForCausalLM at position 2,047" in repr(learner)
