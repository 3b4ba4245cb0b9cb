"""The study of classes: every arm learns, what must remember does, tuning and the page."""

from __future__ import annotations

import pytest
import torch

from studies.continual import metrics
from studies.continual import study as module
from studies.continual.study import ARMS, OTHER, Shape, accuracies, build, run_stream
from studies.harness.study import Cell, Job
from studies.harness.tuning import same_number

TASKS = ((0, 1), (2, 3), (4, 5))
SHAPE = Shape(6, 16, 120)
CLOSED = ("ours", "uneven", "klda", "klda_places", "ranpac", "ranpac_places", "lda", "mean")


def clouds(each: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Six classes in twelve places of width 16."""
    centres = torch.randn(6, 12, 16, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6).repeat_interleave(each)
    noise = torch.randn(len(y), 12, 16, generator=torch.Generator().manual_seed(seed))
    return centres[y] + 0.7 * noise, y


@pytest.fixture(scope="module")
def results() -> dict[str, list[list[float]]]:
    """The matrix of every arm at a fair setting."""
    train, test = clouds(40, 1), clouds(40, 2)
    made = {}
    for name, arm in ARMS.items():
        settings = ARMS[arm.like or name].settings
        fair = settings[-1 if "rate" in settings[0] else 2]  # few examples need large steps
        learner = build(name, SHAPE, fair, 3)
        made[name], seconds = run_stream(learner, train, test, TASKS)
        assert seconds > 0
        assert learner.stored() > 0
    return made


def test_every_arm_learns(results):
    for name, matrix in results.items():
        assert metrics.average_accuracy(matrix) > 0.3, name  # chance is 1/6
        assert matrix[0][0] > 0.9, name


def test_closed_forms_and_replay_remember(results):
    end = {name: metrics.average_accuracy(matrix) for name, matrix in results.items()}
    for name in (*CLOSED, "joint", "replay_20"):
        assert end[name] > 0.9, name
    assert end["sequential"] < min(end["replay_20"], end["ours"]) - 0.05
    assert metrics.forgetting(results["ours"]) < 0.05


def test_shuffled_labels_give_chance():
    x, y = clouds(40, 1)
    mixed = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(4))]
    learner = build("ours", SHAPE, ARMS["ours"].settings[0], 3)
    matrix, _ = run_stream(learner, (x, mixed), clouds(40, 2), TASKS)
    assert metrics.average_accuracy(matrix) < 0.35


def test_elastic_weights_that_cannot_move_stay():
    """EWC with an endless strength keeps the weights of the first task."""
    train = clouds(40, 1)
    learner = build("ewc", SHAPE, {"rate": 1e-3, "strength": 0.0}, 3)
    stiff = build("ewc", SHAPE, {"rate": 1e-3, "strength": 1e9}, 3)
    for each in (learner, stiff):
        each.learn(train[0][:80], train[1][:80])
    start = [p.detach().clone() for p in stiff.network.parameters()]
    for each in (learner, stiff):
        each.learn(train[0][80:160], train[1][80:160])

    def moved(each):
        pairs = zip(each.network.parameters(), start, each.fisher, strict=True)
        return sum(float(((p.detach() - s).abs() * (f > 1e-6)).sum()) for p, s, f in pairs)

    assert moved(stiff) < 0.2 * moved(learner)


def test_what_a_task_taught_an_adapter_never_changes():
    x, y = clouds(40, 1)
    learner = build("lora", SHAPE, {"rate": 1e-3, "rank": 4}, 3)
    learner.learn(x[:80], y[:80])
    before = learner.scores(x)[:, :2]
    learner.learn(x[80:160], y[80:160])
    assert torch.equal(learner.scores(x)[:, :2], before)
    assert (learner.scores(x)[:, 4:] == -torch.inf).all()


def test_learners_are_shown_the_present_task_only():
    seen = []

    class Watching:
        joint = False

        def learn(self, x, y):
            seen.append(set(y.tolist()))

        def scores(self, x):
            return torch.zeros(len(x), 6)

    run_stream(Watching(), clouds(4, 1), clouds(4, 2), TASKS)
    assert seen == [{0, 1}, {2, 3}, {4, 5}]
    with pytest.raises(ValueError, match="task 0 has no training examples"):
        run_stream(Watching(), clouds(4, 1), clouds(4, 2), ((7,),))


def test_accuracies_by_hand():
    scores = torch.tensor([[3.0, 2, 1], [1, 2, 3], [3, 1, 2]])
    y = torch.tensor([0, 1, 2])
    tasks = ((0,), (1,), (2,))
    assert accuracies(scores, y, tasks, (0, 1)) == [1.0, 1.0, 0.0]
    assert accuracies(scores, y, tasks, (0, 1, 2)) == [1.0, 0.0, 0.0]


def test_settings_come_from_another_stream_and_every_arm_has_as_many():
    study = module.study(False)
    assert same_number({n: arm.settings for n, arm in ARMS.items() if not arm.like}) == 6
    for task in study.tasks:
        for arm in study.arms:
            trials = study.trials(task, arm)
            assert {job.task for job in trials} == {OTHER[task]} != {task}
            assert {job.seed for job in trials}.isdisjoint(study.seeds)


def test_trials_never_see_the_test_split(tmp_path, monkeypatch):
    from studies.continual.streams import Dataset, Split
    from studies.harness.study import Context

    splits = {
        name: Split(texts=tuple(f"{name} {i}" for i in range(12)), labels=tuple([*range(6)] * 2))
        for name in ("train", "valid", "test")
    }
    stream = Dataset(name="x", classes=tuple("abcdef"), tasks=3, **splits)
    asked: list[str] = []

    class Fake:
        def features(self, texts, folder):
            asked.extend(texts)
            return torch.randn(len(texts), 12, 16)

    monkeypatch.setattr(module, "load", lambda *_: stream)
    monkeypatch.setattr(module, "load_base", lambda *_: Fake())
    context = Context(tmp_path, tmp_path, tmp_path / "a" / "models")
    fixed = module.Fixed(width_of_random_units=20)
    for trial, split in ((True, "valid"), (False, "test")):
        asked.clear()
        job = Job(f"x{trial}", "lda", {"shrink": 0.1}, 1, trial)
        run = module.make(job, context, fixed, False)
        assert {text.split()[0] for text in asked} == {"train", split}
        assert ("matrix" in run) != trial


def made_up(arm: str, seed: int, accuracy: float) -> dict:
    return {
        "task": "banking77", "arm": arm, "seed": seed, "setting": {}, "accuracy": accuracy,
        "forgetting": 1 - accuracy, "learned": 1.0, "matrix": [[accuracy]], "parameters": 10,
        "seconds": 1.0,
    }  # fmt: skip


def test_the_page_states_verdicts_and_goals(tmp_path):
    study = module.study(False)
    runs = {}
    for seed in study.seeds:
        for arm, accuracy in (("ours", 0.94), ("klda", 0.92), ("ranpac", 0.95), ("joint", 0.945)):
            key = f"run/banking77/{arm}/{seed}"
            runs[key] = made_up(arm, seed, accuracy + 0.001 * (seed % 2) * (arm == "ours"))
    text = study.page(study, runs).write(tmp_path, "p").read_text()
    rows = {
        line.split(" | ")[0]: line.split(" | ")[2]
        for line in text.splitlines()
        if line.startswith("| ") and "**" in line
    }
    findings = [line for line in text.splitlines() if line[:2] in ("1.", "2.", "3.")]
    assert "Ours is not: ahead of RanPAC (banking77 -1.0" in findings[0]
    assert "Ours is: ahead of KLDA (banking77 +2.0" in findings[1]
    assert "Goals for accuracy: banking77 **reached**" in findings[2]
    assert "**shown** +2" in rows["| ahead of KLDA"]
    assert "**refuted**" in rows["| ahead of RanPAC"]
    assert "**shown**" in rows["| within one point of joint training"]
    assert "**reached** 94.0 (goal 93.5)" in rows["| goal"]
    assert "**Unfinished**" in text
    assert len(text.splitlines()) <= 150
    assert (tmp_path / "p.svg").read_text().count("accuracy %, ") == 3


def test_unknown_arms_are_named():
    with pytest.raises(ValueError, match="unknown arm 'kldb'"):
        build("kldb", SHAPE, {}, 0)
    assert Cell({}).values("accuracy") == {}
