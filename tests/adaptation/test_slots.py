"""Finding the MLP matrices of pretrained decoders, and reading models from single files."""

from __future__ import annotations

import struct

import pytest
import torch
from tiny_models import FAMILIES, tiny
from torch import nn

from nestling.adaptation.pretrained import (
    load_llama2c,
    load_llama2c_tokenizer,
    load_pretrained,
)
from nestling.adaptation.slots import choose_layers, mlp_matrices
from nestling.models import NestlingForCausalLM, presets


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_its_mlp_matrices(family):
    model = tiny(family)
    slots = mlp_matrices(model)
    names = dict(model.named_parameters())
    assert all(names[slot.name] is slot.weight for slot in slots)
    assert {slot.layer for slot in slots} == {0, 1, 2}
    assert len(slots) == 3 * (2 if family == "gpt2" else 3)
    assert all(slot.hidden == 24 for slot in slots)  # the hidden width
    assert not any("attn" in slot.name for slot in slots)


@pytest.mark.parametrize(("mixer", "count"), [("hope", 9), ("transformer", 3)])
def test_our_own_models_have_slots_too(mixer, count):
    model = NestlingForCausalLM(presets.tiny(model=mixer, num_hidden_layers=2))
    slots = mlp_matrices(model, -1)
    assert len(slots) == count
    assert all(slot.layer == 1 and ".channel." in slot.name for slot in slots)


def test_a_model_without_mlps_is_refused():
    with pytest.raises(ValueError, match="Sequential has no decoder blocks with an MLP"):
        mlp_matrices(nn.Sequential(nn.Linear(3, 3)))


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        (None, [0, 1, 2, 3, 4]),
        (2, [2]),
        ([-1, 0, 4], [0, 4]),
        (slice(1, None, 2), [1, 3]),
        ("last half", [3, 4]),
        ("first third", [0]),
        ("last quarter", [4]),
        ("last 3", [2, 3, 4]),
    ],
)
def test_layers_can_be_chosen(layers, chosen):
    assert choose_layers(layers, 5) == chosen


@pytest.mark.parametrize("layers", [5, [-6], "last", "middle half", [], slice(9, None), [True]])
def test_wrong_layers_are_named(layers):
    with pytest.raises(ValueError, match="layers"):
        choose_layers(layers, 5)


def test_stories260k_is_the_published_model(shared_data):
    model, tokenizer = load_pretrained(shared_data / "stories260k" / "stories260K.bin")
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0])
    assert "there was a little girl named Lily. She loved to play outside in the park." in text


def test_the_tokenizer_merges_as_llama2c_does(shared_data):
    path = shared_data / "stories260k" / "tok512.bin"
    tokenizer = load_llama2c_tokenizer(path)
    pieces = _pieces(path.read_bytes())
    story = (
        "One day, Tom's dog ran—fast!\nÉmile said: “No, 3 cakes.”  They all laughed together."
        " Lily wanted everything because something was interesting in the beautiful garden."
    )
    assert tokenizer(story).input_ids == _encode(story, pieces)
    assert tokenizer.decode(tokenizer(story).input_ids, skip_special_tokens=True) == story


def _pieces(data: bytes) -> list[tuple[bytes, float]]:
    found, at = [], 4
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        found.append((data[at + 8 : at + 8 + length], score))
        at += 8 + length
    return found


def _encode(text: str, pieces: list[tuple[bytes, float]]) -> list[int]:
    """llama2.c's loop: merge the adjacent pair with the best score until none is left."""
    known = {piece: place for place, (piece, _) in reversed(list(enumerate(pieces)))}
    ids = []
    for character in " " + text:
        raw = character.encode()
        ids += [known[raw]] if raw in known else [byte + 3 for byte in raw]
    while True:
        best = None
        for i in range(len(ids) - 1):
            place = known.get(pieces[ids[i]][0] + pieces[ids[i + 1]][0])
            if place is not None and (best is None or pieces[place][1] > best[0]):
                best = (pieces[place][1], i, place)
        if best is None:
            return [1, *ids]
        ids[best[1] : best[1] + 2] = [best[2]]


def test_broken_files_are_named(tmp_path):
    cut = tmp_path / "cut.bin"
    cut.write_bytes(struct.pack("<7i", 8, 8, 1, 2, 1, 32, 16) + b"\0" * 400)
    with pytest.raises(ValueError, match="the file is cut"):
        load_llama2c(cut)
    cut.write_bytes(_llama2c(tied=False))
    with pytest.raises(ValueError, match="needs its tokenizer beside it"):
        load_pretrained(cut)
    (tmp_path / "tok.bin").write_bytes(b"\1\0\0\0\0\0")
    with pytest.raises(ValueError, match=r"not a llama2\.c tokenizer file"):
        load_pretrained(cut)
    with pytest.raises(ValueError, match="no such file"):
        load_pretrained(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"no gguf at all, not even nearly" * 4)
    with pytest.raises(ValueError, match=r"bad\.gguf: cannot load a model"):
        load_pretrained(tmp_path / "bad.gguf")


def test_an_untied_head_is_read(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(_llama2c(tied=False))
    model = load_llama2c(path)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert not torch.equal(head, embedding)
    assert bool((head == 12345.0).all())


def _llama2c(*, tied: bool) -> bytes:
    d, f, layers, heads, kv, vocabulary, context = 8, 12, 2, 2, 1, 32, 16
    count = vocabulary * d + layers * (2 * d + 2 * d * d + 2 * 4 * d + 3 * f * d) + d
    floats = torch.arange(count + context * 4, dtype=torch.float32) / 1e4
    head = torch.full((vocabulary * d,), 12345.0)
    values = floats if tied else torch.cat([floats, head])
    header = struct.pack("<7i", d, f, layers, heads, kv, vocabulary if tied else -vocabulary, 16)
    return header + values.numpy().astype("<f4").tobytes()
