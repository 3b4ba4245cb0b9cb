"""The chunked scan equals the loop over tokens: outputs, end state and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.scan import MatrixAndVelocity, scan, scan_naive
from nestling.scan.delta import kernel
from tests.scan.scan_cases import DOUBLE, Case, case, worst

BOTH = pytest.mark.parametrize("erase", [True, False])
CHUNKED = pytest.mark.parametrize("backend", ["chunk", "chunk_autograd"])

cases = st.builds(
    case,
    st.lists(st.integers(1, 3), max_size=2).map(tuple),
    st.integers(0, 21),
    st.integers(1, 7),
    st.integers(1, 7),
    seed=st.integers(0, 10_000),
    queries=st.booleans(),
    momentum=st.booleans(),
    zeros=st.booleans(),
    erase=st.booleans(),
    read=st.sampled_from(["after", "before"]),
    chunk=st.sampled_from([1, 2, 3, 4, 7, 8, 16, 64]),
    recompute=st.booleans(),
)


@settings(max_examples=220)
@given(cases)
def test_chunked_equals_naive_on_random_shapes(drawn: Case) -> None:
    expected = drawn.gradients(backend="naive")
    assert worst(drawn.gradients(backend="chunk"), expected) < 1e-10
    if "momentum" not in drawn.tensors:
        assert worst(drawn.gradients(backend="chunk_autograd"), expected) < 1e-10
    single = drawn.to(torch.float32)
    expected = single.to(DOUBLE).gradients(backend="naive")
    assert worst(single.gradients(backend="chunk"), expected, together=True) < 1e-5


@CHUNKED
@BOTH
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("momentum", [False, True])
def test_gradcheck(erase: bool, read: str, backend: str, momentum: bool) -> None:
    drawn = case((2,), 7, 3, 2, erase=erase, read=read, chunk=4, backend=backend, momentum=momentum)

    def outputs(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reads, state = Case(dict(zip(drawn.tensors, leaves, strict=True)), drawn.options).run(
            check=False
        )
        return (reads, *(state if isinstance(state, MatrixAndVelocity) else (state,)))

    assert torch.autograd.gradcheck(outputs, tuple(drawn.tensors.values()), fast_mode=True)


@CHUNKED
@pytest.mark.parametrize("shape", [(150, 70, 5), (130, 4, 66), (64, 64, 64), (257, 16, 16)])
def test_wide_memories_and_many_chunks(shape: tuple[int, int, int], backend: str) -> None:
    drawn = case((3,), *shape, chunk=64)
    assert worst(drawn.gradients(backend=backend), drawn.gradients(backend="naive")) < 1e-10


@pytest.mark.parametrize(
    ("width", "outer", "tokens"), [(8, 8, 16), (64, 32, 16), (64, 64, 32), (129, 200, 64)]
)
def test_a_cpu_solves_fewer_tokens_together(
    width: int, outer: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than asked for, by the width; never more, and elsewhere as many as asked for."""
    x, u = torch.empty(1, 300, width), torch.empty(1, 300, outer)
    assert kernel.quickest(x, u) == tokens
    assert kernel.quickest(x.to("meta"), u.to("meta")) == 300
    drawn = case((2,), 70, outer, width, chunk=70)
    assert worst(drawn.gradients(backend="chunk"), drawn.gradients(backend="naive")) < 1e-10
    asked, run = [], kernel._scan

    def scanned(*arguments):
        asked.append(arguments[-2])
        return run(*arguments)

    monkeypatch.setattr(kernel, "_scan", scanned)
    for chunk in (5, 70):
        drawn.options["chunk"] = chunk
        drawn.run(backend="chunk")
    assert asked == [5, tokens]


