"""Training reads files of strangers (checkpoints, models, texts) and refuses in one clear line."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nestling.cli import main
from nestling.files import read_manifest, write_manifest, write_tensors
from nestling.train import corpus
from nestling.train.checkpoint import checkpoints
from nestling.train.corpus import Corpus

SMALL = """
    model.fields.hidden_size=8 model.fields.num_hidden_layers=1 model.fields.num_attention_heads=2
    model.fields.intermediate_size=8 data.train=builtin:2 data.valid=builtin:2 data.length=8
    run.rows=2 run.eval_windows=1
""".split()


def train(out, *changes):
    cache = f"data.cache={out.parent / 'cache'}"
    return main(["train", "stream", *SMALL, cache, "run.steps=2", *changes, "--out", str(out)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps with carried memories."""
    out = tmp_path_factory.mktemp("strange") / "run"
    assert train(out) == 0
    return out


def skeleton(meta, key):
    """The saved form of one state."""
    return next(item for item in meta["is"]["dict"] if item[0] == key)


def no_recipe(meta, tensors):
    del meta["facts"]["recipe"]


def no_part_of_the_recipe(meta, tensors):
    meta["facts"]["recipe"]["data"] = 3


def no_loss(meta, tensors):
    meta["facts"]["loss"] = "x"


def other_memory(meta, tensors):
    skeleton(meta, "memory")[1] = 3


def other_step(meta, tensors):
    items = skeleton(meta, "memory")[1]["dict"]
    next(item for item in items if item[0] == "step")[1] = 77


def other_best(meta, tensors):
    items = skeleton(meta, "memory")[1]["dict"]
    next(item for item in items if item[0] == "best_step")[1] = "x"


def other_loss(meta, tensors):
    items = skeleton(meta, "memory")[1]["dict"]
    next(item for item in items if item[0] == "best")[1] = "x"


def other_timeline(meta, tensors):
    skeleton(meta, "timeline")[1] = [3]


def other_random(meta, tensors):
    skeleton(meta, "random")[1]["dict"][0][1] = "x"


def half_a_random(meta, tensors):
    tensors["/random/torch"] = tensors["/random/torch"][:8].clone()
    meta["tensors"]["/random/torch"][1] = [8]
    meta["tensors"]["/random/torch"][2] = [[0, 0, 8]]


def moment_that_is_none(meta, tensors):
    name = next(name for name in tensors if name.endswith("/exp_avg"))
    tensors[name].view(-1)[0] = torch.nan


def no_moment(meta, tensors):
    states = next(i for i in skeleton(meta, "optimizer")[1]["dict"] if i[0] == "state")[1]
    first = states["dict"][0][1]["dict"]
    first[:] = [item for item in first if item[0] != "exp_avg"]


def moment_of_another_shape(meta, tensors):
    name = next(n for n in tensors if n.endswith("/exp_avg") and tensors[n].dim() == 2)
    tensors[name] = tensors[name].flatten()
    count = tensors[name].numel()
    meta["tensors"][name][1:] = [[count], [[0, 0, count]]]


def carried_that_is_none(meta, tensors):
    name = next(n for n, t in tensors.items() if n.startswith("/carry") and t.is_floating_point())
    tensors[name].view(-1)[0] = torch.inf


def carried_of_another_type(meta, tensors):
    name = next(n for n, t in tensors.items() if n.startswith("/carry") and t.is_floating_point())
    tensors[name] = tensors[name].double()
    meta["tensors"][name][0] = "float64"


CRAFTS = (
    no_recipe, no_part_of_the_recipe, no_loss, other_memory, other_step, other_best, other_loss,
    other_timeline, other_random, half_a_random, moment_that_is_none, no_moment,
    moment_of_another_shape, carried_that_is_none, carried_of_another_type,
)  # fmt: skip


