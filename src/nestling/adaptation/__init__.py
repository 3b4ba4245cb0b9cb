"""Pretrained models that keep learning: level stacking (section 7.3 of the paper)."""

from nestling.adaptation.adapting import RULES, adapt, load_learner
from nestling.adaptation.drift import Alarm, Drift, DriftWarning, Limits
from nestling.adaptation.learner import Learner, Report
from nestling.adaptation.pretrained import load_llama2c, load_llama2c_tokenizer, load_pretrained
from nestling.adaptation.slots import assign_levels, choose_layers, mlp_matrices
from nestling.files import fingerprint

__all__ = [
    "RULES",
    "Alarm",
    "Drift",
    "DriftWarning",
    "Learner",
    "Limits",
    "Report",
    "adapt",
    "assign_levels",
    "choose_layers",
    "fingerprint",
    "load_learner",
    "load_llama2c",
    "load_llama2c_tokenizer",
    "load_pretrained",
    "mlp_matrices",
]
