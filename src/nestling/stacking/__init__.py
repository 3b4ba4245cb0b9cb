"""Level stacking: pretrained models that keep learning (section 7.3 of the paper)."""

from nestling.stacking.adapting import RULES, adapt, load_learner
from nestling.stacking.learner import Learner, Report
from nestling.stacking.memory_files import fingerprint
from nestling.stacking.pretrained import load_llama2c, load_llama2c_tokenizer, load_pretrained
from nestling.stacking.slots import assign_levels, choose_layers, mlp_matrices
from nestling.stacking.watch import Alarm, Change, Drift, DriftWarning, Limits

__all__ = [
    "RULES",
    "Alarm",
    "Change",
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
