"""Levels across steps (Eq. 71): each level has its parameters, its optimizer and its own clock.

A level with chunk C collects the gradients of C steps and then takes one step of its optimizer.
What was collected is state: it survives `zero_grad` and is saved and resumed in the middle of a
chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nestling.checks import one_of
from nestling.levels import Level
from nestling.optim.delta import DGD
from nestling.optim.shell import RuleOptimizer, loss_of

MakeOptimizer = Callable[[list[Any]], Optimizer]
LevelPart = tuple[Level, Iterable[Any], MakeOptimizer]
KEPT = ("nested.sum", "nested.count")


class NestedOptimizer(Optimizer):
    """An optimizer of optimizers, one per level (Eq. 71).

        NestedOptimizer([
            (Level(name="fast", chunk=1), fast_parameters, lambda p: M3(p, lr=1e-3)),
            (Level(name="slow", chunk=16), slow_parameters, lambda p: M3(p, lr=1e-3)),
        ])

    `reduce` says what a level's optimizer sees of its chunk: the "mean" of the gradients (default)
    or their "sum", as Eq. 71 is printed. A level of chunk `math.inf` never changes. The param
    groups are those of the levels' optimizers, with the level's name under "level", so schedulers
    work as usual.
    """

    def __init__(self, parts: Sequence[LevelPart], *, reduce: str = "mean") -> None:
        one_of("reduce", reduce, ("mean", "sum"))
        self._reduce = reduce
        self.levels = [level for level, _, _ in parts]
        names = [level.name for level in self.levels]
        if len(set(names)) < len(names):
            raise ValueError(f"every level needs a name of its own, got {names}")
        for level, params, _ in parts:
            if isinstance(params, Tensor):
                raise TypeError(
                    "params argument given to the optimizer should be an iterable of Tensors or"
                    f" dicts; level {level.name!r} got one of shape {tuple(params.shape)}"
                )
        self.optimizers = [factory(list(params)) for _, params, factory in parts]
        for level, optimizer in zip(self.levels, self.optimizers, strict=True):
            if isinstance(optimizer, DGD) and level.chunk != 1:
                raise ValueError(
                    f"level {level.name!r}: DGD needs the pairs of every step and cannot wait for a"
                    f" chunk of {level.chunk}; give it chunk=1"
                )
        owned = [dict.fromkeys(_parameters(optimizer)) for optimizer in self.optimizers]
        if len(set().union(*owned)) < sum(len(own) for own in owned):
            raise ValueError("a parameter belongs to one level only; one was given to two")
        super().__init__([p for own in owned for p in own], {})
        self._kept: dict[Tensor, dict[str, Tensor]] = {}
        for level, optimizer in zip(self.levels, self.optimizers, strict=True):
            for group in optimizer.param_groups:
                group.update(level=level.name, position=0)
        self._join()
        for name in ("momentum", "betas"):  # what schedulers look for before they cycle it
            if all(name in group for group in self.param_groups):
                self.defaults[name] = self.param_groups[0][name]

    @property
    def position(self) -> int:
        """How many steps were taken."""
        return int(self.param_groups[0]["position"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collect this step's gradients and step every level that is due."""
        loss = loss_of(closure)
        position = self.position + 1
        for group in self.param_groups:
            group["position"] = position
        if position == 1:  # a checkpoint must find all state, also of levels not yet due
            for optimizer in self.optimizers:
                if isinstance(optimizer, RuleOptimizer):
                    optimizer.create_state()
        for level, optimizer in zip(self.levels, self.optimizers, strict=True):
            if level.chunk == 1:
                _step(optimizer)
                continue
            for parameter in dict.fromkeys(_parameters(optimizer)):
                self._collect(parameter)
            if level.due(position):
                self._release(optimizer, 1.0 / level.chunk if self._reduce == "mean" else 1.0)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients; what levels have collected stays."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only at construction: a parameter must belong to a level."""
        if hasattr(self, "_kept"):
            raise NotImplementedError(
                "NestedOptimizer: name all parameters of a level when it is made"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The levels' states and what they have collected ("nested.sum", "nested.count")."""
        handle = self.register_state_dict_post_hook(_add_kept, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, also in the middle of a chunk."""
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the saved state has {len(groups)} parameter groups, this optimizer has"
                f" {len(self.param_groups)}"
            )
        begin = 0
        self._kept = {}
        for optimizer in self.optimizers:
            own = groups[begin : begin + len(optimizer.param_groups)]
            begin += len(own)
            self._load(optimizer, own, state_dict["state"])
        self._join()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        own = ("levels", "optimizers", "_reduce", "_kept")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join()

    def _load(self, optimizer: Optimizer, groups: list[Any], states: dict[Any, Any]) -> None:
        indices = [i for group in groups for i in group["params"]]
        entries = {i: states[i] for i in indices if i in states}
        plain = {i: {k: v for k, v in e.items() if k not in KEPT} for i, e in entries.items()}
        plain = {i: entry for i, entry in plain.items() if entry}
        optimizer.load_state_dict({"state": plain, "param_groups": groups})
        for index, parameter in zip(indices, _parameters(optimizer), strict=True):
            found = entries.get(index, {})
            if "nested.sum" in found:
                exact = torch.promote_types(parameter.dtype, torch.float32)
                total = found["nested.sum"].to(parameter.device, exact, copy=True)
                count = found["nested.count"].to("cpu", copy=True)
                self._kept[parameter] = dict(zip(KEPT, (total, count), strict=True))

    def _join(self) -> None:
        """One list of groups and one state: schedulers and checkpoints see one optimizer."""
        self.param_groups = [group for o in self.optimizers for group in o.param_groups]
        self.state = defaultdict(dict)
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def _collect(self, parameter: Tensor) -> None:
        if parameter not in self._kept:
            exact = torch.promote_types(parameter.dtype, torch.float32)
            zeros = torch.zeros_like(parameter, dtype=exact)
            self._kept[parameter] = dict(zip(KEPT, (zeros, torch.tensor(0.0)), strict=True))
        if parameter.grad is not None:
            total, count = (self._kept[parameter][key] for key in KEPT)
            total += parameter.grad
            count += 1

    def _release(self, optimizer: Optimizer, factor: float) -> None:
        """One step of a level with what it has collected, and a new start."""
        own = {parameter: parameter.grad for parameter in _parameters(optimizer)}
        for parameter in own:
            total, count = (self._kept[parameter][key] for key in KEPT)
            parameter.grad = (total * factor).to(parameter.dtype) if count else None
        _step(optimizer)
        for parameter, grad in own.items():
            parameter.grad = grad
            for key in KEPT:
                self._kept[parameter][key].zero_()


def _add_kept(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Add what the levels have collected to a state that is being saved."""
    assert isinstance(optimizer, NestedOptimizer)
    indices = [i for group in packed["param_groups"] for i in group["params"]]
    for index, parameter in zip(indices, _parameters(optimizer), strict=True):
        if parameter in optimizer._kept:
            entry = packed["state"].get(index, {})
            packed["state"][index] = {**entry, **optimizer._kept[parameter]}


def _step(optimizer: Optimizer) -> None:
    """A level's step with the hooks of its own optimizer.

    Hooks that are registered for all optimizers see one step, that of the `NestedOptimizer`.
    """
    for before in optimizer._optimizer_step_pre_hooks.values():
        before(optimizer, (optimizer,), {})
    plain = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    plain(optimizer)
    for after in optimizer._optimizer_step_post_hooks.values():
        after(optimizer, (optimizer,), {})


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
