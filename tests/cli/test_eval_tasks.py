"""`nestling eval --tasks`: the stock harness on real data that lies on disk."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nestling.models import NestlingForCausalLM, byte_tokenizer, presets

TASK = """task: last_word
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {data}}}
validation_split: validation
output_type: loglikelihood
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list:
  - metric: perplexity
  - metric: acc
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = NestlingForCausalLM(presets.tiny(num_hidden_layers=1, intermediate_size=32))
    made.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def evaluate(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nestling.cli", "eval", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
    )


def test_the_harness_scores_a_task_of_ones_own(
    tmp_path: Path, model: Path, shared_data: Path
) -> None:
    pytest.importorskip("lm_eval")
    with gzip.open(shared_data / "lm_evals" / "lambada_test_openai.jsonl.gz", "rt") as file:
        lines = [next(file) for _ in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "last_word.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    out = tmp_path / "found.json"
    options = ["--include", str(tmp_path / "tasks"), "--limit", "3", "--out", str(out)]
    done = evaluate(tmp_path, str(model), "--tasks", "last_word", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())["last_word"]
    assert found["perplexity,none"] > 10  # an untrained model knows no word
    assert "last_word  acc,none" in done.stdout


def test_a_task_nobody_knows_is_one_line(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("lm_eval")
    done = evaluate(tmp_path, str(model), "--tasks", "no_such_task")
    assert done.returncode == 2
    assert "no_such_task" in done.stderr.strip().splitlines()[-1]


def test_a_suite_of_long_texts_needs_no_data(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "found.json"
    options = ["--suite", "ruler", "--tasks", "s1,mk2", "--lengths", "1k", "--limit", "2"]
    done = evaluate(tmp_path, str(model), *options, "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ruler  s1 at 1024 tokens  0.0%  (2 samples)" in done.stdout
    assert set(json.loads(out.read_text())) == {"s1 at 1024", "mk2 at 1024"}
