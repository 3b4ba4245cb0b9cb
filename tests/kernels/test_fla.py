"""The mapping onto flash-linear-attention, with fla's own kernels in Triton's interpreter.

Its recurrent kernels run there (its chunked ones, which serve on a GPU, do not). The gated delta
rule's recurrent kernel has no backward pass: its values are fla's, and its gradients those of the
plain recurrence at the same inputs, so what is tested is the gradient of everything around it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nestling.scan import scan
from nestling.scan.backends import INSTALLED
from nestling.scan.delta.fla import map_to_fla
from tests.scan.scan_cases import Case, case
from tests.scan.test_fla import delta as plain_delta

pytestmark = pytest.mark.skipif("fla" not in INSTALLED, reason="needs flash-linear-attention")


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    """fla's two operations: any configuration (tuning needs a GPU), no warning about that."""
    from triton.runtime.autotuner import Autotuner

    before = Autotuner._bench
    Autotuner._bench = lambda *_, **__: [0.0, 0.0, 0.0]  # (all take as long: the first is taken)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.simple_gla import fused_recurrent_simple_gla

    class Delta(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Any:
            ctx.save_for_backward(*given)
            q, k, v, g, beta, start = given
            return fused_recurrent_gated_delta_rule(
                q=q, k=k, v=v, g=g, beta=beta, scale=1.0, initial_state=start,
                output_final_state=True,
            )  # fmt: skip

        @staticmethod
        def backward(ctx: Any, dout: Tensor, dend: Tensor) -> Any:
            with torch.enable_grad():
                given = [part.detach().requires_grad_() for part in ctx.saved_tensors]
                found = plain_delta(*given[:5], 1.0, given[5], True)
            return torch.autograd.grad(found, given, (dout, dend))

    def delta(**given: Any) -> Any:
        assert given["scale"] == 1.0
        assert given["output_final_state"]
        return Delta.apply(*(given[name] for name in ("q", "k", "v", "g", "beta", "initial_state")))

    yield delta, fused_recurrent_simple_gla
    Autotuner._bench = before


def through_fla(given: Case, kernels: Any) -> dict[str, Tensor]:
    """Outputs and gradients by the mapping instead of by a back end."""

    class Mapped(Case):
        def run(self, **changes: Any) -> Any:
            return map_to_fla(kernels, **self.tensors, **(self.options | changes))

    return Mapped(given.tensors, given.options).gradients()


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("read", ["after", "before"])
def test_outputs_and_gradients(erase: bool, read: str, kernels: Any) -> None:
    given = case((2,), 6, 8, 8, erase=erase, read=read).to(torch.float32)
    with torch.no_grad():  # (where the logarithm of retain is steep, float32 is not enough)
        given.tensors["retain"].clamp_min_(0.05)
    found = through_fla(given, kernels)
    for name, value in given.to(torch.float64).gradients(backend="naive").items():
        torch.testing.assert_close(
            found[name].double(), value, rtol=1e-4, atol=1e-4 * float(value.abs().max()), msg=name
        )


def test_a_retain_of_zero_is_refused() -> None:
    """Its gradient would be lost: `clamp` has none below its bound."""
    given = {name: value.detach() for name, value in case().to(torch.float32).tensors.items()}
    given["retain"][0, 3] = 0.0
    with pytest.raises(ValueError, match=r"needs retain of at least 1e-06; got 0: use backend='tr"):
        scan(**given, backend="fla")
