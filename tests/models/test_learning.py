"""Levels that learn inside the model: the engine, the naive loops and the model are one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional

from nestling.continuum import Continuum, naive, own_slots
from nestling.models import MemoryCache, NestlingConfig, NestlingForCausalLM, load_state, save_state
from nestling.tree import state_detach, tree_leaves

VOCABULARY = 13
LEVELS = (
    {"name": "fast", "chunk": 4, "rate": 0.5},
    {"name": "slow", "chunk": 8, "rate": 0.3, "retain": 0.9},
)


def learner(dtype=torch.float64, levels=LEVELS, mixer="self_modifying", **fields):
    options = {"self_modifying": {"chunk": 4}, "attention": {"window": 6}}
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8}
    config = NestlingConfig(
        vocab_size=VOCABULARY,
        num_attention_heads=2,
        mixer=mixer,
        mixer_options={mixer: options.get(mixer, {})},
        levels=[dict(level) for level in levels],
        pad_token_id=0,
        **{**sizes, **fields},
    )
    return NestlingForCausalLM(config).to(dtype).eval()


def tokens(batch=1, length=23, seed=1):
    return torch.randint(
        1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def outside(model):
    levels = model.config.memory_levels
    slots = [slot for slot in own_slots(model) if levels[slot.parts[0].level].active]
    return Continuum(model, levels, slots)


def leaves(cache):
    return [leaf for _, leaf in tree_leaves(cache.learned.states)]


def gradients(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("topology", ["chain", "parallel"])
@pytest.mark.parametrize("mixer", ["self_modifying", "attention", "deltanet"])
def test_the_model_is_the_continuum_outside_and_the_naive_loops(mixer, topology):
    model, ids = learner(mixer=mixer, topology=topology), tokens(2)
    with torch.no_grad():
        out = model(ids, use_cache=True, measure=True)
    continuum = outside(model)
    want = continuum(ids)
    assert torch.equal(out.logits, want.logits)
    for mine, its in zip(leaves(out.past_key_values), tree_leaves((want.state,)), strict=True):
        assert torch.equal(mine, its[1])
    assert [(u.position, u.level) for u in out.updates] == [
        (u.position, u.level) for u in want.updates
    ]
    assert all(torch.equal(a.distance, b.distance) for a, b in zip(out.updates, want.updates))
    slots = continuum.slots
    for row in range(2):
        alone = naive(model, model.config.memory_levels, slots, ids[row : row + 1])
        torch.testing.assert_close(out.logits[row : row + 1], alone.logits.detach())
        (state,) = out.past_key_values.learned.states
        for level, fasts in zip(state.levels, alone.fast, strict=True):
            for mine, its in zip(level.fast, fasts, strict=True):
                torch.testing.assert_close(mine[row], its.detach())


def test_levels_with_rate_zero_are_the_frozen_model_to_the_bit():
    ids = tokens(2)
    frozen = learner(levels=[{"name": n, "chunk": c} for n, c in (("fast", 4), ("slow", 8))])
    silent = learner(levels=[{**level, "rate": 0.0} for level in LEVELS])
    assert not frozen.learns
    assert not silent.learns
    for model in (frozen, silent):
        model.train()
        model(ids, labels=ids).loss.backward()
    one, two = (model(ids, labels=ids) for model in (frozen, silent))
    assert torch.equal(one.logits, two.logits)
    for mine, its in zip(frozen.parameters(), silent.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
    learning = learner()
    assert learning.learns
    assert torch.equal(learning(ids, learn=False).logits, one.logits)
    assert not torch.equal(learning(ids).logits, one.logits)


# Training


def naive_gradients(model, ids, labels, **options):
    """The outer gradient by loops, one sequence at a time; caches are cut where a level is due."""
    model.zero_grad()
    slots = outside(model).slots
    count = int((labels[:, 1:] != -100).sum())
    total = 0.0
    for row in range(len(ids)):
        run = naive(
            model, model.config.memory_levels, slots, ids[row : row + 1], outer=True, **options
        )
        logits = run.logits[0, :-1]
        total = total + functional.cross_entropy(logits, labels[row, 1:], reduction="sum") / count
    total.backward()
    return total.detach(), gradients(model)


@pytest.mark.parametrize("mixer", ["self_modifying", "attention"])
@pytest.mark.parametrize("which", ["all", "some"])
def test_first_order_training_in_one_pass_is_the_naive_loops(mixer, which):
    model, ids = learner(mixer=mixer), tokens(3)
    labels = ids.clone()
    if which == "some":  # the answers only: what is learned from is still every token
        labels[:, 3:9] = -100
        labels[1, 12:] = -100
    want_loss, want = naive_gradients(model, ids, labels)
    model.zero_grad()
    model.train()
    out = model(ids, labels=labels)
    torch.testing.assert_close(out.loss.detach(), want_loss)
    assert not out.logits.requires_grad
    (3.0 * out.loss).backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, 3.0 * want[name], msg=name)
    assert all(grad is not None and bool(grad.any()) for grad in want.values())


def test_one_segment_is_plain_training():
    levels = [{**level, "chunk": 32} for level in LEVELS]
    model, ids = learner(levels=levels).train(), tokens(2)
    model(ids, labels=ids, learn=False).loss.backward()
    want = gradients(model)
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, want[name])


@pytest.mark.parametrize("learning", ["first_order", "second_order"])
def test_the_exact_gradient_is_the_one_of_the_continuum_outside(learning):
    model, ids = learner(learning=learning, truncate=False).train(), tokens(2)
    model(ids, labels=ids).loss.backward()
    mine = gradients(model)
    model.zero_grad()
    outside(model)(ids, meta=learning).losses[:, 1:].mean().backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(mine[name], grad)
    model.zero_grad()
    model.config.learning = "second_order" if learning == "first_order" else "first_order"
    model(ids, labels=ids).loss.backward()
    slot = own_slots(model)[0].name
    assert not torch.allclose(gradients(model)[slot], mine[slot], rtol=1e-4)


def test_second_order_is_the_naive_loops():
    model, ids = learner(learning="second_order").train(), tokens(1, 14)
    model(ids, labels=ids).loss.backward()
    mine = gradients(model)
    from nestling.scan import any_order

    with any_order():
        _, want = naive_gradients(model, ids, ids, second_order=True)
    for name, grad in mine.items():
        torch.testing.assert_close(grad, want[name])


def test_gradcheck_by_weights_and_rates_at_second_order():
    levels = [{**level, "chunk": level["chunk"] // 2} for level in LEVELS]
    small = {"hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 1, "mixer": "deltanet"}
    model = learner(learning="second_order", learn_rates=True, levels=levels, **small)
    ids = tokens(1, 7)
    names = [own_slots(model)[0].name, own_slots(model)[-1].name, "rates.log_rate"]
    start = [model.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def loss(*weights):
        given = dict(zip(names, weights, strict=True))
        logits = torch.func.functional_call(model, given, (ids,)).logits  # the loss is float32
        return functional.cross_entropy(logits[0, :-1], ids[0, 1:])

    assert torch.autograd.gradcheck(loss, start, eps=1e-6, atol=1e-6, rtol=1e-4)


def test_first_order_rates_follow_what_was_learned():
    """d loss / d log rate with past gradients as constants, in one pass and by autograd."""
    ids = tokens(2)
    found = []
    for labels in (ids, None):  # with labels one pass; without, through the graph
        model = learner(learn_rates=True).train()
        out = model(ids, labels=labels)
        loss = out.loss
        if labels is None:
            loss = functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        found.append(gradients(model))
    assert bool(found[0]["rates.log_rate"].all())
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], msg=name)


def test_frozen_initial_states_train_all_the_rest():
    model, ids = learner(learning="frozen").train(), tokens(2)
    model(ids, labels=ids).loss.backward()
    slots = {slot.name for slot in own_slots(model)}
    for name, weight in model.named_parameters():
        assert (weight.grad is None) == (name in slots)


def test_padding_packing_and_shares_of_a_batch_are_plain_means():
    model, ids = learner().train(), tokens(2, 21)
    model(ids, labels=ids).loss.backward()
    want = gradients(model)

    def same(scale=1.0, **given):
        model.zero_grad()
        loss = model(**given).loss
        loss.backward()
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, scale * want[name], msg=name)

    same(input_ids=ids, shift_labels=functional.pad(ids[:, 1:], (0, 1), value=-100))
    same(0.5, input_ids=ids, labels=ids, num_items_in_batch=80)
    for side in ("left", "right"):
        pad = (3, 0) if side == "left" else (0, 3)
        mask = functional.pad(torch.ones_like(ids), pad)
        labels = functional.pad(ids, pad, value=-100)
        same(input_ids=functional.pad(ids, pad), attention_mask=mask, labels=labels)
    packed = ids.reshape(1, -1)
    labels = ids.clone()
    labels[:, 0] = -100
    places = torch.arange(21).repeat(2)[None]
    same(input_ids=packed, position_ids=places, labels=labels.reshape(1, -1))


def test_training_in_low_precision_and_with_recomputation():
    model, ids = learner(torch.float32).train(), tokens(2)
    model(ids, labels=ids).loss.backward()
    want = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, want[name])
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    for name, grad in gradients(model).items():
        assert grad.dtype == torch.float32
        assert float((grad - want[name]).norm()) < 0.1 * float(want[name].norm()) + 1e-3, name


def nodes(tensor):
    """The autograd nodes behind a tensor."""
    found, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return len(found)


@pytest.mark.parametrize("learn_rates", [False, True])
def test_second_order_computes_segments_again_with_gradient_checkpointing(learn_rates):
    model = learner(learning="second_order", learn_rates=learn_rates).train()
    ids, found, sizes = tokens(2), [], []
    for recompute in (False, True):
        model.zero_grad()
        if recompute:
            model.gradient_checkpointing_enable()
        out = model(ids, labels=ids)
        sizes.append(nodes(out.loss))
        out.loss.backward()
        found.append((out.loss.detach(), gradients(model), len(out.updates)))
    assert sizes[1] < sizes[0] / 3, "a segment is one node"
    torch.testing.assert_close(*(loss for loss, _, _ in found))
    assert found[0][2] == found[1][2]
    for name, grad in found[0][1].items():
        assert grad is not None, name
        torch.testing.assert_close(found[1][1][name], grad)


def test_the_trainer_of_transformers_accumulates_as_one_batch(tmp_path):
    """Stock `Trainer`: two halves of a batch, of different lengths, train as the whole one."""
    from transformers import Trainer, TrainingArguments

    texts = [tokens(1, length, seed=length)[0] for length in (9, 21, 17, 13)]

    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        pads = [(0, longest - len(row["input_ids"])) for row in rows]
        both = list(zip([row["input_ids"] for row in rows], pads, strict=True))
        return {
            "input_ids": torch.stack([functional.pad(ids, pad) for ids, pad in both]),
            "attention_mask": torch.stack(
                [functional.pad(torch.ones_like(ids), pad) for ids, pad in both]
            ),
            "labels": torch.stack([functional.pad(ids, pad, value=-100) for ids, pad in both]),
        }

    made = []
    for rows, times in ((2, 1), (1, 2)):
        model = learner(learn_rates=True)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=times,
            max_steps=2,
            learning_rate=0.01,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            seed=0,
            disable_tqdm=True,
        )
        data = [{"input_ids": ids} for ids in texts]
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate)
        trainer.train()
        trainer.evaluate(data)
        made.append(model.state_dict())
    for name, value in made[0].items():
        torch.testing.assert_close(value, made[1][name], msg=name)
    start = learner(learn_rates=True).state_dict()
    assert not any(torch.equal(value, start[name]) for name, value in made[0].items())


# Streams, caches, padding


def in_pieces(model, ids, cuts, mask=None):
    cache, logits = MemoryCache(len(model.model.layers)), []
    for a, b in itertools.pairwise([0, *sorted(set(cuts)), ids.shape[1]]):
        some = None if mask is None else mask[:, :b]
        out = model(ids[:, a:b], attention_mask=some, past_key_values=cache)
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


MANY = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 25)]


@pytest.mark.parametrize("seed", [0, 1, 2, *MANY])
def test_any_split_of_padded_batches_is_each_text_alone(seed):
    """500 random partitions, batches and paddings in all."""
    model = learner(mixer=("self_modifying", "attention")[seed % 2])
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    with torch.inference_mode():
        for _ in range(20):
            length, batch = draw(2, 28), draw(1, 4)
            ids = tokens(batch, length, seed=draw(0, 1000))
            pads = [draw(0, length) for _ in range(batch)]
            pads[0] = 0
            mask = torch.stack([torch.arange(length) >= pad for pad in pads]).long()
            cuts = [draw(1, length) for _ in range(draw(0, 5))]
            logits, cache = in_pieces(model, ids, cuts, mask)
            assert cache.position.tolist() == [length - pad for pad in pads]
            for row, pad in enumerate(pads):
                alone = model(ids[row : row + 1, pad:], use_cache=True)
                torch.testing.assert_close(logits[row, pad:], alone.logits[0])
                mine = cache.learned.select(torch.tensor([row])).states[0]
                its = alone.past_key_values.learned.states[0]
                for level, want in zip(mine.levels, its.levels, strict=True):
                    for one, other in zip(tree_leaves(level), tree_leaves(want), strict=True):
                        torch.testing.assert_close(one[1], other[1])


def test_caches_select_repeat_copy_and_forget():
    model, ids = learner(), tokens(3, 9)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        twin, more = cache.copy(), tokens(3, 6, seed=2)
        want = model(more, past_key_values=cache).logits
        order = torch.tensor([2, 0, 0, 1])
        twin.batch_select_indices(order)
        other = twin.copy()
        torch.testing.assert_close(model(more[order], past_key_values=twin).logits, want[order])
        assert other.batch_size == 4
        other.batch_repeat_interleave(2)
        twice = order.repeat_interleave(2)
        torch.testing.assert_close(model(more[twice], past_key_values=other).logits, want[twice])
        other.reset()
        assert other.batch_size == -1
        assert other.position is None


def test_reading_goes_on_from_what_was_learned_and_learning_from_what_was_read():
    model, ids = learner(), tokens(2, 24)
    with torch.no_grad():
        cache = model(ids[:, :13], use_cache=True).past_key_values
        before = state_detach(cache.learned.states[0].levels)
        read = model(ids[:, 13:], past_key_values=cache, learn=False)
        for old, new in zip(tree_leaves(before), tree_leaves(cache.learned.states[0].levels)):
            assert torch.equal(old[1], new[1])
        assert not read.updates
        frozen = model(ids[:, :13], use_cache=True, learn=False).past_key_values
        assert frozen.learned is None
        out = model(ids[:, 13:], past_key_values=frozen)
        assert [u.position for u in out.updates if u.level == "fast"] == [16, 20]
        assert cache.position.tolist() == frozen.position.tolist() == [24, 24]


@pytest.mark.parametrize("use_cache", [True, False])
def test_updates_tell_of_each_sequence_what_it_learned_alone(use_cache):
    """Also where they stand at different positions: one update, measures [B], nan elsewhere."""
    model, ids, pads = learner(), tokens(3, 23), (7, 0, 12)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    with torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=use_cache, measure=True)
        plain = model(ids, attention_mask=mask, use_cache=use_cache)
    places = [(update.position, update.level) for update in out.updates]
    assert len(set(places)) == len(places)
    assert [place[0] for place in places] == sorted(place[0] for place in places)
    for row, pad in enumerate(pads):
        with torch.no_grad():
            alone = model(ids[row : row + 1, pad:], use_cache=use_cache, measure=True)
        assert len(alone.updates) > 2
        assert places[: len(alone.updates)] == [(u.position, u.level) for u in alone.updates]
        for update, its in zip(out.updates, alone.updates):
            for mine, other in zip(update[2:], its[2:], strict=True):
                assert mine.shape == (3,)
                torch.testing.assert_close(mine[row : row + 1], other)
    assert [u[:2] for u in plain.updates] == places
    for update, measured in zip(plain.updates, out.updates, strict=True):
        torch.testing.assert_close(update.loss, measured.loss, equal_nan=True)
        assert all(isinstance(m, float) and math.isnan(m) for m in update[3:])


def test_single_levels_can_be_silenced():
    model, ids = learner(), tokens(1, 20)
    with torch.no_grad():
        both, fast, none = (model(ids, learn=names).logits for names in (True, ["fast"], []))
        assert torch.equal(none, model(ids, learn=False).logits)
        alone = learner(levels=[LEVELS[0], {**LEVELS[1], "rate": 0.0}])(ids).logits
        assert torch.equal(fast, alone)
        assert not torch.equal(fast, both)
        with pytest.raises(ValueError, match="learn: no level slowest; there are fast, slow"):
            model(ids, learn=["slowest"])


GENERATE = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "beams": {"num_beams": 3, "do_sample": False},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "beam samples": {"num_beams": 2, "do_sample": True},
}


@pytest.mark.parametrize("mode", GENERATE)
def test_generating_from_the_cache_is_generating_without(mode):
    """Left-padded prompts; without a cache every step reads, and learns, from the first token."""
    model = learner(initializer_range=0.5)  # lively enough to say something
    ids = functional.pad(tokens(1, 9), (2, 0))
    ids = torch.cat([ids, tokens(1, 11, seed=3)])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    made = []
    for cached in (True, False):
        torch.manual_seed(0)
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0, **GENERATE[mode]}
        made.append(model.generate(ids, attention_mask=mask, use_cache=cached, **options))
    assert torch.equal(*made)
    if mode == "greedy":
        alone = model.generate(ids[:1, 2:], max_new_tokens=8, min_new_tokens=8, do_sample=False)
        assert torch.equal(alone[0], made[0][0, 2:])
        frozen = model.generate(ids, attention_mask=mask, learn=False, **options)
        assert not torch.equal(frozen, made[0])


def test_streams_and_saved_states_go_on(tmp_path):
    model, ids = learner(torch.float32), tokens(2, 30)
    (whole,) = model.stream([ids])
    first = list(model.stream([ids[:, :5], ids[:, 5:17]]))
    save_state(tmp_path, model, first[-1].state)
    loaded = load_state(tmp_path, model)
    assert loaded.position.tolist() == [17, 17]
    rest = list(model.stream([ids[:, 17:]], loaded))
    logits = torch.cat([piece.logits for piece in (*first, *rest)], 1)
    torch.testing.assert_close(logits, whole.logits, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        model.get_parameter(own_slots(model)[0].name).mul_(1.1)
    with pytest.raises(ValueError, match="belongs to another model"):
        load_state(tmp_path, model)


def test_learning_helps_on_text_that_repeats_itself():
    model = learner(torch.float32, levels=[{**level, "rate": 3.0} for level in LEVELS])
    ids = tokens(1, 12, seed=4).repeat(1, 12)
    with torch.no_grad():
        (out,) = model.stream([ids])
    losses = out.losses[0]
    assert losses[-24:].mean() < 0.98 * losses[1:25].mean()


# Saving, configuration


def test_saved_models_keep_their_levels_and_old_ones_stay_frozen(tmp_path):
    model, ids = learner(torch.float32, learn_rates=True), tokens(1)
    with torch.no_grad():
        model.rates.log_rate.add_(0.5)
        want = model(ids).logits
        model.save_pretrained(tmp_path)
        again = NestlingForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(again(ids).logits, want)
        plain = learner(
            torch.float32, levels=[{"name": "fast", "chunk": 4}, {"name": "slow", "chunk": 8}]
        )
        plain.save_pretrained(tmp_path / "plain")
        assert not NestlingForCausalLM.from_pretrained(tmp_path / "plain").learns
        warm = NestlingForCausalLM.from_pretrained(
            tmp_path / "plain", levels=[dict(level) for level in LEVELS], learn_rates=True
        )
        torch.testing.assert_close(warm.rates(), torch.tensor([0.5, 0.3]))
        assert torch.equal(warm(ids, learn=False).logits, plain(ids).logits)


BAD = {
    "learning": ({"learning": "third_order"}, "learning must be one of first_order, frozen"),
    "transfer": ({"transfer": "sideways"}, "transfer must be one of"),
    "rates of nothing": (
        {"levels": ({"name": "a", "chunk": 4},), "learn_rates": True},
        "no level has a rate",
    ),
    "no continuum memory": ({"channel": "swiglu"}, "levels learn in the channel 'cms'"),
    "negative rate": ({"levels": ({"name": "a", "chunk": 4, "rate": -1.0},)}, "rate must be"),
    "unknown part of a level": (
        {"levels": ({"name": "a", "chunk": 4, "speed": 1.0},)},
        "a name and a chunk",
    ),
    "second-order nesting": ({"transfer": "second_order"}, "needs learning='second_order'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configurations_of_learning_say_so(name):
    fields, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        learner(**fields)


@torch.no_grad()
def test_logits_of_padding_are_zeros_whether_it_learns_or_only_reads():
    model, ids = learner(), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    embedded = model.get_input_embeddings()(ids)
    for given in ({"input_ids": ids}, {"input_ids": ids, "learn": False}):
        assert not model(**given, attention_mask=mask).logits[0, 4:].any()
    for learn in (True, False):
        given = {"inputs_embeds": embedded, "attention_mask": mask, "learn": learn}
        alone = model(**given).logits
        torch.testing.assert_close(alone, model(ids, attention_mask=mask, learn=learn).logits)
        torch.testing.assert_close(model(**given, logits_to_keep=1).logits, alone[:, -1:])


@torch.no_grad()
@pytest.mark.parametrize("learn", [True, False])
def test_the_hidden_states_of_chosen_layers(learn):
    model, ids = learner(), tokens(2)
    whole = model(ids, output_hidden_states=True, learn=learn).hidden_states
    some = model(ids, output_hidden_states=[1], learn=learn).hidden_states
    assert some[0] is None
    assert len(some) == 2
    torch.testing.assert_close(some[1], whole[2])


@torch.no_grad()
@pytest.mark.parametrize("split", [None, 7, 10])
def test_hidden_states_are_those_the_logits_came_from(split):
    """In one call and in two, with left padding; the last ones give the logits."""
    model, ids = learner(), tokens(2)
    ids[0, :5] = 0
    mask = (ids != 0).long()
    cache, found = MemoryCache(2), []
    for start, stop in ((0, split), (split, None)) if split else ((0, None),):
        options = {"attention_mask": mask[:, :stop], "past_key_values": cache, "use_cache": True}
        found.append(model(ids[:, start:stop], output_hidden_states=True, **options))
    states = [torch.cat(each, 1) for each in zip(*(out.hidden_states for out in found))]
    assert [tuple(each.shape) for each in states] == [(2, 23, 8)] * 3
    logits = torch.cat([out.logits for out in found], 1)
    real = mask.bool()
    torch.testing.assert_close(model.lm_head(states[-1])[real], logits[real])
    torch.testing.assert_close(states[0][real], model.get_input_embeddings()(ids)[real])
    alone = model(ids[1:], output_hidden_states=True).hidden_states
    torch.testing.assert_close(states[1][1:], alone[1])
    still = model(ids[1:], output_hidden_states=True, learn=False).hidden_states
    assert len(still) == len(alone)
    torch.testing.assert_close(still[1][:, :4], alone[1][:, :4])
    assert not torch.allclose(still[1], alone[1])


def test_a_description_says_which_levels_learn():
    from nestling.description import describe

    text = str(describe(learner(levels=[LEVELS[0], {"name": "slow", "chunk": 8}])))
    assert "fast learn while a sequence is read; slow frozen" in text
    still = [{"name": "fast", "chunk": 4}, {"name": "slow", "chunk": 8}]
    assert "within a sequence it is frozen" in str(describe(learner(levels=still)))


# Trained plain


def test_plain_levels_stand_still_in_training_and_learn_afterwards():
    """`learning="plain"`: the ordinary model in `train()` mode, to the bit; the learner after."""
    ids = tokens(2)
    frozen = learner(levels=[{"name": n, "chunk": c} for n, c in (("fast", 4), ("slow", 8))])
    model, first_order = learner(learning="plain"), learner()
    assert model.learns
    assert not model.config.learns_in_training
    for each in (frozen, model):
        each.train()(ids, labels=ids).loss.backward()
    for mine, its in zip(model.parameters(), frozen.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
    assert not model.learns_now
    with torch.no_grad():
        assert torch.equal(model(ids).logits, frozen(ids).logits)
        out = model.eval()(ids, use_cache=True)
        assert model.learns_now
        want = first_order.eval()(ids, use_cache=True)
        assert torch.equal(out.logits, want.logits)
        assert torch.equal(model(ids, learn=False).logits, frozen.eval()(ids).logits)
        model.train()  # what was learned is still read with, and nothing is added
        told = model(ids, past_key_values=out.past_key_values, use_cache=True)
    assert told.updates == ()


def test_plain_levels_give_gradients_in_eval_mode_as_first_order():
    model, ids = learner(learning="plain").eval(), tokens(2)
    model(ids, labels=ids).loss.backward()
    twin = learner().eval()
    twin(ids, labels=ids).loss.backward()
    torch.testing.assert_close(gradients(model), gradients(twin))


@pytest.mark.parametrize("field", ["learn_rates", "natural"])
def test_what_is_trained_while_levels_learn_cannot_be_trained_plain(field):
    with pytest.raises(ValueError, match=rf"{field}=True is trained while the levels learn"):
        learner(learning="plain", **{field: True})
