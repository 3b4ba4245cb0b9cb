"""`nestling tune`: what is searched, in which order, and that a search goes on where it was."""

from __future__ import annotations

import json

import pytest

from nestling.cli import main
from nestling.cli.tune import _best
from nestling.models import presets
from nestling.train.recipe import changed, get_recipe
from nestling.train.search import Axis, at_point, halton, read_space, tpe

SMALL = (
    "run.steps=2",
    "run.rows=2",
    "run.eval_every=2",
    "run.eval_windows=2",
    "data.length=32",
    "data.train=builtin:4",
    "data.valid=builtin:300-301",
    "model.fields.num_hidden_layers=1",
    "model.fields.intermediate_size=8",
    "model.fields.hidden_size=16",
)


def test_a_space_is_read_from_ranges_and_choices():
    rate, rows, name = read_space(["optim.lr=1e-4..1e-2", "run.rows=2..5", "optim.name=adamw|m3"])
    assert (rate.low, rate.high, rate.logarithmic, rate.whole) == (1e-4, 1e-2, True, False)
    assert rate.at(0.5) == "0.001"
    assert [rows.at(share) for share in (0.0, 0.26, 0.51, 0.99)] == ["2", "3", "4", "5"]
    assert [name.at(share) for share in (0.0, 0.5, 0.99)] == ["adamw", "m3", "m3"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("optim.lr=a..b", "must be numbers"),
        ("optim.lr=1..1", "from a lower number to a higher"),
        ("optim.name=a||b", "different and not empty"),
        ("optim.lr=1", "key=low..high"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(setting, says):
    with pytest.raises(ValueError, match=says):
        read_space([setting])
    with pytest.raises(ValueError, match="given twice"):
        read_space(["a=1..2", "a=1..2"])


def test_halton_covers_every_axis_evenly():
    axes = [Axis(key="a", low=0.0, high=1.0), Axis(key="b", low=0.0, high=1.0)]
    points = [halton(axes, number) for number in range(36)]
    for axis, cells in (("a", 4), ("b", 3)):
        counts = [0] * cells
        for point in points:
            share = float(point[axis]) + 1e-4  # it is shown with four digits
            counts[int(share * cells)] += 1
        assert max(counts) - min(counts) <= 1, counts
    assert len({tuple(point.values()) for point in points}) == 36


def test_keys_of_levels_reach_the_levels():
    recipe = get_recipe("hope")
    levels = presets.tiny("hope").levels
    point = {"level.fast.rate": "0.7", "level.slow.chunk": "1024", "optim.lr": "0.01"}
    made = at_point(recipe, point, levels)
    found = {level["name"]: level for level in made.model.fields["levels"]}
    assert (found["fast"]["rate"], found["slow"]["chunk"], made.optim.lr) == (0.7, 1024, 0.01)
    assert found["middle"] == next(level for level in levels if level["name"] == "middle")
    with pytest.raises(ValueError, match=r"level\.NAME\.rate.*fast, middle, slow"):
        at_point(recipe, {"level.quick.rate": "1"}, levels)


def test_a_recipe_is_the_changes_it_shows():
    recipe = changed(get_recipe("hope"), ["run.patience=3", "optim.chunks=1,4", "data.separator=x"])
    assert changed(get_recipe("tiny"), recipe.lines()) == recipe


def test_tpe_goes_where_losses_were_low():
    space = read_space(["x=0.001..1.0", "kind=a|b"])
    done = [
        ({"x": f"{0.001 * 1.3**i:.4g}", "kind": kind}, more + abs(i - 20.0))
        for i in range(26)
        for kind, more in (("a", 0.0), ("b", 40.0))
    ]
    near = [tpe(space, number, done) for number in range(8)]
    assert sum(point["kind"] == "a" for point in near) >= 6  # by chance 4
    middle = sorted(float(point["x"]) for point in near)[4]
    assert 0.05 < middle < 0.8


@pytest.mark.slow
def test_a_search_finds_the_best_and_goes_on_where_it_was(tmp_path, capsys):
    told = ["tune", "tiny", *SMALL, "optim.lr=1e-6..1e-2", "--out", str(tmp_path)]
    assert main([*told, "--trials", "1"]) == 0
    assert "best: nestling train tiny" in capsys.readouterr().out
    first = tmp_path / "trial-000" / "run" / "metrics.jsonl"
    before = first.read_bytes()
    (tmp_path / "trial-001").mkdir()  # a trial that was stopped before it began
    (tmp_path / "trial-001" / "point.json").write_text(json.dumps({"optim.lr": "0.005"}))
    assert main([*told, "--trials", "3", "--jobs", "2"]) == 0
    assert first.read_bytes() == before
    said = capsys.readouterr().out
    losses = {
        n: json.loads((tmp_path / f"trial-{n:03d}" / "result.json").read_text())["loss"]
        for n in range(3)
    }
    points = {
        n: json.loads((tmp_path / f"trial-{n:03d}" / "point.json").read_text())["optim.lr"]
        for n in range(3)
    }
    best = min(losses, key=losses.get)
    assert f"optim.lr={points[best]}" in said.splitlines()[-1]
    assert points[1] == "0.005"
    assert main([*told[:-3], "optim.lr=1e-5..1e-2", "--out", str(tmp_path)]) == 2
    assert "another search" in capsys.readouterr().err


def test_mistakes_are_told_before_any_work(tmp_path, capsys):
    for wrong, says in (
        (["tune", "tiny", "optim.rl=1e-3..1e-2"], "did you mean optim.lr"),
        (["tune", "tiny", "level.quick.rate=1..2"], "level.NAME.rate"),
        (["tune", "tiny", "--trials", "0"], "--trials: must be at least 1"),
        (["tune", "tiny", "--minutes", "nan"], "--minutes: must be above 0"),
        (["tune", "none"], "recipe must be one of tiny, "),
        (
            ["tune", "tiny", "model.preset=Size"],
            "model.preset must be one of tiny, small, base, ",
        ),
        (["tune", "tiny", "--trials", "1", "data.valid=builtin:2|nofile|builtin:3"], "nofile: no"),
    ):
        assert main([*wrong, "--out", str(tmp_path / "no")]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("point", "result"),
    [
        ("3", '{"loss": 1.5, "code": 0}'),
        ('{"optim.lr": 3}', '{"loss": 1.5, "code": 0}'),
        ('{"run.steps": "3"}', '{"loss": 1.5, "code": 0}'),
        ('{"optim.lr": "0.005"}', "3"),
        ('{"optim.lr": "0.005"}', '{"code": 0}'),
        ('{"optim.lr": "0.005"}', '{"loss": "low", "code": 0}'),
        ('{"optim.lr": "0.005"}', '{"loss": 1.5, "code"'),
    ],
)
def test_a_trial_of_another_form_is_named(point, result, tmp_path, capsys):
    (tmp_path / "trial-000").mkdir()
    (tmp_path / "trial-000" / "point.json").write_text(point)
    (tmp_path / "trial-000" / "result.json").write_text(result)
    told = ["tune", "tiny", *SMALL, "optim.lr=1e-6..1e-2", "--out", str(tmp_path)]
    assert main([*told, "--trials", "1"]) == 2
    assert str(tmp_path / "trial-000") in capsys.readouterr().err


def test_a_line_that_was_cut_hides_no_other(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 2, "validation_loss": 1.5}\n{"step": 3, "valid\n{"step": 4}\n')
    assert _best(log) == 1.5
