"""The Triton matrix scan in the interpreter: outputs, states and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nestling.memories import (
    DeltaNetConfig,
    LinearConfig,
    LinearMemory,
    Steered,
    SteeredConfig,
    Titans,
    TitansConfig,
)
from nestling.scan import BACKENDS, scan
from nestling.scan.delta.api import choose
from nestling.tree import tree_leaves
from tests.kernels.cases import ALL, SHAPES, close
from tests.kernels.interpreter import hurry
from tests.scan.scan_cases import case

hurry()


def compare(**options: Any) -> None:
    given = case(**options).to(torch.float32)
    found = given.gradients(backend="triton")
    for name, value in given.to(torch.float64).gradients(backend="naive").items():
        close(found[name], value, name)


CASES: dict[str, dict[str, Any]] = {
    "delta rule, ragged": {"tokens": 37, "chunk": 16},
    "reads before writes": {"tokens": 21, "chunk": 16, "read": "before"},
    "retain of 0, rate of 0": {"tokens": 37, "chunk": 32, "zeros": True},
    "retain of 0, reads before writes": {"tokens": 20, "zeros": True, "read": "before"},
    "Hebbian": {"tokens": 21, "chunk": 16, "erase": False, "zeros": True},
    "Hebbian, reads before writes": {"tokens": 18, "chunk": 16, "erase": False, "read": "before"},
    "no queries": {"tokens": 20, "chunk": 16, "queries": False},
    "one chunk, odd widths": {"lead": (2, 1), "tokens": 5, "inner": 5, "outer": 19},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_naive_form(name: str) -> None:
    compare(**({"lead": (1,), "inner": 16, "outer": 16} | CASES[name]))


@pytest.mark.parametrize(("d", "chunk"), SHAPES if ALL else [(32, 64), (128, 32)])
def test_widths_and_chunks(d: int, chunk: int) -> None:
    compare(lead=(1,), tokens=chunk + 5, inner=d, outer=d, chunk=chunk, zeros=True)


def test_equal_keys_at_rate_two() -> None:
    """The hardest system: one unit key throughout, written at the largest rate."""
    given = case((1,), 40, 16, 16).to(torch.float32)
    key = given.tensors["x"].detach()[:, :1]
    tensors = given.tensors | {"x": (key / key.norm()).expand(1, 40, 16).clone()}
    tensors |= {"rate": torch.full((1, 40), 2.0), "retain": torch.full((1, 40), 1.0)}
    tensors = {name: value.detach().requires_grad_() for name, value in tensors.items()}
    given = given._replace(tensors=tensors)
    found = given.gradients(backend="triton", chunk=32)
    for name, value in given.to(torch.float64).gradients(backend="naive").items():
        close(found[name], value, name)


def test_bf16_inputs_keep_their_dtypes() -> None:
    half = case((1,), 20, 16, 16).to(torch.bfloat16)
    found = half.gradients(backend="triton", check=False)
    full = half.to(torch.float32).gradients(backend="triton", check=False)
    assert found["end"].dtype == torch.float32
    for name, value in full.items():
        if name != "end":
            assert found[name].dtype == torch.bfloat16, name
        torch.testing.assert_close(found[name].float(), value, rtol=2e-2, atol=2e-2)


MEMORIES = {
    "delta rule": lambda backend: LinearMemory(DeltaNetConfig(width=16, heads=1, backend=backend)),
    "Hope's": lambda backend: Steered(
        SteeredConfig(width=16, heads=1, steering=4, backend=backend)
    ),
    "features": lambda backend: Titans(
        TitansConfig(width=16, heads=1, expansion=2, features=True, momentum=False, backend=backend)
    ),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_asks_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(*given: Any, **options: Any) -> Any:
        asked.append(given[0].shape)
        return kernels(*given, **options)

    kernels = BACKENDS["triton"]
    monkeypatch.setitem(BACKENDS, "triton", counted)
    results = []
    for backend in ("triton", "chunk"):
        torch.manual_seed(0)
        memory = MEMORIES[name](backend)
        y, state = memory(torch.randn(1, 9, 16))
        ends = [end for _, end in tree_leaves(state) if end.requires_grad]
        (y.square().sum() + sum(end.sum() for end in ends)).backward()
        results.append([y, *ends, *(p.grad for p in memory.parameters())])
    assert len(asked) == (2 if name == "Hope's" else 1)
    for left, right in zip(*results, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right, rtol=1e-4, atol=5e-5)


def test_which_back_end() -> None:
    nothing: dict[str, str | None] = {}
    on_cuda = {"triton": None, "fla": None}
    assert choose(8, any_order=False, refusals=nothing) == "chunk"
    assert choose(8, any_order=False, refusals=on_cuda) == "triton"
    assert choose(8, any_order=False, refusals=on_cuda | {"triton": "too wide"}) == "fla"
    assert choose(8, any_order=False, refusals={"triton": "a", "fla": "b"}) == "chunk"
    assert choose(8, any_order=True, refusals=on_cuda) == "chunk_autograd"
    assert choose(1, any_order=False, refusals=on_cuda) == "naive"


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"an input is torch\.float64; use backend='chunk'"):
        case((1,), 3, 16, 16).run(backend="triton")
    with pytest.raises(ValueError, match="it has no momentum"):
        case((1,), 3, 16, 16, momentum=True).to(torch.float32).run(backend="triton")
    with pytest.raises(ValueError, match="at most 128 wide; this one is 130"):
        case((1,), 3, 130, 16).to(torch.float32).run(backend="triton")
    with pytest.raises(ValueError, match="backend must be one of auto, naive"):
        LinearConfig(width=16, heads=1, backend="cuda")


def test_second_derivatives_are_refused() -> None:
    given = case((1,), 3, 16, 16).to(torch.float32)
    reads, _ = given.run(backend="triton")
    (grad,) = torch.autograd.grad(reads.sum(), given.tensors["u"], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        grad.sum().backward()


def test_no_tokens() -> None:
    given = {
        name: value.detach() for name, value in case((2,), 0).to(torch.float32).tensors.items()
    }
    reads, end = scan(**given, backend="triton")
    assert reads.shape == (2, 0, 3)
    assert torch.equal(end, given["state"])


def test_compiled() -> None:
    given = {
        name: value.detach()
        for name, value in case((1,), 18, 16, 16).to(torch.float32).tensors.items()
    }

    def run(x: torch.Tensor) -> torch.Tensor:
        return scan(**(given | {"x": x}), backend="triton")[0].square().sum()

    found = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(found(given["x"]), run(given["x"]))
