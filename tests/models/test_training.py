"""Training: every parameter learns, recomputation and compilation change nothing, Trainer works."""

from __future__ import annotations

import pytest
import torch
from small_models import MODELS, config_of, model_of, tokens

from nestling.memories import Attention
from nestling.models import NestlingForCausalLM, modeling


def gradients(model, ids, **given):
    model.zero_grad()
    model(ids, labels=ids, **given).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("topology", ["chain", "parallel"])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name, topology):
    torch.manual_seed(0)
    model = NestlingForCausalLM(config_of(name, topology=topology)).double().train()
    found = gradients(model, tokens(3, 22))
    silent = [
        n for n, p in model.named_parameters() if n not in found or not found[n].abs().sum() > 0
    ]
    assert silent == []
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("name", MODELS)
def test_recomputation_changes_nothing(name):
    model, ids = model_of(name).train(), tokens(2, 9)
    plain = gradients(model, ids, use_cache=False)
    model.gradient_checkpointing_enable()
    again = gradients(model, ids, use_cache=False)
    assert plain.keys() == again.keys()
    for key, gradient in plain.items():
        torch.testing.assert_close(again[key], gradient)


@pytest.mark.parametrize("name", MODELS)
def test_recomputation_in_pieces_changes_nothing(name, monkeypatch):
    """Gradients go through the states between the pieces; padding stays padding."""
    model, ids = model_of(name).train(), tokens(2, 23)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"use_cache": False, "attention_mask": mask}
    plain = gradients(model, ids, **options)
    model.gradient_checkpointing_enable()
    monkeypatch.setattr(modeling, "PIECE", 5)
    layer, sizes = model.model.layers[0], []
    layer.mixer.register_forward_hook(lambda module, args, out: sizes.append(args[0].shape[1]))
    again = gradients(model, ids, **options)
    whole = isinstance(layer.mixer, Attention)
    assert sizes == ([23] * 2 if whole else [5, 5, 5, 5, 3, 3, 5, 5, 5, 5])
    for key, gradient in plain.items():
        torch.testing.assert_close(again[key], gradient)
    hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    assert [tuple(each.shape[:2]) for each in hidden] == [(2, 23)] * len(hidden)


def test_labels_give_the_shifted_loss_and_ignore_minus_100():
    model, ids = model_of("hope", torch.float32), tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    output = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    torch.testing.assert_close(output.loss, expected)
    assert model(ids, logits_to_keep=2).logits.shape == (2, 2, 13)
    assert len(model(ids, output_hidden_states=True).hidden_states) == 3
    torch.testing.assert_close(
        model(inputs_embeds=model.get_input_embeddings()(ids)).logits, output.logits
    )


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_autocast_stays_near_float32(name):
    model, ids = model_of(name, torch.float32), tokens(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
        loss.backward()
    assert abs(loss.item() - model(ids, labels=ids).loss.item()) < 0.15
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_embeddings_are_tied_unless_told_otherwise():
    model = model_of("hope")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    free = model_of("hope", tie_word_embeddings=False)
    assert free.lm_head.weight is not free.model.embed_tokens.weight


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_the_same_model(name, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    model, ids = model_of(name, torch.float32), tokens(2, 9)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "nestling"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is NestlingForCausalLM
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_parameters_missing_from_a_file_get_their_initial_values(tmp_path):
    from safetensors.torch import load_file, save_file

    model = model_of("hope", torch.float32)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.0.mixer.small.norm"]
    del weights["model.layers.0.mixer.gates.bias"]  # of a plain layer of torch
    save_file(weights, path, metadata={"format": "pt"})
    loaded = NestlingForCausalLM.from_pretrained(tmp_path)
    fresh, old = (m.model.layers[0].mixer for m in (loaded, model))
    assert torch.equal(fresh.small.norm, old.small.norm)  # starts at constants
    assert torch.equal(fresh.gates.bias, old.gates.bias)
    for name in ("project", "weight"):  # were loaded, not drawn again
        assert torch.equal(getattr(fresh.small, name), getattr(old.small, name))
    assert torch.equal(fresh.gates.weight, old.gates.weight)


@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own use of torch
@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_training_step_equals_the_eager_one(recompute):
    """Without a break: the whole model is one graph, whatever its length."""
    model, ids = model_of("hope", torch.float32, num_hidden_layers=1).train(), tokens(2, 9)
    plain = gradients(model, ids, use_cache=False)
    model.zero_grad()
    if recompute:
        model.gradient_checkpointing_enable()
    step = torch.compile(
        lambda: model(ids, labels=ids, use_cache=False).loss,
        backend="aot_eager",  # all of the compiler but the C++ compiler; benchmarks use that
        fullgraph=True,
    )
    step().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_the_trainer_trains_it_and_resumes(tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in tokens(16, 12)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        max_steps=8,
        save_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=True,
    )
    model = model_of("hope", torch.float32)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    again = Trainer(model=model_of("hope", torch.float32), args=arguments, train_dataset=rows)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for name, parameter in again.model.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name))