def test_many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences longer than a segment: several chunks in one, one chunk in one, a ragged end."""
    drawn = case((2, 2), 45, 6, 4, chunk=4, zeros=True)
    expected = drawn.gradients(backend="naive")
    for size in (1, 250, 500):
        monkeypatch.setattr("nestling.scan.delta.kernel.SEGMENT", size)
        for recompute in (False, True):
            found = drawn.gradients(backend="chunk", recompute=recompute)
            assert worst(found, expected) < 1e-10


@BOTH
@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 6, 8, 13])
def test_splitting_anywhere_changes_nothing(erase: bool, momentum: bool, cut: int) -> None:
    drawn = case((2,), 13, erase=erase, momentum=momentum, chunk=4)
    reads, end = drawn.run()
    tensors = {k: v.detach() for k, v in drawn.tensors.items()}
    velocity = tensors.pop("velocity", None)
    state = tensors.pop("state")
    passed = state if velocity is None else MatrixAndVelocity(state, velocity)
    parts = []
    for piece in (slice(None, cut), slice(cut, None)):
        dims = dict.fromkeys(tensors, 1)  # tokens follow the one leading dimension
        given = {k: v.narrow(dims[k], 0, 13)[:, piece] for k, v in tensors.items()}
        read, passed = scan(passed, **given, **drawn.options)
        parts.append(read)
    torch.testing.assert_close(torch.cat(parts, 1), reads, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(passed, end, rtol=1e-12, atol=1e-12)


@CHUNKED
@BOTH
def test_rate_zero_and_retain_one_is_the_identity(erase: bool, backend: str) -> None:
    given = {k: v.detach() for k, v in case((2,), 9).tensors.items()}
    given |= {"rate": torch.zeros(2, 9, dtype=DOUBLE), "retain": torch.ones(2, 9, dtype=DOUBLE)}
    reads, end = scan(**given, erase=erase, chunk=4, backend=backend)
    assert torch.equal(end, given["state"])
    torch.testing.assert_close(reads, given["queries"] @ given["state"].mT)


@CHUNKED
def test_leading_dimensions_commute_with_stacking(backend: str) -> None:
    drawn = case((2, 3), 10, chunk=4)
    reads, end = drawn.run(backend=backend)
    for i in range(2):
        for j in range(3):
            alone = {k: v[i, j] for k, v in drawn.tensors.items()}
            read, last = scan(**alone, chunk=4, backend=backend)
            torch.testing.assert_close(read, reads[i, j], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(last, end[i, j], rtol=1e-12, atol=1e-12)


@BOTH
@pytest.mark.parametrize("backend", ["naive", "chunk"])
def test_momentum_zero_is_the_plain_rule(erase: bool, backend: str) -> None:
    drawn = case((2,), 11, momentum=True, erase=erase, chunk=4, backend=backend)
    given = {k: v.detach() for k, v in drawn.tensors.items()}
    state = MatrixAndVelocity(given.pop("state"), torch.zeros_like(given.pop("velocity")))
    given["momentum"] = torch.zeros_like(given["momentum"])
    reads, end = scan(state, **given, **drawn.options)
    del given["momentum"]
    plain_reads, plain_end = scan(state.weight, **given, **drawn.options)
    torch.testing.assert_close(reads, plain_reads)
    torch.testing.assert_close(end.weight, plain_end)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_keep_the_memory_in_float32(dtype: torch.dtype) -> None:
    drawn = case((2,), 20, 8, 8, chunk=8).to(dtype)
    reads, end = drawn.run()
    assert reads is not None
    assert (reads.dtype, end.dtype) == (dtype, torch.float32)
    expected = drawn.to(DOUBLE).gradients(backend="naive")
    found = drawn.gradients(backend="chunk")
    assert all(found["d" + name].dtype == dtype for name in drawn.tensors)
    assert worst(found, expected) < 0.01
    torch.testing.assert_close(end.detach().double(), expected["end"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1])
def test_empty_and_single_token(tokens: int) -> None:
    drawn = case((2,), tokens)
    reads, end = drawn.run()
    assert reads is not None
    assert reads.shape == (2, tokens, 3)
    assert end.shape == (2, 3, 5)
    for backend in ("chunk", "chunk_autograd"):
        assert worst(drawn.gradients(backend=backend), drawn.gradients(backend="naive")) < 1e-12
    empty = {k: v.detach()[:0] for k, v in drawn.tensors.items()}
    assert scan(**empty, backend="chunk")[0].shape == (0, tokens, 3)


def test_only_one_output_used() -> None:
    """A loss of the reads alone, or of the end state alone."""
    drawn = case((2,), 9, chunk=4)
    leaves = list(drawn.tensors.values())
    for pick in (0, 1):
        found, expected = (
            torch.autograd.grad(drawn.run(backend=b)[pick].sum(), leaves, allow_unused=True)
            for b in ("chunk", "naive")
        )
        for left, right in zip(found, expected, strict=True):
            filled = torch.zeros_like(left) if right is None else right
            torch.testing.assert_close(left, filled, rtol=1e-12, atol=1e-12)


def test_gradients_only_where_asked() -> None:
    """A constant retain (DeltaNet) takes the shorter path and changes nothing else."""
    drawn = case((2,), 9, chunk=4)
    full = drawn.gradients(backend="chunk")
    leaves = {k: v for k, v in drawn.tensors.items() if k != "retain"}
    reads, end = scan(**leaves, retain=drawn.tensors["retain"].detach(), chunk=4)
    made = torch.Generator().manual_seed(7)
    loss = sum(
        (value * torch.randn(value.shape, generator=made, dtype=DOUBLE)).sum()
        for value in (end, reads)
    )
    for name, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        torch.testing.assert_close(grad, full["d" + name])


def test_second_derivatives() -> None:
    """Chunked autograd and naive agree on them; the hand-written kernel refuses clearly."""
    drawn = case((1,), 5, 2, 2, chunk=2)
    leaves = list(drawn.tensors.values())

    def second(backend: str) -> tuple[torch.Tensor, ...]:
        reads, end = drawn.run(backend=backend)
        loss = reads.square().sum() + end.square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    torch.testing.assert_close(second("chunk_autograd"), second("naive"), rtol=1e-9, atol=1e-9)
    with pytest.raises(NotImplementedError, match="chunk_autograd"):
        second("chunk")


def test_naive_is_the_argument_free_reference() -> None:
    """scan_naive has scan's signature, and one hand-made step of Eq. 65."""
    state, x, u = torch.eye(2), torch.tensor([[0.6, 0.8]]), torch.tensor([[1.0, -1.0]])
    rate, retain = torch.tensor([0.5]), torch.tensor([0.9])
    reads, end = scan_naive(state, x, u, rate, retain, x, chunk=1)
    expected = state @ (0.9 * torch.eye(2) - 0.5 * x.mT @ x) + 0.5 * u.mT @ x
    torch.testing.assert_close(end, expected)
    torch.testing.assert_close(reads, x @ expected.mT)
