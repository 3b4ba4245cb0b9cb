"""One `torch.optim.Optimizer` over the rules: it holds state and clock, the rule does the math.

Hyperparameters live in param groups, so schedulers and per-group settings work as in torch. Per
step and parameter: `lr` is the rate, `1 - lr * weight_decay` the retention (decoupled weight
decay), the parameter's own step count the clock. State is kept in float32 at least, whatever the
parameter's dtype; the update is computed there and rounded once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nestling.optim import sharded
from nestling.optim.batch import Item, Result, Step, flat_step, matrix, run
from nestling.rules import Gates, Rule
from nestling.tree import tree_dict

__all__ = ["Group", "RuleOptimizer", "check_decays", "require", "settings"]

Group = Mapping[str, Any]
UNCOMPILED = ("params", "param_names", "lr", "initial_lr", "weight_decay")


def require(name: str, value: Any, allowed: bool, what: str) -> None:
    """Refuse a hyperparameter with a message that says what is allowed."""
    if not allowed:
        raise ValueError(f"{name} must be {what}, got {value!r}")


def check_decays(name: str, values: Iterable[float]) -> None:
    """Refuse decays of moving averages outside [0, 1)."""
    require(name, values, all(0.0 <= value < 1.0 for value in values), "in [0, 1)")


def settings(arguments: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """A constructor's `locals()` as the defaults of its groups."""
    leave = {"self", "params", "__class__", *without}
    return {name: value for name, value in arguments.items() if name not in leave}


