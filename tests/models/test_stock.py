"""Stock tools meet a saved model: Auto classes, pipeline, lm_eval, Trainer, accelerate, peft."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_models import MODELS, config_of, model_of, tokens

from nestling.models import NestlingConfig, NestlingForCausalLM, byte_tokenizer, presets

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of bytes with its tokenizer."""
    made = tmp_path_factory.mktemp("saved") / "model"
    torch.manual_seed(0)
    model = NestlingForCausalLM(presets.tiny(num_hidden_layers=1, intermediate_size=32))
    model.save_pretrained(made)
    byte_tokenizer().save_pretrained(made)
    return made


def fresh(code: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with modules of remote code kept in a folder of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", **environment},
    )


OPEN = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
assert "nestling" not in sys.modules
assert AutoConfig.from_pretrained({folder!r}, trust_remote_code=True).model_type == "nestling"
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)
assert type(model).__module__ == "nestling.models.modeling", type(model)
assert type(AutoModel.from_pretrained({folder!r}, trust_remote_code=True)).__name__ == "NestlingModel"
writer = pipeline("text-generation", {folder!r}, trust_remote_code=True)
print(len(writer("A nestling", max_new_tokens=4, do_sample=False)[0]["generated_text"]))
model.save_pretrained("again")
"""  # noqa: E501


def test_a_process_that_never_imported_us_opens_it_with_remote_code(folder, tmp_path):
    done = fresh(OPEN.format(folder=str(folder)), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= len("A nestling")
    again = tmp_path / "again"
    assert sorted(path.name for path in again.glob("*.py")) == ["modeling_nestling.py"]
    first, second = (json.loads((f / "config.json").read_text()) for f in (folder, again))
    assert first == second
    assert set(first["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}


BEFORE = "import nestling\nfrom transformers import AutoModelForCausalLM, AutoConfig, pipeline\n"
AFTER = "from transformers import AutoModelForCausalLM, AutoConfig, pipeline\nimport nestling\n"


@pytest.mark.parametrize("start", [BEFORE, AFTER], ids=["before", "after"])
def test_importing_nestling_alone_is_enough(start, folder, tmp_path):
    code = start + (
        "import sys\n"
        "assert 'nestling.models' not in sys.modules\n"
        "config = AutoConfig.for_model('nestling', hidden_size=64)\n"
        "assert type(config) is nestling.NestlingConfig and config.hidden_size == 64\n"
        f"config = AutoConfig.from_pretrained({str(folder)!r})\n"
        "assert type(config) is nestling.NestlingConfig, type(config)\n"
        f"writer = pipeline('text-generation', {str(folder)!r})\n"
        "assert type(writer.model) is nestling.NestlingForCausalLM\n"
        "assert not [f for f in sys.meta_path if type(f).__module__ == 'nestling.registration']\n"
    )
    done = fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_registry_is_told_before_anything_else_is_imported(folder, tmp_path):
    """The first thing asked may be a saved model: the stand-in hands over to the classes."""
    code = (
        "import transformers, nestling, sys\n"
        f"made = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        "assert type(made) is nestling.NestlingForCausalLM\n"
    )
    done = fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {name!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Hidden())
"""


def test_without_nestling_the_message_says_what_to_install(folder, tmp_path):
    code = HIDE.format(name="nestling") + (
        "from transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
    )
    done = fresh(code, tmp_path)
    assert done.returncode != 0
    assert "this model needs nestling: pip install 'nestling[lm]'" in done.stderr


@pytest.mark.parametrize(
    "use", ["nestling.NestlingForCausalLM", "nestling.models", "nestling.adapt"]
)
def test_without_transformers_the_message_says_what_to_install(use, tmp_path):
    code = HIDE.format(name="transformers") + f"import nestling, importlib\n_ = {use}\n"
    code = code.replace("_ = nestling.models", "import nestling.models")
    done = fresh(code, tmp_path)
    assert done.returncode != 0
    assert "needs transformers: pip install 'nestling[lm]'" in done.stderr.splitlines()[-1]