@pytest.mark.parametrize("craft", CRAFTS, ids=lambda craft: craft.__name__)
def test_a_crafted_checkpoint_is_refused_in_one_line(craft, run, tmp_path, capsys):
    """Its checksums are right; what it holds is not what this run could have saved."""
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (path,) = checkpoints(out / "checkpoints")
    manifest = read_manifest(path, "part")
    (part,) = manifest.parts
    tensors = load_file(path / part.file)
    craft(manifest.meta, tensors)
    (path / part.file).unlink()
    new = write_tensors(path, "part-00000", tensors)
    write_manifest(path, "part", [new], manifest.meta)
    before = sorted(each.name for each in (out / "checkpoints").iterdir())
    capsys.readouterr()
    assert train(out, "run.steps=4") == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "preparing" not in line]
    assert said[-1].startswith("nestling train: "), said
    assert str(path) in said[-1], said
    assert len(said) <= 2, said  # "continuing" may stand before it
    assert sorted(each.name for each in (out / "checkpoints").iterdir()) == before


def test_the_run_itself_goes_on(run, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    assert train(out, "run.steps=4") == 0
    assert "continuing from step 2" in capsys.readouterr().err


def test_a_run_keeps_the_precision_it_was_begun_with(tmp_path, monkeypatch):
    """M3 measures which products are quicker; another start must not find others."""

    def quicker(is_so):
        module = importlib.import_module("nestling.rules.newton_schulz")
        monkeypatch.setattr(module, "bf16_is_quicker", lambda: is_so)

    changes = ("optim.name=m3", "model.fields.intermediate_size=160")
    made = []
    for first, later in ((False, False), (False, True), (True, True)):
        out = tmp_path / f"{first}-{later}"
        quicker(first)
        assert train(out, *changes) == 0
        quicker(later)
        assert train(out, *changes, "run.steps=5") == 0
        made.append(load_file(out / "model" / "model.safetensors"))
    for again in made[1:]:
        assert all(torch.equal(made[0][key], again[key]) for key in made[0])


def missing(weights):
    del weights[next(name for name in weights if "layers" in name)]


def spare(weights):
    weights["x.weight"] = torch.zeros(2)


def cut(weights):
    name = next(name for name, weight in weights.items() if weight.dim() == 2 and "layers" in name)
    weights[name] = weights[name][:-1].contiguous()


def none(weights):
    next(iter(weights.values())).view(-1)[0] = torch.nan


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (missing, "its weights are incomplete: missing"),
        (spare, "it holds weights the model does not have: x.weight"),
        (cut, "it holds weights of other shapes"),
        (none, "holds a number that is not finite"),
    ],
)
def test_a_model_to_start_from_must_be_whole(change, said, run, tmp_path, capsys):
    shutil.copytree(run / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    start = f"model.start={tmp_path / 'model'}"
    assert train(tmp_path / "run", start) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_model_to_start_from_must_fit(run, tmp_path, capsys):
    start = f"model.start={run / 'model'}"
    assert train(tmp_path / "wide", start, "model.fields.hidden_size=16") == 2
    assert "it holds weights of other shapes" in capsys.readouterr().err
    config = (run / "model" / "config.json").read_text()
    shutil.copytree(run / "model", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(config.replace('"nestling"', '"llama"'))
    assert train(tmp_path / "llama", f"model.start={tmp_path / 'model'}") == 2
    assert "a llama cannot start a nestling" in capsys.readouterr().err
    assert train(tmp_path / "right", start) == 0


PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("damage", ["cut", "other", "bits"])
def test_a_packed_text_that_is_broken_is_named(kind, damage, tmp_path):
    data = bytearray(PACKED[kind](bytes(range(32, 127)) * 300))
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "other":
        data[:] = b"no packed text at all"
    else:
        for place in range(len(data) // 3, len(data) // 2):
            data[place] ^= 0x5A
    path = tmp_path / f"text.txt.{kind}"
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=f"{kind}: cannot be unpacked: "):
        list(Corpus(source=str(path)))


def test_lines_nobody_wrote_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "one"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        list(Corpus(source=str(path)))
    monkeypatch.setattr(corpus, "_LINE", 1000)
    path.write_text('{"text": "one"}\n{"text": "' + "x" * 2000 + '"}\n')
    with pytest.raises(ValueError, match="line 2: more than 1000 characters"):
        list(Corpus(source=str(path)))
    path.write_text('{"text": "one"}\n\n{"text": "two"}')
    assert list(Corpus(source=str(path))) == ["one", "two"]
