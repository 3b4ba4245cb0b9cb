"""Scenarios for the pretended device: python -m tests.pretend.scenarios GROUP

Each scenario prints one line of JSON: its name, launches and waits of its parts, and the error that
ended it, if any. What runs on the CPU too is compared with it.
"""

from __future__ import annotations

from tests.pretend import device as pretend  # isort: skip  (before torch)

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Counts = dict[str, Any]
Scenario = Callable[[], Counts]


def counted(name: str, run: Callable[[], Any], into: Counts) -> Any:
    """Return what `run` returns; its launches and waits go into the counts."""
    with pretend.counting() as count:
        made = run()
    into[name] = {"launches": count.launches.total(), "waits": dict(count.waits)}
    return made


def alike(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left.detach().cpu(), right.detach(), rtol=1e-3, atol=1e-4)


def small(name: str, **given: Any) -> Any:
    from nestling.models import NestlingForCausalLM
    from tests.models.small_models import config_of

    torch.manual_seed(1)
    return NestlingForCausalLM(config_of(name, initializer_range=0.3, **given))


def models() -> Iterator[tuple[str, Scenario]]:
    """Every preset: a training step, as on the CPU, and generation."""
    from tests.models.small_models import MODELS, tokens

    def scenario(name: str) -> Counts:
        counts: Counts = {}
        name, _, form = name.partition(", ")
        chunks = {"chunk": 4 if form == "two chunks" else 16, "chunk_others": 16}
        given = {"mixer_options": {"self_modifying": chunks}} if name == "hope_printed" else {}
        ids = tokens(1, 18)
        here, there = small(name, **given), small(name, **given).to("cuda")
        expected = here(ids, labels=ids).loss
        expected.backward()
        moved = ids.to("cuda")
        loss = counted("forward", lambda: there(moved, labels=moved).loss, counts)
        counted("backward", loss.backward, counts)
        alike(loss, expected)
        for left, right in zip(there.parameters(), here.parameters(), strict=True):
            if right.grad is not None:
                alike(left.grad, right.grad)
        asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        said = counted("generate", lambda: there.eval().generate(moved[:, :5], **asked), counts)
        assert torch.equal(said.cpu(), here.eval().generate(ids[:, :5], **asked))
        return counts

    for name in (*MODELS, "hope_printed, two chunks"):
        yield name, lambda name=name: scenario(name)


def optimizers() -> Iterator[tuple[str, Scenario]]:
    """Every optimizer: steps as on the CPU, and going on from a saved state."""
    from nestling.optim import DGD, capture
    from tests.optim.test_common import SHELLS, nested

    def net(device: str) -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        return made.to(device)

    def scenario(make: Callable[[nn.Module], Any]) -> Counts:
        counts: Counts = {}
        ends = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(2)
            x = torch.randn(5, 6).to(device)
            model = net(device)
            optimizer = make(model)
            for step in range(4):
                if step == 2:  # go on from a file
                    saved = optimizer.state_dict()
                    optimizer = make(model)
                    optimizer.load_state_dict(saved)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if device == "cuda" and step == 3:
                    counted("step", optimizer.step, counts)
                else:
                    optimizer.step()
            ends.append([p.detach().cpu() for p in model.parameters()])
        for left, right in zip(*reversed(ends), strict=True):
            alike(left, right)
        return counts

    def dgd(model: nn.Module) -> Any:
        return DGD(model.parameters(), lr=0.05, inputs=capture(model))

    for name, (make, rate) in SHELLS.items():
        yield name, lambda make=make, rate=rate: scenario(lambda m: make(m.parameters(), lr=rate))
    yield "nested M3", lambda: scenario(lambda m: nested(list(m.parameters()), lr=0.03))
    yield "DGD", lambda: scenario(dgd)


def adapting() -> Iterator[tuple[str, Scenario]]:
    """A pretrained model that learns what it reads, in every way levels pass it on."""
    import nestling
    from tests.models.small_models import tokens

    def scenario(**options: Any) -> Counts:
        counts: Counts = {}
        states = []
        for device in ("cpu", "cuda"):
            model = small("transformer").eval().to(device)
            learner = nestling.adapt(model, chunks=[8, 16], rate=0.05, **options)
            ids = tokens(1, 40)[0].to(device)
            if device == "cuda":
                counted("learn", lambda learner=learner, ids=ids: learner.learn(ids), counts)
            else:
                learner.learn(ids)
            states.append(learner(ids[None, :8]).logits)
        alike(states[1], states[0])
        return counts

    ways: dict[str, dict[str, Any]] = {
        "gd": {},
        "m3": {"rule": "m3"},
        "dgd": {"rule": "dgd"},
        "rank": {"rank": 2},
        "move": {"transfer": "move"},
        "reptile": {"transfer": "reptile"},
        "first order": {"transfer": "first_order"},
        "second order": {"transfer": "second_order"},
    }
    for name, options in ways.items():
        yield name, lambda options=options: scenario(**options)


def launches() -> Iterator[tuple[str, Scenario]]:
    """Launches and waits of one layer and 2,048 tokens, with tiles as on a GPU; the kernels of
    Triton are only counted."""
    from nestling.models import NestlingConfig, NestlingForCausalLM, presets
    from nestling.scan.delta import triton as delta
    from nestling.scan.self_modifying import triton as self_modifying

    for module in (delta, self_modifying):
        module.longest = lambda: 32

    def pass_through(name: str, layers: int) -> Counts:
        counts: Counts = {}
        config = NestlingConfig(
            vocab_size=16, hidden_size=64, num_hidden_layers=layers, num_attention_heads=1,
            intermediate_size=32, **{**presets.MODELS[name], "learning": "plain"},
        )  # fmt: skip
        model = NestlingForCausalLM(config).to("cuda")
        ids = torch.zeros(1, 2048, dtype=torch.int64).to("cuda")
        with pretend.dry():
            loss = counted("forward", lambda: model(ids, labels=ids).loss, counts)
            counted("backward", loss.backward, counts)
        return counts

    def scenario(name: str) -> Counts:
        one, two = pass_through(name, 1), pass_through(name, 2)
        return {
            part: {
                "launches": two[part]["launches"] - one[part]["launches"],
                "waits": two[part]["waits"],
            }
            for part in ("forward", "backward")
        }

    for name in ("hope", "hope_printed", "deltanet", "gated_delta", "retnet", "transformer"):
        yield name, lambda name=name: scenario(name)


GROUPS = {"models": models, "optimizers": optimizers, "adapting": adapting, "launches": launches}


def main() -> None:
    pretend.prepare()
    torch.set_num_threads(1)
    with pretend.Device():
        for name, run in GROUPS[sys.argv[1]]():
            try:
                line = {"name": name, "counts": run(), "error": None}
            except Exception:
                line = {"name": name, "counts": {}, "error": traceback.format_exc(limit=-8)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