class RuleOptimizer(torch.optim.Optimizer, ABC):
    """The shell. A concrete optimizer says which rule serves a group, and checks its settings.

    Common settings: `lr`, `weight_decay` (decoupled), `maximize`, `foreach` (True: batch
    same-shaped parameters; False: loop; None: whichever is faster), `master_weights` (keep a
    float32 copy of half-precision parameters in the state, so that steps below their resolution are
    not lost), `compile` (run the rule through `torch.compile`; the shell around it never is, so
    `step` may be called from compiled code either way).
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    @abstractmethod
    def rule(self, group: Group, vector: bool) -> Rule:
        """The rule for a group's matrices, or for its `vector`s (fewer than two dimensions)."""

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense. Concrete optimizers add their own."""
        lr, decay = group["lr"], group["weight_decay"]
        require("lr", lr, bool(lr >= 0) and math.isfinite(lr), "a finite number of at least 0")
        require("weight_decay", decay, decay >= 0, "a number of at least 0")
        require(
            "foreach", group["foreach"], group["foreach"] in (None, True, False), "a bool or None"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings (checked at once)."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for parameter in group["params"]:
                if not parameter.is_floating_point():
                    kind = "complex" if parameter.is_complex() else str(parameter.dtype)
                    raise TypeError(
                        f"{type(self).__name__} takes real floating point parameters; got a {kind}"
                        f" one of shape {tuple(parameter.shape)}"
                        + (" (torch.view_as_real gives a real one)" if kind == "complex" else "")
                    )
            self.check(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for vector in (False, True):
                self._step_members(group, vector)
        return loss

    @torch.no_grad()
    def create_state(self) -> None:
        """Create the state of all parameters now instead of at the first step."""
        for group in self.param_groups:
            for vector in (False, True):
                rule = self.rule(group, vector)
                for parameter in group["params"]:
                    if parameter.requires_grad and (parameter.ndim < 2) == vector:
                        self._start(parameter, rule, group["master_weights"])

    def items(self, group: Group, parameters: Sequence[Tensor]) -> list[Item]:
        """What each parameter brings to this step; tensors as the parameter has them."""
        return [self._item(group, parameter) for parameter in parameters]

    def take_directly(self, group: Group, parameter: Tensor, gates: Gates) -> bool:
        """True if an optimizer has taken this step in place, without forming its direction."""
        return False

    def _step_members(self, group: Group, vector: bool) -> None:
        """One step for a group's matrices, or for its vectors."""
        members = [p for p in group["params"] if (p.ndim < 2) == vector]
        if not members:
            return
        rule = self.rule(group, vector)
        flat = self._compiled(group, vector) if group["compile"] else flat_step(rule)
        clocks: dict[int, list[Tensor]] = {}
        for parameter in members:
            if parameter.requires_grad or parameter.grad is not None:
                self._start(parameter, rule, group["master_weights"])
            if parameter.grad is None:
                continue
            step = self.state[parameter]["step"]
            step += 1
            clocks.setdefault(int(step), []).append(parameter)
        rate = group["lr"]
        retain = 1.0 - rate * group["weight_decay"] if group["weight_decay"] else 1.0
        for step, parameters in clocks.items():
            if parameters[0].is_cpu:
                _keep_heap()
            gates = Gates(rate, retain, step)
            parameters = [p for p in parameters if not self.take_directly(group, p, gates)]
            items = self.items(group, parameters)

            def inner(some: Sequence[Item], gates: Gates = gates) -> Iterator[Result]:
                return run(rule, flat, some, gates, group["foreach"])

            for result in sharded.run(rule, items, inner):
                parameter = parameters[result.index]
                self._take(parameter, result.direction, gates)
                self._keep(parameter, result)

    def _compiled(self, group: Group, vector: bool) -> Step:
        """The group's rule through `torch.compile`, once for each set of settings."""
        key = repr([vector, *(v for k, v in group.items() if k not in UNCOMPILED)])
        known: dict[str, Step] = self.__dict__.setdefault("_steps", {})
        if key not in known:
            step: Any = flat_step(self.rule(group, vector))
            step.__code__ = step.__code__.replace()  # a cache (and its limit) of its own
            known[key] = torch.compile(step)
        return known[key]

    def _item(self, group: Group, parameter: Tensor) -> Item:
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{type(self).__name__} does not take sparse gradients (layout {grad.layout});"
                " build the embedding with sparse=False"
            )
        exact = torch.promote_types(parameter.dtype, torch.float32)
        weight = state.get("master", parameter).to(exact)
        grad = grad.to(exact)
        leaves = {k: v for k, v in state.items() if k not in ("step", "master")}
        return Item(weight.detach(), -grad if group["maximize"] else grad, leaves)

    def _start(self, parameter: Tensor, rule: Rule, master: bool) -> None:
        """Create state before it is needed: all ranks then have the same keys in a checkpoint."""
        state = self.state[parameter]
        if "step" in state:
            return
        state["step"] = torch.tensor(0.0)
        exact = torch.promote_types(parameter.dtype, torch.float32)
        if master and parameter.dtype != exact:
            state["master"] = parameter.detach().to(exact)
        state.update(sharded.start(rule, parameter.detach(), exact, _initial))

    def _take(self, parameter: Tensor, direction: Tensor, gates: Gates) -> None:
        """`weight <- retain * weight - rate * direction`, rounded once to the parameter's dtype."""
        weight = sharded.local(self.state[parameter].get("master", parameter))
        if weight.dtype == direction.dtype:
            _descend_(weight, direction, gates)
        else:
            exact = weight.to(direction.dtype)
            _descend_(exact, direction, gates)
            weight.copy_(exact)
        if "master" in self.state[parameter]:
            sharded.local(parameter).copy_(weight)

    def _keep(self, parameter: Tensor, result: Result) -> None:
        """Keep the new state, in memory and layout of its own."""
        state = self.state[parameter]
        for key, new in result.leaves.items():
            if result.shared or new.stride() != state[key].stride():
                state[key].copy_(new)
            else:
                state[key] = new

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the state keeps the precision it was saved with."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, ours, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    device = "cpu" if name == "step" else parameter.device
                    self.state[parameter][name] = value.detach().to(device, copy=True)


def _initial(rule: Rule, weight: Tensor) -> dict[str, Tensor]:
    """The rule's first state; tensors of the weight's shape in the parameter's own shape."""
    view = weight if rule.elementwise else matrix(weight)
    leaves = tree_dict(rule.init(view))
    return {k: v.reshape(weight.shape) if v.shape == view.shape else v for k, v in leaves.items()}


def _descend_(weight: Tensor, direction: Tensor, gates: Gates) -> None:
    if isinstance(gates.retain, Tensor) or gates.retain != 1.0:
        weight.mul_(gates.retain)
    if isinstance(gates.rate, Tensor):
        weight.sub_(gates.rate * direction)
    else:
        weight.sub_(direction, alpha=gates.rate)


@cache
def _keep_heap() -> None:
    """Let glibc serve temporaries of up to 32 MB from its heap instead of fresh pages each time.

    Freeing one large block raises malloc's dynamic threshold (mallopt(3)); without this, page
    faults make an elementwise step on a few megabytes two to three times slower. Harmless
    elsewhere.
    """
    torch.empty(31 << 20, dtype=torch.uint8)
