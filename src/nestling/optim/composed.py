"""An optimizer from rules in one line: `compose(params, adam(), lr=1e-3, weight_decay=0.01)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nestling.optim.shell import Group, RuleOptimizer, check_decays, common
from nestling.rules import Rule, chain


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