def test_lm_eval_scores_it_from_the_command_line(folder, tmp_path):
    pytest.importorskip("lm_eval")
    lines = [{"text": "the bird sings in the tree"}, {"text": "a nestling learns to fly"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = {
        "task": "last_word",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(tmp_path / "data.jsonl")}},
        "validation_split": "validation",
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "last_word.yaml").write_text(json.dumps(task))
    code = (
        "import sys\n"
        "from lm_eval.__main__ import cli_evaluate\n"
        f"sys.argv = ['lm_eval', '--model', 'hf', '--model_args',"
        f" 'pretrained={folder},trust_remote_code=True', '--tasks', 'last_word',"
        f" '--include_path', {str(tmp_path / 'tasks')!r}, '--device', 'cpu']\n"
        "assert 'nestling' not in sys.modules\n"
        "cli_evaluate()\n"
    )
    done = fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|last_word|" in done.stdout.replace(" ", "")


def test_from_pretrained_has_the_stock_signature(folder):
    ids = tokens(1, 8)
    loaded = NestlingForCausalLM.from_pretrained(pretrained_model_name_or_path=folder)
    made = NestlingForCausalLM.from_pretrained(
        None, config=loaded.config, state_dict=loaded.state_dict()
    )
    assert torch.equal(made(ids).logits, loaded(ids).logits)


def test_a_folder_of_weights_alone_is_opened_with_a_configuration(folder, tmp_path):
    for name in ("model.safetensors", "generation_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    config = NestlingConfig.from_pretrained(folder)
    loaded = NestlingForCausalLM.from_pretrained(tmp_path, config=config)
    ids = tokens(1, 8)
    whole = NestlingForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded(ids).logits, whole(ids).logits)
    (tmp_path / "deep").mkdir()
    whole.save_pretrained(tmp_path / "deep" / "er")
    again = NestlingForCausalLM.from_pretrained(tmp_path / "deep", subfolder="er", vocab_size=259)
    assert torch.equal(again(ids).logits, whole(ids).logits)


def test_typos_are_refused_at_construction_and_not_in_a_saved_configuration(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'num_hidden_layers'"):
        NestlingConfig(num_hidden_layer=2)
    config_of("hope").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "num_hidden_layer": 7}))
    loaded = NestlingConfig.from_pretrained(tmp_path)
    assert loaded.num_hidden_layers == 2
    assert loaded.num_hidden_layer == 7


def test_attention_weights_are_refused_not_left_out():
    model, ids = model_of("transformer", torch.float32), tokens(1, 5)
    with pytest.raises(ValueError, match="memories have no attention weights"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="memories have no attention weights"):
        model.generate(ids, max_new_tokens=1, output_attentions=True, return_dict_in_generate=True)
    assert model(ids, output_attentions=False).attentions is None


# Packed rows

LENGTHS = [[5, 1, 3], [4, 5, 0]]


def packed():
    """Two rows of nine tokens with three and two documents, and each document alone."""
    ids = tokens(2, 9)
    positions = torch.tensor([[p for n in row for p in range(n)] for row in LENGTHS])
    alone = [
        part.unsqueeze(0)
        for row, sizes in zip(ids, LENGTHS, strict=True)
        for part in row.split(sizes)
        if len(part)
    ]
    return ids, positions, alone


@pytest.mark.parametrize("name", MODELS)
def test_documents_in_packed_rows_do_not_see_each_other(name):
    model = model_of(name)
    ids, positions, alone = packed()
    output = model(ids, position_ids=positions, use_cache=True)
    expected = torch.cat([model(part).logits[0] for part in alone])
    torch.testing.assert_close(output.logits.flatten(0, 1), expected)
    assert not torch.allclose(model(ids).logits, output.logits)  # they do without
    follow = tokens(2, 3, seed=5)
    after = model(follow, past_key_values=output.past_key_values).logits
    for row, last in enumerate((alone[2], alone[4])):
        whole = model(torch.cat([last, follow[row : row + 1]], dim=1)).logits[0, -3:]
        torch.testing.assert_close(after[row], whole)


