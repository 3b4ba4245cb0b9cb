"""Update rules as pure functions with explicit state (Eq. 1-13, 32-60, 66-68, 75, 100-121)."""

from nestling.rules.adagrad import adagrad, adagrad_memory
from nestling.rules.adam import adam, averaged, second_moment
from nestling.rules.aliases import (
    adagrad_torch,
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
from nestling.rules.core import Gates, Rule, State, Write, apply, chain, identity, stateless
from nestling.rules.deep_momentum import deep_momentum
from nestling.rules.delta_momentum import delta_momentum, delta_momentum_literal
from nestling.rules.dgd import delta_rate, delta_step, dgd, dgd_step, generalised_descent
from nestling.rules.feature_momentum import feature_momentum
from nestling.rules.gd import argmin, associate, descend, gd, pairs
from nestling.rules.momentum import accumulate, generalised_momentum, momentum
from nestling.rules.multiscale import multiscale, multiscale_literal
from nestling.rules.muon import adamuon, muon
from nestling.rules.newton_schulz import CUBIC, QUINTIC, newton_schulz, orthogonalise
from nestling.rules.nonlinear import nonlinear
from nestling.rules.omega import omega
from nestling.rules.precondition import precondition, preconditioned_momentum
from nestling.rules.retaining import retain_inputs, retaining, retaining_step
from nestling.rules.sequence import delta_net, hebbian, oja_net, remember

__all__ = [
    "CUBIC",
    "QUINTIC",
    "Gates",
    "Rule",
    "State",
    "Write",
    "accumulate",
    "adagrad",
    "adagrad_memory",
    "adagrad_torch",
    "adam",
    "adamuon",
    "adamw",
    "amsgrad",
    "apply",
    "argmin",
    "associate",
    "averaged",
    "chain",
    "deep_momentum",
    "delta_momentum",
    "delta_momentum_literal",
    "delta_net",
    "delta_rate",
    "delta_step",
    "descend",
    "dgd",
    "dgd_step",
    "feature_momentum",
    "gd",
    "generalised_descent",
    "generalised_momentum",
    "hebbian",
    "identity",
    "lion",
    "momentum",
    "multiscale",
    "multiscale_literal",
    "muon",
    "nadam",
    "newton_schulz",
    "nonlinear",
    "oja_net",
    "omega",
    "orthogonalise",
    "pairs",
    "precondition",
    "preconditioned_momentum",
    "radam",
    "remember",
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
