"""Models of all kinds: what can be adapted is, and what cannot says why."""

from __future__ import annotations

import pytest
import torch
from tiny_models import OTHERS, other, tiny
from transformers import AutoModel, LlamaConfig

import nestling
from nestling.models.tokenizer import byte_tokenizer

PHRASE = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(0)).repeat(17)[:200]


@pytest.mark.parametrize("family", OTHERS)
def test_mlps_of_their_own_kind_learn(family):
    """Falcon multiplies by itself, GPT-J and MPT have other names, mixtures hide their MLPs."""
    model = other(family)
    still = nestling.adapt(model, [8, 16, 32], rate=0.0)
    still.learn(PHRASE)
    assert torch.equal(still(PHRASE[None, :40]).logits, model(PHRASE[None, :40]).logits)
    learner = nestling.adapt(model, [8, 16, 32], rate=0.5)
    frozen = learner.score(PHRASE[:60])
    learner.learn(PHRASE)
    assert learner.score(PHRASE[:60]) < frozen - 0.3
    assert learner.continuum.context == (2048 if family == "falcon" else 512)


@pytest.mark.parametrize(
    ("family", "learns"), [("mixtral", "o_proj"), ("olmoe", "o_proj"), ("qwen2_moe", "shared")]
)
def test_the_report_says_that_experts_do_not_learn(family, learns):
    learner = nestling.adapt(other(family), [8], rate=0.1)
    assert all(learns in slot.name for slot in learner.continuum.slots)
    assert "3 mixtures of experts do not learn: model.layers.0.mlp.experts" in repr(learner)
    assert "experts" not in repr(nestling.adapt(tiny(), [8], rate=0.1))


def test_what_cannot_be_adapted_says_why():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["down_proj"])
    with pytest.raises(ValueError, match=r"wrapped by peft.*merge_and_unload"):
        nestling.adapt(peft.get_peft_model(tiny(), config).eval())
    with pytest.raises(ValueError, match=r"no language-model head.*AutoModelForCausalLM"):
        nestling.adapt(AutoModel.from_config(tiny().config).eval())
    with pytest.raises(ValueError, match="offloaded or were never loaded"):
        nestling.adapt(tiny().to("meta"))
    model = tiny()
    whole = torch.zeros(24, 16, dtype=torch.int8)  # as 8-bit libraries keep it
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(whole, requires_grad=False)
    with pytest.raises(ValueError, match="up_proj is a quantised Linear"):
        nestling.adapt(model)
    with pytest.raises(TypeError, match="a causal language model of torch; got LlamaConfig"):
        nestling.adapt(LlamaConfig())


def test_generate_takes_an_encoding_and_a_chat():
    tokenizer = byte_tokenizer()
    learner = nestling.adapt(tiny(vocab=260), [8], rate=0.1, tokenizer=tokenizer)
    options = {"max_new_tokens": 4, "do_sample": False}
    encoding = tokenizer("abc", return_tensors="pt", add_special_tokens=False)
    made = learner.generate(**encoding, **options)
    assert torch.equal(made, learner.generate(encoding.input_ids, **options))
    with pytest.raises(ValueError, match="a tokenizer with a chat template"):
        learner.generate([{"role": "user", "content": "abc"}])
    with pytest.raises(ValueError, match="a chat is a list of"):
        learner.generate([1, 2, 3])
    with pytest.raises(ValueError, match="needs a prompt"):
        learner.generate(max_new_tokens=3)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    answer = learner.generate([{"role": "user", "content": "abc"}], **options)
    ids = tokenizer("abc", return_tensors="pt", add_special_tokens=False).input_ids
    whole = learner.generate(ids, **options)
    assert answer == tokenizer.decode(whole[0, 3:], skip_special_tokens=True)
