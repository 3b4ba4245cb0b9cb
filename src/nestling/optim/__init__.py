"""Optimizers as memories: one thin shell over the rules, and the names to call them by."""

from nestling.optim.delta import DGD, DeepMomentum, DeltaMomentum
from nestling.optim.inputs import Capture, capture
from nestling.optim.labels import is_hidden_matrix, param_groups
from nestling.optim.nested import NestedOptimizer
from nestling.optim.orthogonal import M3, AdaMuon, Muon
from nestling.optim.retaining import Retaining
from nestling.optim.shell import Composed, RuleOptimizer, compose

__all__ = [
    "DGD",
    "M3",
    "AdaMuon",
    "Capture",
    "Composed",
    "DeepMomentum",
    "DeltaMomentum",
    "Muon",
    "NestedOptimizer",
    "Retaining",
    "RuleOptimizer",
    "capture",
    "compose",
    "is_hidden_matrix",
    "param_groups",
]
