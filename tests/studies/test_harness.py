"""The harness: tuning, verdicts, pages, the loop, jobs, and the queue that runs them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from studies.harness.loop import cosine, train
from studies.harness.models import keep_model, kept_model
from studies.harness.page import LINES, Page, Section, sections, table
from studies.harness.store import Store
from studies.harness.study import Job, Study
from studies.harness.tables import _edges
from studies.harness.tuning import best, ranked, same_number
from studies.harness.verdict import PLACE, Interval, difference, judged, paired, verdict

ROOT = Path(__file__).resolve().parents[2]


def test_every_arm_has_as_many_trials():
    assert same_number({"a": [1, 2], "b": [3, 4]}) == 2
    with pytest.raises(ValueError, match="got a 2, b 1"):
        same_number({"a": [1, 2], "b": [3]})


def test_the_best_setting_is_finite_and_the_first_of_equals():
    scores = {1: 0.5, 2: math.nan, 3: 0.5, 4: 0.2, 5: math.inf}
    assert ranked(list(scores), scores.__getitem__, lower=True)[:3] == [4, 1, 3]
    assert best(list(scores), scores.__getitem__) == 1
    assert best([7], lambda _: pytest.fail("an only one needs no trial")) == 7
    assert best([1, 2], lambda s: (1.0, -s)) == 1


def test_verdicts_are_paired_and_say_which_way():
    ours, theirs = {1: 0.9, 2: 0.8, 3: 0.85, 9: 0.0}, {1: 0.8, 2: 0.7, 3: 0.74}
    assert paired(ours, theirs) == pytest.approx([0.1, 0.1, 0.11])
    gap = difference([0.9, 0.8, 0.85], [0.8, 0.7, 0.74])
    assert verdict(gap) == "shown"
    assert verdict(gap, higher=False) == "refuted"
    assert verdict(gap, words=PLACE) == "ahead of"
    assert verdict(Interval(0.1, math.nan)) == "inconclusive"
    assert verdict(Interval(math.nan, 0.1)) == "inconclusive"
    assert judged([0.1, 0.1, 0.11], higher=True).startswith("shown (+0.1033 ± 0.0143)")
    assert judged([0.1]) == "inconclusive (too few seeds)"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    steps: int = 3
    rates: tuple[float, ...] = (0.1, 0.01)


def page(count: int, body: list[str] | None) -> Page:
    rows = table(["arm", "x"], [(i, i) for i in range(count)])
    return Page(
        title="T",
        command="python -m studies x",
        findings=["first", "second"],
        limits=["few"],
        protocol=Protocol(),
        sections=(
            Section(title="Kept", body=body),
            Section(title="Long", body=rows),
            Section(title="All", body=["every run"], appendix=True),
        ),
    )


def test_a_page_says_findings_limits_and_protocol_first(tmp_path):
    text = page(5, ["now"]).write(tmp_path, "x").read_text()
    places = [text.index(w) for w in ("1. first", "2. second", "- few", "rates | 0.1, 0.01", "## ")]
    assert places == sorted(places)
    assert "[the appendix](x_appendix.md)" in text
    assert "every run" in (tmp_path / "x_appendix.md").read_text()


@pytest.mark.parametrize("count", [100, 140, 400])
def test_a_page_has_150_lines_and_the_rest_is_in_the_appendix(tmp_path, count):
    text = page(count, ["now"]).write(tmp_path, "x").read_text()
    assert len(text.splitlines()) <= LINES
    rest = (tmp_path / "x_appendix.md").read_text()
    assert f"| {count - 1} | {count - 1} |" in text + rest
    assert ("## Long" in text) == (count == 100)


def test_a_page_never_loses_what_it_has_no_runs_for(tmp_path):
    page(3, ["measured long ago", "", "in two lines"]).write(tmp_path, "x")
    text = page(4, None).write(tmp_path, "x").read_text()
    assert sections(text)["Kept"] == ["measured long ago", "", "in two lines"]
    assert "| 3 | 3 |" in text
    page(400, None).write(tmp_path, "x")  # also when sections move to the appendix and back
    assert "measured long ago" in page(4, None).write(tmp_path, "x").read_text()
    assert "## Kept" not in page(4, None).write(tmp_path / "new", "x").read_text()


def test_the_optimizers_page_keeps_the_parts_that_were_not_run(tmp_path):
    from studies.optim.report import write

    stored = Path(__file__).parents[2] / "docs" / "results" / "optim.md"
    old = stored.read_text("utf-8")
    (tmp_path / "optim.md").write_text(old, "utf-8")
    write({}, tmp_path)
    assert len(sections(old)) >= 4
    assert sections((tmp_path / "optim.md").read_text("utf-8")) == sections(old)


def test_the_loop_goes_on_exactly(tmp_path):
    def run(save, steps, stop=None):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        data = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def loss(step):
            if step == stop:
                raise KeyboardInterrupt
            return (model(data[step]) - data[step].sum(1, keepdim=True)).square().mean()

        done = train([model], loss, optimizer, steps=steps, schedule=cosine(), save=save, every=0.0)
        return done.losses[0], model.weight.detach()

    whole, weight = run(None, 40)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 40, stop=25)
    again, same = run(tmp_path, 40)
    assert again == whole
    assert torch.equal(same, weight)
    assert len(list(tmp_path.iterdir())) == 1  # one checkpoint is kept


def test_a_run_that_diverged_ends(tmp_path):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(step):
        return model(torch.ones(1, 1)).sum() * (math.nan if step == 3 else 1.0)

    done = train([model], loss, optimizer, steps=10)
    assert len(done.losses[0]) == 4
    assert done.last() == math.inf


def test_a_model_is_kept_whole_or_not_at_all(tmp_path):
    from nestling.models import NestlingForCausalLM, presets

    fields = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = NestlingForCausalLM(presets.tiny("hope", intermediate_size=8, **fields)).eval()
    (tmp_path / ".m.killed").mkdir()
    keep_model(model, tmp_path / "m", {"seed": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    ids = torch.arange(8)[None]
    found = kept_model(tmp_path / "m")
    assert found is not None
    assert torch.equal(found(input_ids=ids).logits, model(input_ids=ids).logits)
    seal = next(path for path in (tmp_path / "m").iterdir() if b'"seed"' in path.read_bytes())
    said = seal.read_bytes()
    seal.unlink()  # killed before it was whole
    assert kept_model(tmp_path / "m") is None
    seal.write_bytes(said)
    assert kept_model(tmp_path / "m") is not None
    weights = next((tmp_path / "m").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-10])
    assert kept_model(tmp_path / "m") is None
    assert kept_model(tmp_path / "nothing") is None


def made_up(make, **changes) -> Study:
    given = {
        "name": "x",
        "protocol": Protocol(),
        "tasks": ("t",),
        "arms": {"hope": "Hope", "linear": "linear attention", "like": "as Hope"},
        "seeds": (0, 1, 2),
        "tuning_seed": 100,
        "settings": {arm: [{"rate": 0.1}, {"rate": 0.2}] for arm in ("hope", "linear")},
        "borrowed": {"like": "hope"},
        "make": make,
        "judged": "loss",
        "lower": True,
        "page": lambda study, runs: None,
        "page_name": "x",
    }
    return Study(**{**given, **changes})


def test_an_arm_has_its_trials_first_and_each_job_is_done_once(tmp_path):
    done = []

    def make(job: Job, context) -> dict:
        done.append(job.key)
        assert context.scratch.parts[-1] not in ("", "..")
        loss = abs(job.setting["rate"] - (0.2 if job.arm == "hope" else 0.1))
        return {"loss": loss, "seconds": 1.0}

    study, store = made_up(make), Store(tmp_path / "stored", study="x")
    first = list(study.jobs(store))
    assert [job.trial for job in first] == [True] * 4  # `like` borrows, no run is ready
    assert study.total() == 4 + 9
    for job in first[:2]:
        study.do(job, store, tmp_path)
    ready = [job for job in study.jobs(store) if not job.trial]
    assert {job.arm for job in ready} == {"hope", "like"}
    assert {job.setting["rate"] for job in ready} == {0.2}
    while jobs := list(study.jobs(store)):
        for job in jobs:
            study.do(job, store, tmp_path)
    assert len(done) == len(set(done)) == 13
    assert store.get("run/t/linear/2")["setting"] == {"rate": 0.1}


def test_a_study_with_unequal_trials_or_a_seed_of_tuning_is_refused():
    settings = {"hope": [{"rate": 0.1}], "linear": [{"rate": 0.1}, {"rate": 0.2}]}
    with pytest.raises(ValueError, match="hope 1, linear 2"):
        made_up(None, settings=settings)
    with pytest.raises(ValueError, match="seed 100 is for tuning"):
        made_up(None, seeds=(100, 1))


def queue(tmp_path: Path, data: Path, *words: str) -> list[str]:
    command = [sys.executable, "-m", "studies", "queue", *words, "--quick", "--data", str(data)]
    return [*command, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]


def test_the_queue_runs_jobs_and_goes_on_after_a_kill(shared_data, tmp_path):
    """Killed in the middle and started again: every job once, a page at the end, then nothing."""
    command = queue(tmp_path, shared_data, "recall", "--jobs", "2")
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not list((tmp_path / "runs").rglob("run/**/*.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
    assert (tmp_path / "out" / "associative_recall.md").is_file()
    third = subprocess.run(
        [*command, "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "in all 0, about 0.0 h" in third.stdout
    assert list((tmp_path / "runs" / "queue").rglob("*.log"))


def test_a_page_names_arms_whose_best_rate_is_at_the_edge_of_the_grid():
    settings = {arm: [{"rate": rate} for rate in (0.1, 0.2, 0.3)] for arm in ("hope", "linear")}
    study = made_up(None, settings=settings)
    wanted = {"hope": 0.2, "linear": 0.3}
    runs = {
        job.key: {"loss": abs(job.setting["rate"] - wanted[arm])}
        for arm in wanted
        for job in study.trials("t", arm)
    }
    said = "The best rate is at the edge of the grid for linear attention (t, 0.3)."
    assert _edges(study, runs) == [said]
    assert _edges(study, dict(list(runs.items())[:4])) == [], "trials that are not done say nothing"
