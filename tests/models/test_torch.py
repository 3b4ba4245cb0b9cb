"""Torch's tools work on our models: compile, export, torch.func, the meta device."""

from __future__ import annotations

import pytest
import torch
from small_models import VOCABULARY, model_of, tokens
from torch.func import functional_call, grad, vmap

from nestling.models import NestlingForCausalLM, presets

NAMES = ("hope", "hope_attention", "transformer", "titans", "deltanet")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch.compiler.reset()


def padded(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return mask


@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own use of torch
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_with_an_attention_mask(name):
    model, ids = model_of(name, torch.float32, num_hidden_layers=1), tokens(2, 9)
    mask = padded(ids)

    def loss(ids, mask):
        return model(ids, attention_mask=mask, labels=ids, use_cache=False).loss

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = compiled(ids, mask)
    found.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = loss(ids, mask)
    expected.backward()
    torch.testing.assert_close(found, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_stops_at_packed_rows():
    model, ids = model_of("deltanet", torch.float32, num_hidden_layers=1), tokens(1, 4)
    compiled = torch.compile(
        lambda where: model(ids, position_ids=where, use_cache=False).logits,
        backend="aot_eager",
        fullgraph=True,
    )
    torch.testing.assert_close(compiled(torch.arange(4)[None]), model(ids).logits)
    with pytest.raises(RuntimeError, match="a compiled model cannot read packed rows"):
        compiled(torch.tensor([[0, 1, 0, 1]]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_export_with_a_dynamic_batch_and_length(name):
    model = model_of(name, torch.float32, num_hidden_layers=1)

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, use_cache=False).logits

    dynamic = torch.export.Dim.DYNAMIC
    with torch.no_grad():
        program = torch.export.export(
            Logits(), (tokens(2, 9),), dynamic_shapes=({0: dynamic, 1: dynamic},)
        )
        for batch, length in ((3, 14), (2, 37)):
            ids = tokens(batch, length)
            torch.testing.assert_close(program.module()(ids), model(ids).logits)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's attention
@pytest.mark.parametrize("name", NAMES)
def test_torch_func_gives_the_gradients_of_backward(name):
    """And per example, under vmap."""
    model, ids = model_of(name, num_hidden_layers=1), tokens(2, 9)
    weights = dict(model.named_parameters())

    def loss(weights, ids):
        given = {"input_ids": ids, "labels": ids, "use_cache": False}
        return functional_call(model, weights, (), given).loss

    found = grad(loss)(weights, ids)
    each = vmap(grad(lambda w, row: loss(w, row[None])), in_dims=(None, 0))(weights, ids)
    model(ids, labels=ids, use_cache=False).loss.backward()
    for key, weight in weights.items():
        torch.testing.assert_close(found[key], weight.grad)
        torch.testing.assert_close(each[key].mean(0), weight.grad)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_on_the_meta_device(name):
    model, ids = model_of(name, num_hidden_layers=1).to("meta"), tokens(2, 9)
    mask = padded(ids).to("meta")
    output = model(ids.to("meta"), attention_mask=mask, use_cache=True)
    assert output.logits.shape == (2, 9, VOCABULARY)
    assert model(ids.to("meta"), labels=ids.to("meta")).loss.is_meta
    more = model(ids.to("meta"), past_key_values=output.past_key_values)
    assert more.logits.shape == (2, 9, VOCABULARY)


@torch.no_grad()
def test_levels_that_learn_are_exported_without_learning():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 8}
    model = NestlingForCausalLM(presets.tiny(num_attention_heads=2, **sizes)).eval()
    ids = torch.randint(0, 250, (1, 300))
    with pytest.raises(ValueError, match="cannot be exported: give learn=False"):
        torch.export.export(model, (ids,), kwargs={"use_cache": False})
    still = {"use_cache": False, "learn": False}
    program = torch.export.export(model, (ids,), kwargs=still).module()
    torch.testing.assert_close(program(ids, **still).logits, model(ids, **still).logits)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
