"""The fast self-modifying scan equals the token-by-token reference, in values and gradients."""

from __future__ import annotations

import pytest
import torch

from nestling.memories import SelfModifying, SelfModifyingConfig, configure
from nestling.norm import unit
from nestling.objectives import l2
from nestling.scan.self_modifying import scan_self_modifying
from nestling.scan.self_modifying.api import ALL as EVERYTHING
from nestling.scan.self_modifying.api import STARTS, scan_operator
from nestling.scan.self_modifying.naive import self_modifying_naive
from nestling.scan.self_modifying.rule import Inputs, SelfRule, Weights

B, D, F = 3, 4, 5


def case(
    rule, tokens, *, deep=False, momentum=False, seed=0, valid=False, residual=False, adding=False
):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=g, dtype=torch.float64)

    n = len(rule.names)
    first = draw(B, n, F if deep else D, D, scale=0.7)
    second = draw(B, n, D, F, scale=0.7) if deep else None
    moved = None
    if momentum:
        moved = (0.1 * draw(*first.shape),) + ((0.1 * draw(*second.shape),) if deep else ())
    given = {
        name: None if name in rule.adaptive and not residual else unit(draw(B, tokens, D))
        for name in ("k", "v", "q")
    }
    mask = None
    if valid:
        mask = (
            torch.arange(tokens) < torch.tensor([tokens, max(tokens - 3, 0), tokens // 2])[:, None]
        )
    initial = None
    if residual:
        initial = Weights(draw(*first.shape), None if second is None else draw(*second.shape))
    inputs = Inputs(
        draw(B, tokens, D),
        draw(B, 2, D, scale=0.5),
        torch.tensor([[0.0, 2.0]], dtype=torch.float64).expand(B, 2).clone(),
        **given,
        gates=draw(B, tokens, 2) if residual else None,
        erase=torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64) if adding else None,
        theta=torch.sigmoid(draw(B, tokens)) if momentum else None,
        valid=mask,
        initial=initial,
    )
    start = Weights(first + 0.1 * draw(*first.shape), None if second is None else second * 0.9)
    return inputs, Weights(first, second, moved), start


def leaves(*trees):
    out = []
    for tree in trees:
        for part in tree:
            if isinstance(part, tuple):
                out += leaves(part)
            elif part is not None and part.is_floating_point():
                out.append(part)
    return out


def compare(rule, tokens, position, function=scan_self_modifying, **options):
    """Outputs, both end states, and gradients of everything that goes in."""
    grads, results = [], []
    mine = position if isinstance(position, int) else torch.tensor(position)
    naive = torch.full((B,), position) if isinstance(position, int) else torch.tensor(position)
    for scan, where in ((self_modifying_naive, naive), (function, mine)):
        inputs, weights, start = case(rule, tokens, **options)
        params = leaves(inputs._replace(erase=None), weights, start)  # what it erases is constant
        for p in params:
            p.requires_grad_(True)
        y, w, s = scan(rule, inputs, weights, start, where)
        if inputs.valid is not None:
            y = y * inputs.valid.unsqueeze(-1)
        out = [y, *leaves(w, s)]
        g = torch.Generator().manual_seed(7)
        loss = sum((o * torch.randn(o.shape, generator=g, dtype=o.dtype)).sum() for o in out)
        grads.append(torch.autograd.grad(loss, params, allow_unused=True))
        results.append(out)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    for a, b in zip(*grads, strict=True):
        a, b = torch.broadcast_tensors(*(torch.zeros(()) if g is None else g for g in (a, b)))
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, check_dtype=False)


ALL = ("k", "v", "eta", "alpha")
RULES = {
    "stage 1": SelfRule(adaptive=(), own_values=False, objective=l2, chunk=4, chunk_others=4),
    "stage 2": SelfRule(own_values=False, chunk=4, chunk_others=4),
    "stage 3": SelfRule(chunk=4, chunk_others=4),
    "l2": SelfRule(objective=l2, chunk=4, chunk_others=4, clip=0.5),
    "adaptive q": SelfRule(adaptive=(*ALL, "q"), chunk=4, chunk_others=4),
    "some static": SelfRule(adaptive=("v", "alpha"), objective=l2, chunk=4, chunk_others=4),
    "stage 1 by gradient descent": SelfRule(
        adaptive=(), own_values=False, objective=l2, erase=False, chunk=4, chunk_others=4
    ),
    "no erase": SelfRule(erase=False, objective=l2, chunk=4, chunk_others=4),
    "negative": SelfRule(rate_max=2.0, chunk=4, chunk_others=4),
    "tied": SelfRule(tied=True, retain_max=0.9, chunk=4, chunk_others=4),
    "tied l2": SelfRule(tied=True, rate_max=2.0, objective=l2, chunk=3, chunk_others=6),
    "steered": SelfRule(adaptive=(), tied=True, chunk=4, chunk_others=4),
    "steered, given values": SelfRule(adaptive=(), own_values=False, chunk=4, chunk_others=4),
    "shut": SelfRule(tied=True, shut=0.4, retain_max=0.9, chunk=4, chunk_others=4),
    "shut, not tied": SelfRule(shut=0.4, chunk=4, chunk_others=4),
    "slow others": SelfRule(chunk=2, chunk_others=6, objective=l2),
    "slow memory": SelfRule(chunk=6, chunk_others=3),
    "read at start": SelfRule(chunk=4, chunk_others=4, read_start=True),
    "token by token": SelfRule(chunk=1, chunk_others=1, objective=l2),
}


