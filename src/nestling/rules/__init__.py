"""Update rules as pure functions with explicit state (Eq. 1-13, 32-60, 66-68, 75, 100-121)."""

from nestling.rules.core import Gates, Rule, State, Write, apply, chain, identity, stateless

__all__ = ["Gates", "Rule", "State", "Write", "apply", "chain", "identity", "stateless"]
