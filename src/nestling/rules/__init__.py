"""Update rules as pure functions with explicit state, for optimizers and fast weights alike.

The paper's other forms of the same equations are in `nestling.paper.exhibits`.
"""

from nestling.rules.adam import adagrad, adam, averaged, second_moment
from nestling.rules.aliases import (
    adamw,
    amsgrad,
    lion,
    nadam,
    radam,
    rmsprop,
    sgd,
    signsgd,
    signum,
    weight_decay,
)
from nestling.rules.core import (
    Gates,
    Pairs,
    Rule,
    State,
    Write,
    apply,
    chain,
    identity,
    stateless,
)
from nestling.rules.deep_momentum import deep_momentum
from nestling.rules.delta_momentum import delta_momentum, delta_momentum_literal
from nestling.rules.dgd import dgd
from nestling.rules.momentum import accumulate, feature_momentum, momentum, nonlinear
from nestling.rules.multiscale import multiscale, multiscale_literal
from nestling.rules.muon import adamuon, muon
from nestling.rules.newton_schulz import CUBIC, QUINTIC, newton_schulz, orthogonalise
from nestling.rules.retaining import retain_inputs, retaining, retaining_step

__all__ = [
    "CUBIC",
    "QUINTIC",
    "Gates",
    "Pairs",
    "Rule",
    "State",
    "Write",
    "accumulate",
    "adagrad",
    "adam",
    "adamuon",
    "adamw",
    "amsgrad",
    "apply",
    "averaged",
    "chain",
    "deep_momentum",
    "delta_momentum",
    "delta_momentum_literal",
    "dgd",
    "feature_momentum",
    "identity",
    "lion",
    "momentum",
    "multiscale",
    "multiscale_literal",
    "muon",
    "nadam",
    "newton_schulz",
    "nonlinear",
    "orthogonalise",
    "radam",
    "retain_inputs",
    "retaining",
    "retaining_step",
    "rmsprop",
    "second_moment",
    "sgd",
    "signsgd",
    "signum",
    "stateless",
    "weight_decay",
]