STATIC = ("stage 1", "stage 1 by gradient descent")


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_matrix_memories(name, residual):
    for tokens, position in ((11, 0), (5, 3), (1, 6)):
        compare(RULES[name], tokens, position, residual=residual)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.parametrize("name", ["steered", "steered, given values"])
def test_static_projections_take_the_matrix_scan(name, adding, recompute, monkeypatch):
    """Own values or given ones, heads that add, any cut of the chunks into segments."""

    def never(*arguments):
        raise AssertionError("the general kernel ran")

    def scan(rule, inputs, weights, start, position):
        return scan_self_modifying(rule, inputs, weights, start, position, recompute)

    monkeypatch.setattr("nestling.scan.self_modifying.api.scan_operator", never)
    for segment in (1, 100, 1 << 18):
        monkeypatch.setattr("nestling.scan.delta.kernel.SEGMENT", segment)
        for tokens, position in ((12, 0), (15, 0), (2, 1), (5, 3), (14, 6)):
            compare(RULES[name], tokens, position, scan, residual=True, adding=adding)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_the_operator_of_compiled_models(name, recompute):
    """One node of a graph, with whole segments, ragged ones, and from the middle of a chunk."""

    def operator(rule, inputs, weights, start, position):
        y, w, s = scan_operator(rule, inputs, weights.first, start.first, position, recompute)
        return y, Weights(w), Weights(s)

    for tokens, position in ((12, 0), (11, 0), (5, 3), (6, 6)):
        compare(RULES[name], tokens, position, operator, residual=name != "stage 1")
        compare(RULES[name], tokens, position, operator, adding=True)


def test_a_second_derivative_says_what_it_needs():
    inputs, weights, start = case(RULES["stage 3"], 8)
    x = inputs.x.requires_grad_()
    y, _, _ = scan_self_modifying(RULES["stage 3"], inputs, weights, start, 0)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        grad.square().sum().backward()


def test_the_operator_keeps_to_the_rules_of_torch():
    inputs, weights, start = case(RULES["stage 3"], 8, residual=True)
    parts = (weights.first, start.first, inputs.initial.first, *inputs[:7])
    for part in parts:
        part.requires_grad_()
    for keep in (STARTS, EVERYTHING):
        arguments = (*RULES["stage 3"].plain, 0, 0, keep, *parts, None, None)
        torch.library.opcheck(torch.ops.nestling.self_modifying.default, arguments)


@pytest.mark.parametrize(
    "name", [*STATIC, "stage 3", "l2", "no erase", "tied", "shut", "slow others"]
)
def test_two_layer_memories(name):
    for tokens, position in ((9, 0), (5, 3)):
        compare(RULES[name], tokens, position, deep=True)
        compare(RULES[name], tokens, position, deep=True, residual=True)


@pytest.mark.parametrize("name", [*STATIC, "stage 3", "l2", "no erase", "tied", "shut"])
@pytest.mark.parametrize("deep", [False, True])
def test_momentum(name, deep):
    compare(RULES[name], 9, 3, momentum=True, deep=deep)
    compare(RULES[name], 9, 3, momentum=True, deep=deep, residual=True)


@pytest.mark.parametrize("options", [{}, {"deep": True}, {"momentum": True}, {"residual": True}])
@pytest.mark.parametrize("name", ["stage 1", "stage 3", "l2", "slow others", "no erase"])
def test_heads_that_add_beside_heads_that_erase(name, options):
    for tokens, position in ((9, 0), (5, 3), (7, [0, 3, 11])):
        compare(RULES[name], tokens, position, adding=True, **options)


@pytest.mark.parametrize("options", [{}, {"deep": True}, {"momentum": True}, {"residual": True}])
def test_padding_and_different_positions(options):
    for name in ("l2", "tied", "slow others", "slow memory"):
        compare(RULES[name], 9, 2, valid=True, **options)
        compare(RULES[name], 9, [0, 3, 11], valid=True, **options)
        compare(RULES[name], 10, [5, 3, 0], **options)
        compare(RULES[name], 1, [5, 3, 0], **options)


@torch.no_grad()
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("position", [0, 3, 5, [3, 0, 7]])
def test_one_token_without_gradients(name, position):
    """Generation takes a path of its own."""
    for valid, residual in ((False, False), (True, False), (False, True), (True, True)):
        options = {"valid": valid, "residual": residual, "adding": residual}
        inputs, weights, start = case(RULES[name], 1, **options)
        where = torch.full((B,), position) if isinstance(position, int) else torch.tensor(position)
        want = self_modifying_naive(RULES[name], inputs, weights, start, where)
        mine = where if isinstance(position, list) or valid else position
        got = scan_self_modifying(RULES[name], inputs, weights, start, mine)
        for a, b in zip(leaves(want), leaves(got), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_what_is_kept_for_the_backward_pass_can_be_taken_away():
    """Tapes are saved tensors (checkpointing can drop them); `recompute` keeps far fewer."""
    torch.manual_seed(0)
    x, kept, grads = torch.randn(2, 64, 8), {}, {}
    for recompute in (False, True):
        torch.manual_seed(1)
        sizes = {"width": 8, "heads": 2, "chunk": 8, "chunk_others": 8}
        memory = SelfModifying(configure(SelfModifyingConfig, **sizes, recompute=recompute))
        saved = []

        def pack(t, saved=saved):
            saved.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = memory(x)[0]
        kept[recompute] = sum(saved)
        grads[recompute] = torch.autograd.grad(y.square().sum(), list(memory.parameters()))
    assert kept[True] < 0.7 * kept[False]
    for a, b in zip(*grads.values(), strict=True):
        torch.testing.assert_close(a, b)
