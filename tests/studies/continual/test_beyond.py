"""Streams of pictures and of reading: what learners are given and asked."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from studies.continual import beyond
from studies.continual.study import accuracies


def test_a_learner_that_is_told_the_task_chooses_among_its_classes():
    scores = torch.tensor([[0.1, 0.0, 0.9, 0.2], [0.0, 0.5, 0.9, 0.2]])
    y, tasks = torch.tensor([0, 1]), ((0, 1), (2, 3))
    assert accuracies(scores, y, tasks, (0, 1, 2, 3))[0] == 0.0  # class 2 scores highest
    assert accuracies(scores, y, tasks, (0, 1, 2, 3), told=True)[0] == 1.0
    assert accuracies(scores, y, tasks, (0, 1), told=True)[1] == 0.0  # not yet learned


def test_questions_come_first_and_the_newest_fact_next(shared_data):
    text, answer = beyond._questions(shared_data, 1, "train", 3)[0]
    question, facts = text.split("?", 1)
    assert question.startswith("Where is ")
    name = question.removeprefix("Where is ").strip()
    told = [fact for fact in facts.split(".") if name in fact]
    assert told[0].split()[-1] == answer  # the newest fact about the person is read first


def test_places_of_a_picture_are_what_the_blocks_give():
    torch.manual_seed(0)
    pictures = torch.randn(6, 3, 32, 32)
    base = beyond.ViT(width=64, heads=4, depth=4, size=32, patch=4, channels=3).eval()
    x = beyond.encode_pictures(base, pictures)
    assert x.shape == (6, 12, 64)
    last: list[torch.Tensor] = []  # the last block's output is the input of the final norm
    hook = base.trunk.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    base(pictures)
    hook.remove()
    pools = last[0].mean(1), last[0][:, 0], last[0].amax(1)
    torch.testing.assert_close(x[:, 9:], torch.stack(pools, 1).detach().half())
    assert (x[:, 2] >= x[:, 0]).all()  # the maximum of the first block is above its mean
    other = beyond.encode_pictures(base, pictures.flip(0)).flip(0)
    torch.testing.assert_close(x, other)
    assert not base.trunk.blocks[0]._forward_hooks


@pytest.mark.parametrize("task", beyond.STREAMS)
def test_splits_are_apart_and_tasks_cover_the_classes(task, shared_data, tmp_path):
    stream = beyond.stream_of(task, shared_data, tmp_path, beyond.QUICK, quick=True)
    tasks = stream.tasks(3)
    assert sorted(c for task in tasks for c in task) == list(range(stream.classes))
    assert stream.tasks(3) == tasks
    assert any(stream.tasks(seed) != tasks for seed in (4, 5))
    assert set(stream.test[1].tolist()) <= set(range(stream.classes))
    rows = {tuple(x.flatten().tolist()) for x in stream.train[0]}
    if task == "pictures":  # no picture is both learned and held out
        assert not rows & {tuple(x.flatten().tolist()) for x in stream.valid[0]}


def test_the_picture_base_is_kept_and_learns_to_tell_turns(tmp_path):
    """A picture that is bright on top can be told from a turned one."""
    pictures = torch.zeros(64, 3, 32, 32)
    pictures[:, :, :8] = 2.0
    pictures += 0.1 * torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0))
    protocol = dataclasses.replace(beyond.QUICK, steps=60, rate=3e-3)
    base = beyond.turned_base(pictures, tmp_path, protocol)
    turned = torch.cat([pictures.rot90(n, (2, 3)) for n in range(4)])
    said = base(turned)[:, :4].argmax(-1)
    assert (said == torch.arange(4).repeat_interleave(64)).double().mean() > 0.9
    again = beyond.turned_base(pictures, tmp_path, protocol)
    for one, other in zip(base.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
