"""A rule declares what it can do and what it needs; here every rule is held to its word."""

from __future__ import annotations

import pytest
import torch

from nestling import rules
from nestling.objectives import l2
from nestling.paper.exhibits.adam import adagrad_memory, adam_literal
from nestling.paper.exhibits.gd import descent
from nestling.paper.exhibits.momentum import generalised_momentum
from nestling.paper.exhibits.precondition import precondition
from nestling.paper.exhibits.sequence import omega
from nestling.rules import Gates, Rule, Write, chain, identity
from nestling.tree import tree_leaves

NEED_ARGUMENTS = {
    "stateless": lambda: rules.stateless(torch.sign),
    "nonlinear": lambda: rules.nonlinear(rules.momentum(), torch.tanh),
}


def every_rule():
    for name in rules.__all__:
        thing = getattr(rules, name)
        if isinstance(thing, Rule):
            yield name, thing
        elif name in NEED_ARGUMENTS:
            yield name, NEED_ARGUMENTS[name]()
        elif getattr(thing, "__annotations__", {}).get("return") == "Rule" and name != "chain":
            try:
                yield name, thing()
            except TypeError:
                continue
    yield "descent", descent(l2)
    yield "generalised_momentum", generalised_momentum(l2)
    yield "omega", omega(l2, window=2)
    yield "adagrad_memory", adagrad_memory()
    yield "adam_literal", adam_literal()
    yield "precondition", precondition()
    yield "chain of nothing but descent", chain(identity, identity)
    yield "chain with pairs", chain(rules.dgd(), rules.momentum())


RULES = dict(every_rule())


def test_many_rules_are_looked_at():
    assert len(RULES) > 25
    assert {"dgd", "adam", "muon", "identity", "omega", "retaining"} <= set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_needs_pairs_and_plain_are_as_declared(name):
    rule, weight = RULES[name], torch.eye(2)
    grad = torch.tensor([[0.3, -2.0], [5.0, 0.01]])
    state = rule.init(weight)
    try:
        write, _ = rule.step(Write(grad), state, weight, Gates(rate=0.5, step=3))
    except ValueError:
        assert rule.needs_pairs
        assert not rule.plain
        x, u = torch.randn(3, 2), torch.randn(3, 2)
        rule.step(Write(-u.mT @ x, x, u), state, weight, Gates(rate=0.5))
        return
    assert not rule.needs_pairs
    assert rule.plain == (torch.equal(write.grad, grad) and not list(tree_leaves(state)))
