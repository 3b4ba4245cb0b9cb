"""The engine: order, clock, gradient flows, streams, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestling.paper.nested import (
    NestedSystem,
    Problem,
    backpropagation,
    descend,
    direct,
    generation,
    minimise,
    reset,
)
from nestling.rules import Gates, momentum


def follower(name, *, chunk=1, reads=(), rate=0.1, **options):
    """A problem that moves towards the items' mean."""
    return Problem(
        name=name,
        parameters={"w": torch.zeros(2, dtype=torch.float64)},
        context=lambda view: view.item,
        objective=lambda own, item: 0.5 * (own["w"] - item).square().sum(),
        gates=Gates(rate=rate),
        chunk=chunk,
        reads=reads,
        **options,
    )


def names(system):
    return [[p.name for p in level] for level in system.levels]


def items(n=24):
    return list(torch.randn(n, 2, dtype=torch.float64))


def test_levels_follow_frequency_then_need_and_equal_independent_problems_share_one():
    system = NestedSystem(
        [
            follower("weights", reads=(direct("m"), direct("v"))),
            follower("m", reads=(direct("weights", previous=True),)),
            follower("v"),
            follower("slow", chunk=8),
            follower("frozen", chunk=math.inf),
        ]
    )
    assert names(system) == [["frozen"], ["slow"], ["weights"], ["m", "v"]]


@given(chunks=st.lists(st.integers(1, 9), min_size=1, max_size=5), length=st.integers(0, 30))
def test_updates_are_counted_as_often_as_the_chunk_says(chunks, length):
    system = NestedSystem(follower(f"p{i}", chunk=c) for i, c in enumerate(chunks))
    _, ticks = system.run(items(length))
    updates = [update for tick in ticks for update in tick.updates]
    for i, chunk in enumerate(chunks):
        assert [u.position for u in updates if u.level == f"p{i}"] == [
            p for p in range(1, length + 1) if p % chunk == 0
        ]


@given(cut=st.integers(0, 24))
def test_any_split_of_a_stream_gives_the_same_state(cut):
    data = items()
    system = NestedSystem([follower("fast", chunk=3, solver=descend(momentum())), follower("one")])
    whole, _ = system.run(data)
    part, _ = system.run(data[cut:], system.run(data[:cut])[0])
    assert part.position == whole.position
    for name in system.problems:
        assert torch.equal(part.parameters[name]["w"], whole.parameters[name]["w"])


def test_a_chunk_is_one_step_on_the_sum_of_its_losses():
    data = items(4)
    state, ticks = NestedSystem([follower("w", chunk=4)]).run(data)
    torch.testing.assert_close(state.parameters["w"]["w"].detach(), 0.1 * torch.stack(data).sum(0))
    (update,) = [u for tick in ticks for u in tick.updates]
    assert update.grad_norm == pytest.approx(float(torch.stack(data).sum(0).norm()))
    assert update.step == pytest.approx(0.1 * update.grad_norm)
    assert update.distance == update.step  # it was the first
    mean = 0.5 * torch.stack(data).square().sum(-1).mean()
    assert update.loss == pytest.approx(float(mean))


def test_problems_of_one_level_see_each_other_before_the_level_changes():
    def copies(name, other):
        return Problem(
            name=name,
            parameters={"w": torch.full((1,), float(name == "a"))},
            context=lambda view: view[other]["w"],
            objective=lambda own, seen: 0.5 * (own["w"] - seen).square().sum(),
            reads=(direct(other, previous=True),),
        )

    state, _ = NestedSystem([copies("a", "b"), copies("b", "a")]).run([None])
    assert [float(state.parameters[n]["w"].detach()) for n in "ab"] == [0.0, 1.0]  # swapped


