"""One `torch.optim.Optimizer` over the rules: it holds state and clock, the rule does the math.

Hyperparameters live in param groups, so schedulers and per-group settings work as in torch. Per
step and parameter: `lr` is the rate, `1 - lr * weight_decay` the retention (decoupled weight
decay), the parameter's own step count the clock. State is kept in float32 at least, whatever the
parameter's dtype; the update is computed there and rounded once.

`compose` makes an optimizer of rules in one line.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from nestling.checks import require
from nestling.optim import sharded
from nestling.optim.batch import Item, Step, StepResult, flat_step, matrix, run_batched
from nestling.rules import Gates, Rule, accumulate, chain
from nestling.shards import local
from nestling.tree import tree_dict

Group = Mapping[str, Any]
UNCOMPILED = ("params", "param_names", "lr", "initial_lr", "weight_decay")
OWN = ("step", "master", "follow")
"""State of the shell itself; everything else belongs to the rule."""


def check_decays(name: str, values: Iterable[float]) -> None:
    """Refuse decays of moving averages outside [0, 1)."""
    require(all(0.0 <= value < 1.0 for value in values), name, values, "in [0, 1)")


def common(
    weight_decay: float,
    maximize: bool,
    foreach: bool | None,
    master_weights: bool,
    compile: bool,
) -> dict[str, Any]:
    """The settings that every optimizer over rules has beside `lr`; see `RuleOptimizer`."""
    return {
        "weight_decay": weight_decay,
        "maximize": maximize,
        "foreach": foreach,
        "master_weights": master_weights,
        "compile": compile,
    }


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call what `step` was given, with gradients; None without it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_rate(lr: float | Tensor) -> None:
    """Refuse a learning rate that is not one finite number of at least 0."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            "Tensor lr must be 1-element: lr must be a number, or a tensor of one element, got"
            f" {lr!r}"
        )
    require(bool(lr >= 0) and math.isfinite(lr), "lr", lr, "a finite number of at least 0")


