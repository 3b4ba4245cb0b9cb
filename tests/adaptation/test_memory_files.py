"""Saved memories: exact, refused when anything is wrong, and never broken by a power cut."""

from __future__ import annotations

import json
import math
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny

import nestling
from nestling import rules
from nestling.adaptation import load_learner, memory_files
from nestling.files import BrokenFileError, load_record, save_record

OPTIONS = {"chunks": [8, 16, 32], "rate": 0.1}


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def learner():
    made = nestling.adapt(tiny(), **OPTIONS)
    made.learn(tokens(100))
    return made


def same(one, other) -> bool:
    ids = tokens(20, 9)[None]
    return torch.equal(one(ids).logits, other(ids).logits)


@pytest.mark.parametrize("rule", ["gd", "momentum", "adam", "dgd", "m3"])
@pytest.mark.parametrize("options", [{}, {"transfer": "reptile"}])
def test_learning_goes_on_bit_for_bit(tmp_path, rule, options):
    options = {"chunks": [8, 16, 32], "rate": 0.01, "rule": rule, **options}
    whole = nestling.adapt(tiny(), **options)
    whole.learn(tokens(75))
    whole.save(tmp_path, context=True, notes={"file": "book.txt"})
    other = nestling.adapt(tiny(), **options)
    assert other.load(tmp_path) == {"file": "book.txt"}
    assert same(whole, other)
    for learner in (whole, other):
        learner.learn(tokens(75, 1))
    assert same(whole, other)
    assert other.position == whole.position == 149


@pytest.mark.parametrize("options", [{"rank": 2}, {"assign": "split"}, {"layers": slice(1, 3)}])
def test_a_memory_brings_its_settings(tmp_path, options):
    first = nestling.adapt(tiny(), **OPTIONS, **options)
    first.learn(tokens(100))
    first.save(tmp_path)
    second = load_learner(tiny(), tmp_path)
    assert same(first, second)
    assert second.settings == first.settings
    assert list(second.history) == list(first.history)
    first.new_text()
    for learner in (first, second):
        learner.learn(tokens(50, 3))
    assert same(first, second)


def test_our_own_models_keep_their_context(tmp_path):
    from nestling.models import NestlingForCausalLM, presets

    torch.manual_seed(0)
    config = presets.tiny(model="hope", hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = NestlingForCausalLM(config).eval().requires_grad_(False)
    first, second = (nestling.adapt(model, [8, 16], rate=0.1) for _ in range(2))
    first.learn(tokens(30))
    first.save(tmp_path, context=True)
    second.load(tmp_path)
    for learner in (first, second):
        learner.learn(tokens(30, 1))
    assert same(first, second)


def refused(learner, folder: Path, error: type[Exception], said: str) -> None:
    """Loading must fail with this message, and leave the learner as it was."""
    ids = tokens(20, 9)[None]
    before, position = learner(ids).logits, learner.position
    with pytest.raises(error, match=said):
        learner.load(folder)
    assert torch.equal(learner(ids).logits, before)
    assert learner.position == position


def test_a_memory_of_another_model_is_refused(tmp_path, learner):
    other = nestling.adapt(tiny(seed=1), **OPTIONS)
    other.save(tmp_path)
    refused(learner, tmp_path, ValueError, "a memory of another model")
    changed = nestling.adapt(tiny(), **OPTIONS)
    changed.save(tmp_path)
    with torch.no_grad():
        learner.model.model.layers[1].mlp.up_proj.weight[3, 3] += 1e-3
    refused(learner, tmp_path, ValueError, "a memory of another model")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunks": [8, 16, 64]}, "other levels"),
        ({"rule": "momentum"}, "other levels"),
        ({"rank": 4}, "other levels"),
        ({"layers": "last 2"}, "other slots"),
        ({"transfer": "move"}, "other transfer"),
    ],
)
def test_a_memory_made_otherwise_is_refused(tmp_path, learner, options, said):
    nestling.adapt(tiny(), **{**OPTIONS, **options}).save(tmp_path)
    refused(learner, tmp_path, ValueError, said)


def test_every_flipped_or_missing_byte_is_found(tmp_path, learner):
    learner.save(tmp_path)
    (tensors,) = tmp_path.glob("*.safetensors")
    chance = random.Random(0)
    for path in (tensors, tmp_path / "memory.json"):
        data = path.read_bytes()
        for _ in range(6):
            place, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
            path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            refused(learner, tmp_path, BrokenFileError, "memory")
        for length in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            refused(learner, tmp_path, BrokenFileError, "memory")
        path.write_bytes(data)
    learner.load(tmp_path)


