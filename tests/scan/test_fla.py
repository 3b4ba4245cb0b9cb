"""The mapping onto flash-linear-attention's conventions, with its recurrences in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nestling.scan import scan
from nestling.scan.delta.fla import map_to_fla
from tests.scan.scan_cases import case


def delta(q, k, v, g, beta, scale, initial_state, output_final_state):  # type: ignore[no-untyped-def]
    """fla's gated delta rule: decay, then write the error of the decayed memory `[B, H, K, V]`."""
    memory, out = initial_state, []
    for t in range(q.shape[1]):
        memory = memory * g[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", memory, k[:, t])
        memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, t], error * beta[:, t, :, None])
        out.append(scale * torch.einsum("bhkv,bhk->bhv", memory, q[:, t]))
    return torch.stack(out, 1), memory


def linear(q, k, v, g, scale, initial_state, output_final_state):  # type: ignore[no-untyped-def]
    """fla's simple gated linear attention."""
    memory, out = initial_state, []
    for t in range(q.shape[1]):
        memory = memory * g[:, t, :, None, None].exp()
        memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        out.append(scale * torch.einsum("bhkv,bhk->bhv", memory, q[:, t]))
    return torch.stack(out, 1), memory


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_mapping(erase: bool, read: str, lead: tuple[int, ...]) -> None:
    given: dict[str, Tensor] = {
        k: v.detach() for k, v in case(lead, 7).to(torch.float32).tensors.items()
    }
    found = map_to_fla((delta, linear), **given, erase=erase, read=read)
    expected = scan(**given, erase=erase, read=read, backend="naive")
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_refuses_what_it_cannot_do() -> None:
    given = {k: v.detach() for k, v in case().tensors.items()}
    with pytest.raises(ValueError, match="needs CUDA tensors; x is on cpu"):
        scan(**given, backend="fla")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from nestling.scan.delta import fla

    for name in ("fla", "fla.ops.gated_delta_rule"):  # (another test may have loaded it)
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ImportError, match="flash-linear-attention"):
        fla._kernels()