class ExactState(torch.optim.Optimizer):
    """An optimizer whose state is loaded as it was saved, also from older versions."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the state keeps the precision it was saved with.

        Settings that the saved groups do not have (they are younger than the state) stay as they
        are here.
        """
        before = [dict(group) for group in self.param_groups]
        given: list[dict[str, Any]] = []

        def note(optimizer: torch.optim.Optimizer, after_hooks: dict[str, Any]) -> None:
            given.append(after_hooks)

        def mend(optimizer: torch.optim.Optimizer) -> None:
            for group, old in zip(self.param_groups, before, strict=True):
                for name, value in old.items():
                    group.setdefault(name, value)
            self._load_exactly(given[0])

        handles = (  # ours come after the user's pre-hooks, and before the user's post-hooks
            self.register_load_state_dict_pre_hook(note),
            self.register_load_state_dict_post_hook(mend, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _load_exactly(self, state_dict: dict[str, Any]) -> None:
        saved = (key for group in state_dict["param_groups"] for key in group["params"])
        ours = (parameter for group in self.param_groups for parameter in group["params"])
        for key, parameter in zip(saved, ours, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                device = torch.device("cpu") if name == "step" else parameter.device
                if isinstance(value, Tensor):
                    self.state[parameter][name] = _own(value, device, parameter)
                elif isinstance(value, list):
                    self.state[parameter][name] = [_own(v, device, parameter) for v in value]


class RuleOptimizer(ExactState, ABC):
    """The shell. A concrete optimizer says which rule serves a kind of parameter in a group.

    Parameters of one group may need different rules: `kind` says which are alike (by default,
    vectors and the rest), `rule` and `rate` serve a kind.

    Common settings: `lr`, `weight_decay` (decoupled), `maximize`, `foreach` (True: batch
    same-shaped parameters; False: loop; None: whichever is faster), `master_weights` (keep a
    float32 copy of half-precision parameters in the state, so that steps below their resolution are
    not lost), `compile` (run the rule through `torch.compile`; the shell around it never is, so
    `step` may be called from compiled code either way).
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        check_rate(defaults["lr"])  # before the parameters, as torch's own do
        super().__init__(params, defaults)

    def kind(self, group: Group, parameter: Tensor) -> Any:
        """How a group's parameters differ: True for vectors (fewer than two dimensions)."""
        return parameter.ndim < 2

    @abstractmethod
    def rule(self, group: Group, kind: Any) -> Rule:
        """The rule for the group's parameters of one kind."""

    def rate(self, group: Group, kind: Any) -> float | Tensor:
        """The learning rate of this step, for the group's parameters of one kind."""
        return group["lr"]

    def follow(self, group: Group) -> float:
        """The decay of a momentum over the rule's directions; 0 where the rule sees to it."""
        return 0.0

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense. Concrete optimizers add their own."""
        decay, batched = group["weight_decay"], group["foreach"]
        check_rate(group["lr"])
        require(decay >= 0, "weight_decay", decay, "a number of at least 0")
        require(batched in (None, True, False), "foreach", batched, "a bool or None")

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
        loss = loss_of(closure)
        for group in self.param_groups:
            for kind, members in self._kinds(group).items():
                self._step_members(group, kind, members)
        return loss

    @torch.no_grad()
    def create_state(self) -> None:
        """Create the state of all parameters now instead of at the first step."""
        for group in self.param_groups:
            for kind, members in self._kinds(group).items():
                rule = self.rule(group, kind)
                for parameter in members:
                    if parameter.requires_grad:
                        self._start(group, parameter, rule)

    def items(self, group: Group, parameters: Sequence[Tensor]) -> list[Item]:
        """The write of each parameter in this step; tensors as the parameter has them."""
        return [self._item(group, parameter) for parameter in parameters]

    def take_directly(self, group: Group, parameter: Tensor, gates: Gates) -> bool:
        """True if an optimizer has taken this step in place, without forming its direction."""
        return False

    def _kinds(self, group: Group) -> dict[Any, list[Tensor]]:
        """The group's parameters by kind."""
        found: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            found.setdefault(self.kind(group, parameter), []).append(parameter)
        return found

    def _step_members(self, group: Group, kind: Any, members: Sequence[Tensor]) -> None:
        """One step for a group's parameters of one kind."""
        rule = self.rule(group, kind)
        flat = self._compiled(group, kind) if group["compile"] else flat_step(rule)
        clocks: dict[int, list[Tensor]] = {}
        for parameter in members:
            if parameter.requires_grad or parameter.grad is not None:
                self._start(group, parameter, rule)
            if parameter.grad is None:
                continue
            step = self.state[parameter]["step"]
            step += 1
            clocks.setdefault(int(step), []).append(parameter)
        rate = self.rate(group, kind)
        rate = rate.reshape(()) if isinstance(rate, Tensor) else rate
        retain = 1.0 - rate * group["weight_decay"] if group["weight_decay"] else 1.0
        for step, parameters in clocks.items():
            gates = Gates(rate, retain, step)
            parameters = [p for p in parameters if not self.take_directly(group, p, gates)]
            items = self.items(group, parameters)

            def inner(some: Sequence[Item], gates: Gates = gates) -> Iterator[StepResult]:
                return run_batched(rule, flat, some, gates, group["foreach"])

            for result in sharded.run_sharded(rule, items, inner):
                parameter = parameters[result.index]
                self._take(parameter, self._followed(group, parameter, result.direction), gates)
                self._keep(parameter, result)

    def _compiled(self, group: Group, kind: Any) -> Step:
        """The group's rule through `torch.compile`, once for each set of settings.

        Rules share code, and with it `torch.compile`'s limit of recompilations; where torch can
        count them apart (2.13 and newer), it does.
        """
        key = repr([kind, *(v for k, v in group.items() if k not in UNCOMPILED)])
        known: dict[str, Step] = self.__dict__.setdefault("_steps", {})
        if key not in known:
            apart = "isolate_recompiles" in signature(torch.compile).parameters
            options: dict[str, Any] = {"isolate_recompiles": True} if apart else {}
            known[key] = torch.compile(flat_step(self.rule(group, kind)), **options)
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
        leaves = {k: v for k, v in state.items() if k not in OWN}
        return Item(weight.detach(), -grad if group["maximize"] else grad, leaves)

    def _start(self, group: Group, parameter: Tensor, rule: Rule) -> None:
        """Create state before it is needed: all ranks then have the same keys in a checkpoint."""
        state = self.state[parameter]
        exact = torch.promote_types(parameter.dtype, torch.float32)
        if "follow" not in state and self.follow(group):
            state["follow"] = torch.zeros_like(parameter, dtype=exact)
        if "step" in state:
            return
        state["step"] = torch.tensor(0.0)
        if group["master_weights"] and parameter.dtype != exact:
            state["master"] = parameter.detach().to(exact)
        state.update(sharded.start(rule, parameter.detach(), exact, _initial))

    def _followed(self, group: Group, parameter: Tensor, direction: Tensor) -> Tensor:
        """The direction after the shell's own momentum, if there is one."""
        decay = self.follow(group)
        if not decay:
            return direction
        memory = local(self.state[parameter]["follow"])
        memory.copy_(accumulate(memory, direction, retain=decay, rate=1.0))
        return memory

    def _take(self, parameter: Tensor, direction: Tensor, gates: Gates) -> None:
        """`weight <- retain * weight - rate * direction`, rounded once to the parameter's dtype."""
        weight = local(self.state[parameter].get("master", parameter))
        if weight.dtype == direction.dtype:
            _descend_(weight, direction, gates)
        else:
            exact = weight.to(direction.dtype)
            _descend_(exact, direction, gates)
            weight.copy_(exact)
        if "master" in self.state[parameter]:
            local(parameter).copy_(weight)

    def _keep(self, parameter: Tensor, result: StepResult) -> None:
        """Keep the new state, in memory and layout of its own."""
        state = self.state[parameter]
        for key, new in result.leaves.items():
            if result.shared or new.stride() != state[key].stride():
                state[key].copy_(new)
            else:
                state[key] = new


def _initial(rule: Rule, weight: Tensor) -> dict[str, Tensor]:
    """The rule's first state; tensors of the weight's shape in the parameter's own shape."""
    view = weight if rule.elementwise else matrix(weight)
    leaves = tree_dict(rule.init(view))
    return {
        k: _laid_out(v.reshape(weight.shape) if v.shape == view.shape else v, weight)
        for k, v in leaves.items()
    }


def _own(value: Tensor, device: torch.device, like: Tensor) -> Tensor:
    """A copy of a saved tensor where the parameter lies, in the precision it was saved with."""
    return _laid_out(value.detach().to(device, copy=True), like)


def _laid_out(leaf: Tensor, like: Tensor) -> Tensor:
    """State in a dense layout; a parameter in one of its own (channels last) may share it."""
    own = leaf.shape == like.shape and not like.is_contiguous()
    return leaf if own else leaf.contiguous()


def _descend_(weight: Tensor, direction: Tensor, gates: Gates) -> None:
    if isinstance(gates.retain, Tensor) or gates.retain != 1.0:
        weight.mul_(gates.retain)
    if isinstance(gates.rate, Tensor):
        weight.sub_(gates.rate * direction)
    else:
        weight.sub_(direction, alpha=gates.rate)


class Composed(RuleOptimizer):
    """One rule for all parameters; made by `compose`."""

    def __init__(
        self,
        params: Iterable[Any],
        rule: Rule,
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        master_weights: bool = False,
        compile: bool = False,
    ) -> None:
        if not isinstance(rule, Rule):
            raise TypeError(f"rule must be a nestling.rules.Rule, got {type(rule).__name__}")
        self._rule = rule
        rest = common(weight_decay, maximize, foreach, master_weights, compile)
        super().__init__(params, {"lr": lr, "momentum": momentum, **rest})

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense."""
        super().check(group)
        check_decays("momentum", (group["momentum"],))

    def follow(self, group: Group) -> float:
        """Momentum over the rule's directions."""
        return group["momentum"]

    def rule(self, group: Group, kind: Any) -> Rule:
        """The composed rule. Vectors reach it as matrices of one row."""
        return self._rule

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rule": self._rule}


def compose(params: Iterable[Any], *rules: Rule, **options: Any) -> Composed:
    """An optimizer that passes gradients through the rules from left to right.

    `options` are `lr`, `momentum` (over the rules' directions), `weight_decay` (decoupled),
    `maximize`, `foreach`, `master_weights`, `compile`. AdamW is
    `compose(params, adam(), lr=1e-3, weight_decay=0.01)`. Without rules it is gradient descent.
    """
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(
                f"compose takes rules after the parameters, got {type(rule).__name__};"
                " settings such as lr go by name"
            )
    return Composed(params, rules[0] if len(rules) == 1 else chain(*rules), **options)