def test_packed_rows_with_padding_train_as_single_documents():
    model = model_of("hope").train()
    ids, positions, alone = packed()
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    labels = ids.clone()
    labels[positions == 0] = -100
    labels[mask == 0] = -100
    options = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    loss = model(ids, labels=labels, **options).loss
    alone[4] = alone[4][:, :3]
    parts = [part for part in alone if part.shape[1] > 1]
    each = [model(part, labels=part).loss * (part.shape[1] - 1) for part in parts]
    torch.testing.assert_close(loss, sum(each) / sum(part.shape[1] - 1 for part in parts))
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_positions_that_mean_nothing_to_a_memory_are_refused():
    model, ids = model_of("hope", torch.float32), tokens(1, 4)
    with pytest.raises(ValueError, match=r"go up by one.*jump to 7"):
        model(ids, position_ids=torch.tensor([[0, 1, 7, 8]]))
    with pytest.raises(ValueError, match=r"position_ids must be \[batch, tokens\]; got \(2, 4\)"):
        model(ids, position_ids=torch.zeros(2, 4, dtype=torch.long))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cannot go on from past_key_values"):
        model(ids, past_key_values=cache, position_ids=torch.tensor([[0, 1, 0, 1]]))
    with pytest.raises(ValueError, match="give no hidden states"):
        model(ids, output_hidden_states=True, position_ids=torch.tensor([[0, 1, 0, 1]]))
    with pytest.raises(ValueError, match="got cu_seq_lens_q alone"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 2, 4]))
    model(ids, position_ids=torch.tensor([[3, 4, 5, 6]]))  # where a row begins does not matter


# Trainer, accelerate, peft


def arguments(folder: Path, **given):
    from transformers import TrainingArguments

    base = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**base, **given})


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize("name", ["hope", "transformer", "titans"])
def test_the_trainer_evaluates_predicts_and_loads_its_best(name, tmp_path):
    from transformers import Trainer

    rows = [{"input_ids": row, "labels": row} for row in tokens(12, 10)]
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }
    trainer = Trainer(
        model=model_of(name, torch.float32),
        args=arguments(tmp_path, **options),
        train_dataset=rows[:8],
        eval_dataset=rows[8:],
    )
    trainer.train()
    found = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    assert len(found) == 3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(found), rel=1e-5)
    predicted = trainer.predict(rows[8:])
    assert predicted.predictions.shape == (4, 10, 13)  # logits alone, no states
    best = NestlingForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    ids = tokens(1, 7)
    torch.testing.assert_close(best.eval()(ids).logits, trainer.model.eval()(ids).logits)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_the_trainer_keeps_documents_of_flattened_rows_apart(tmp_path):
    """The stock collator packs a batch into one row; the loss is that of the documents."""
    from transformers import DataCollatorWithFlattening, Trainer

    documents = [{"input_ids": row[:n].tolist()} for row, n in zip(tokens(4, 9), (9, 5, 7, 3))]
    model = model_of("hope", torch.float32)
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path),
        eval_dataset=documents,
        data_collator=DataCollatorWithFlattening(),
    )
    found = trainer.evaluate()["eval_loss"]
    total, count = 0.0, 0
    with torch.no_grad():
        for document in documents:
            ids = torch.tensor([document["input_ids"]])
            total += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    assert found == pytest.approx(total / count, rel=1e-4)


def test_accelerate_trains_saves_and_goes_on(tmp_path):
    from accelerate import Accelerator

    def begin():
        accelerator = Accelerator(cpu=True)
        model = model_of("hope", torch.float32).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return accelerator, *accelerator.prepare(model, optimizer)

    def steps(accelerator, model, optimizer, batches):
        for ids in batches:
            loss = model(ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    batches = tokens(12, 8).split(4)
    first = begin()
    steps(*first, batches[:2])
    first[0].save_state(str(tmp_path))
    expected = steps(*first, batches[2:])
    second = begin()
    second[0].load_state(str(tmp_path))
    assert steps(*second, batches[2:]) == expected


@pytest.mark.parametrize("name", ["hope", "hope_attention", "titans", "deltanet"])
def test_lora_trains_only_its_own_weights_and_merges(name, tmp_path):
    peft = pytest.importorskip("peft")
    model = model_of(name, torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, config).train()
    trained = [n for n, p in tuned.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in n for n in trained)
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    ids = tokens(4, 9)
    losses = []
    for _ in range(6):
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    tuned.eval().save_pretrained(tmp_path)
    expected = tuned(input_ids=ids).logits
    assert tuned.generate(input_ids=ids, max_new_tokens=2).shape == (4, 11)
    again = peft.PeftModel.from_pretrained(model_of(name, torch.float32), tmp_path).eval()
    torch.testing.assert_close(again(input_ids=ids).logits, expected)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)
    for key, value in tuned.unload().state_dict().items():
        assert torch.equal(value, before[key]), key
