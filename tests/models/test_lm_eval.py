"""`lm_eval` scores our models unchanged (skipped where it is not installed)."""

from __future__ import annotations

import pytest
import torch

from nestling.models import NestlingForCausalLM, byte_tokenizer, presets


@pytest.mark.filterwarnings("ignore")  # the harness's own
def test_the_harness_reads_the_same_likelihoods():
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = NestlingForCausalLM(presets.tiny(num_hidden_layers=1, intermediate_size=32)).eval()
    harness = HFLM(pretrained=model, tokenizer=byte_tokenizer(), batch_size=2, max_length=128)
    texts = [("A nestling", " learns"), ("It keeps on learning after", " training")]
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=text, idx=i)
        for i, text in enumerate(texts)
    ]
    answers = harness.loglikelihood(asked, disable_tqdm=True)
    for (context, rest), (found, _) in zip(texts, answers, strict=True):
        ids = torch.tensor([list((context + rest).encode())])
        with torch.no_grad():
            chances = model(ids).logits[0, :-1].log_softmax(-1)
        picked = chances.gather(1, ids[0, 1:, None])[len(context) - 1 :]
        assert found == pytest.approx(picked.sum().item(), rel=1e-4)
    until = {"until": ["\n"], "max_gen_toks": 4}
    wish = Instance(request_type="generate_until", doc={}, arguments=("A", until), idx=0)
    assert len(harness.generate_until([wish], disable_tqdm=True)) == 1