def test_a_pickle_is_never_opened(tmp_path, learner):
    class Bomb:
        def __reduce__(self):
            return (Path(tmp_path / "exploded").touch, ())

    for name in ("memory.json", "memory.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
        refused(learner, tmp_path, BrokenFileError, "memory")
    learner.save(tmp_path)
    (tensors,) = tmp_path.glob("memory-*.safetensors")
    tensors.write_bytes(pickle.dumps(Bomb()))
    refused(learner, tmp_path, BrokenFileError, "memory")
    assert not (tmp_path / "exploded").exists()


def test_what_is_no_memory_is_named(tmp_path, learner):
    refused(learner, tmp_path / "none", BrokenFileError, "there is no such folder")
    refused(learner, tmp_path, BrokenFileError, "it holds no memory.json")
    from nestling.files import save_tree

    save_tree(tmp_path, "memory", {"x": torch.zeros(1)}, {"kind": "something"})
    refused(learner, tmp_path, BrokenFileError, "but not a nestling memory")


def test_a_form_that_names_other_types_is_refused(tmp_path, learner):
    """A well-signed file cannot make anything but the state's own types."""
    from nestling.files import load_tree, save_tree

    learner.save(tmp_path)
    tensors, meta = load_tree(tmp_path, "memory")
    one = {"tensor": next(iter(tensors))}
    forms = ({"named": ["Popen", one]}, {"named": ["Factors", one]}, one, {"tuple": []}, 7)
    for form in forms:
        save_tree(tmp_path, "memory", tensors, {**meta, "is": form})
        refused(learner, tmp_path, BrokenFileError, "memory|do not agree")


@pytest.mark.parametrize(
    "facts",
    [
        {"settings": []},
        {"settings": {"chunks": [8] * 65}},
        {"settings": {"chunks": ["x"]}},
        {"texts": 3},
        {"texts": [3]},
        {"history": 3},
        {"history": [[1, 2]]},
        {"levels": None},
        {"model": []},
        {"begun": 1},
        {"position": True},
        {"more": 1},
    ],
    ids=str,
)
def test_facts_of_another_form_are_refused(tmp_path, learner, facts):
    """Right checksums over a description that no memory has."""
    learner.save(tmp_path)
    where = tmp_path, memory_files.NAME, memory_files.KIND
    tree, found = load_record(*where, memory_files._types(learner.continuum))
    save_record(*where, tree, found | facts)
    for load in (learner.load, lambda folder: nestling.load_learner(learner.model, folder)):
        with pytest.raises(ValueError, match=str(tmp_path)):
            load(tmp_path)


def _first(change):
    """A change of the first level's first difference."""

    def changed(tree):
        level = tree.state.levels[0]
        level = level._replace(fast=(change(level.fast[0]), *level.fast[1:]))
        return tree._replace(state=tree.state._replace(levels=(level, *tree.state.levels[1:])))

    return changed


@pytest.mark.parametrize(
    "change",
    [
        _first(lambda fast: fast * math.nan),
        _first(lambda fast: fast + math.inf),
        _first(lambda fast: fast.double()),
        _first(lambda fast: fast[..., 1:]),
        _first(lambda fast: fast.expand(2, *fast.shape[1:]).clone()),
        lambda tree: tree._replace(state=tree.state._replace(levels=tree.state.levels[1:])),
        lambda tree: tree._replace(state=tree.state._replace(start=None)),
        lambda tree: tree.state,
    ],
    ids=["nan", "inf", "type", "shape", "batch", "levels", "missing", "another tree"],
)
def test_content_that_no_memory_has_is_refused(tmp_path, learner, change):
    """Right checksums over numbers that are none, other types, sizes and parts."""
    learner.save(tmp_path)
    where = tmp_path, memory_files.NAME, memory_files.KIND
    tree, found = load_record(*where, memory_files._types(learner.continuum))
    save_record(*where, change(tree), found)
    before = learner(tokens(20, 9)[None]).logits
    with pytest.raises(ValueError, match=str(tmp_path)):
        learner.load(tmp_path)
    assert torch.equal(learner(tokens(20, 9)[None]).logits, before)


def test_custom_rules_need_to_be_given_again(tmp_path):
    rule = rules.momentum(0.5)
    first = nestling.adapt(tiny(), **OPTIONS, rule=rule)
    first.learn(tokens(60))
    first.save(tmp_path)
    with pytest.raises(ValueError, match="its rule is not one of natural, gd"):
        load_learner(tiny(), tmp_path)
    assert same(first, load_learner(tiny(), tmp_path, rule=rule))


def test_notes_must_be_json(tmp_path, learner):
    with pytest.raises(ValueError, match="notes must be something JSON can hold"):
        learner.save(tmp_path / "memory", notes={1, 2})
    assert not (tmp_path / "memory").exists()


@pytest.mark.slow
def test_a_power_cut_leaves_the_old_or_the_new_memory(tmp_path):
    """Kill a process that saves all the time; benchmarks/power_cuts.py does it 50 times."""
    script = Path(__file__).parents[2] / "benchmarks" / "power_cuts.py"
    done = subprocess.run(
        [sys.executable, str(script), "--kills", "6", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["broken"] == 0
