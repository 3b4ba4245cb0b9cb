"""Update rules as pure functions with explicit state (Eq. 1-13, 32-60, 66-68, 75, 100-121)."""

from nestling.rules.core import Gates, Rule, State, Write, apply, chain, identity, stateless
from nestling.rules.delta_momentum import delta_momentum, delta_momentum_literal
from nestling.rules.dgd import delta_rate, delta_step, dgd, dgd_step, generalised_descent
from nestling.rules.multiscale import multiscale, multiscale_literal
from nestling.rules.muon import adamuon, muon
from nestling.rules.newton_schulz import CUBIC, QUINTIC, newton_schulz, orthogonalise

__all__ = [
    "CUBIC",
    "QUINTIC",
    "Gates",
    "Rule",
    "State",
    "Write",
    "adamuon",
    "apply",
    "chain",
    "delta_momentum",
    "delta_momentum_literal",
    "delta_rate",
    "delta_step",
    "dgd",
    "dgd_step",
    "generalised_descent",
    "identity",
    "multiscale",
    "multiscale_literal",
    "muon",
    "newton_schulz",
    "orthogonalise",
    "stateless",
]