def test_direct_reads_carry_no_gradient_and_backpropagation_does():
    def system(transfer):
        inside = Problem(
            name="inside",
            parameters={"w": torch.zeros(1)},
            context=lambda view: view["outside"]["w"] * view.item,
            objective=lambda own, target: 0.5 * (own["w"] - target).square().sum(),
            gates=Gates(rate=0.5),
            reads=(transfer("outside"),),
            start=reset(every=2),
        )
        outside = Problem(
            name="outside",
            parameters={"w": torch.ones(1)},
            context=lambda view: (view["inside"]["w"], view.item),
            objective=lambda own, seen: 0.5 * (seen[0] - 3 * seen[1]).square().sum(),
            chunk=2,
            reads=(transfer("inside"),),
            gates=Gates(rate=0.1),
        )
        return NestedSystem([inside, outside])

    data = [torch.ones(1)] * 2
    constant, _ = system(direct).run(data)
    assert float(constant.parameters["outside"]["w"].detach()) == 1.0
    learned, _ = system(backpropagation).run(data)
    # inside: 0.5, 0.75; d/dw: 0.5, 0.75; gradient: -2.5 * 0.5 - 2.25 * 0.75
    expected = 1.0 + 0.1 * (2.5 * 0.5 + 2.25 * 0.75)
    assert float(learned.parameters["outside"]["w"].detach()) == pytest.approx(expected)
    assert learned.parameters["inside"]["w"].is_leaf  # the flow ended with the update


def test_a_memory_without_a_learning_reader_keeps_no_graph():
    inside = follower("inside")
    reader = Problem(
        name="reader",
        parameters={},
        context=lambda view: view["inside"]["w"] + 1,
        chunk=math.inf,
        reads=(backpropagation("inside"),),
    )
    state, ticks = NestedSystem([inside, reader]).run(items(5))
    assert state.parameters["inside"]["w"].is_leaf
    assert state.waiting["reader"] == ()
    assert len([t.contexts["reader"] for t in ticks]) == 5


BAD = {
    "equal frequency need each other": lambda: NestedSystem(
        [follower("a", reads=(direct("b"),)), follower("b", reads=(direct("a"),))]
    ),
    "reads 'ghost', which is not in the system": lambda: NestedSystem(
        [follower("a", reads=(direct("ghost"),))]
    ),
    "two problems are called 'a'": lambda: NestedSystem([follower("a"), follower("a")]),
    "reads a source twice": lambda: follower("a", reads=(direct("b"), direct("b"))),
    "must be a multiple of the faster": lambda: NestedSystem(
        [follower("a", chunk=4), follower("b", chunk=6, reads=(backpropagation("a"),))]
    ),
    "whole number of chunks of 4": lambda: follower("a", chunk=4, start=reset(every=6)),
    "chunk must be a whole number": lambda: follower("a", chunk=0),
    "order must be 1 or 2": lambda: backpropagation("a", order=3),
    "every must be a whole number": lambda: reset(every=0),
    "steps must be at least 1": lambda: descend(steps=0),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_declarations_are_refused(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_undeclared_reads_are_refused_while_running():
    spy = Problem(
        name="spy", parameters={}, context=lambda view: view["a"], reads=(), chunk=math.inf
    )
    with pytest.raises(ValueError, match="looked at 'a' without declaring it"):
        NestedSystem([follower("a"), spy]).run(items(1))


def test_a_search_cannot_be_differentiated_and_says_so():
    fast = follower("fast", solver=minimise())
    slow = follower("slow", chunk=2, reads=(backpropagation("fast"),))
    with pytest.raises(ValueError, match="minimise is not differentiable"):
        NestedSystem([fast, slow]).run(items(1))


def test_a_problem_without_objective_says_so():
    with pytest.raises(ValueError, match="'x' needs an objective"):
        NestedSystem(
            [Problem(name="x", parameters={"w": torch.ones(1)}, context=lambda view: 1)]
        ).run([0])


def test_generated_weights_change_as_often_as_they_are_generated():
    made = Problem(
        name="made",
        parameters={"w": torch.zeros(1)},
        context=lambda view: view.own["w"].detach(),
        chunk=math.inf,
        start=generation("maker", lambda slow, item: {"w": slow["w"] * item}),
    )
    maker = Problem(
        name="maker", parameters={"w": torch.ones(1)}, context=lambda v: None, chunk=math.inf
    )
    system = NestedSystem([maker, made])
    assert names(system) == [["maker"], ["made"]]
    _, ticks = system.run([1.0, 2.0, 5.0])
    assert [float(t.contexts["made"]) for t in ticks] == [1.0, 2.0, 5.0]
