"""The public names: what a user may rely on. A change here is a change of the API."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

PUBLIC = {
    "nestling": """
        AdaMuon Continuum DGD DeepMomentum DeltaMomentum Level M3 Muon NestedOptimizer
        NestlingConfig NestlingForCausalLM __version__ adapt compose describe load_learner
        memories models optim param_groups scan
    """,
    "nestling.optim": """
        AdaMuon Capture Composed DGD DeepMomentum DeltaMomentum M3 Muon NestedOptimizer
        Retaining RuleOptimizer capture compose is_hidden_matrix param_groups
    """,
    "nestling.rules": """
        CUBIC Gates Pairs QUINTIC Rule State Write accumulate adagrad adam adamuon adamw amsgrad
        apply averaged chain deep_momentum delta_momentum delta_momentum_literal dgd
        feature_momentum identity lion momentum multiscale multiscale_literal muon nadam
        newton_schulz nonlinear orthogonalise radam retain_inputs retaining retaining_step
        rmsprop second_moment sgd signsgd signum stateless weight_decay
    """,
    "nestling.scan": """
        BACKENDS MLPState MomentumState any_order mlp_naive scan scan_mlp scan_naive
        scan_self_modifying
    """,
    "nestling.memories": """
        Attention AttentionConfig DeltaNetConfig GatedDeltaConfig Learning LinearAttentionConfig
        LinearConfig LinearMemory Memory OjaConfig Omega OmegaConfig Projections Rates Retention
        RetentionConfig SelfModifying SelfModifyingConfig Steered SteeredConfig Titans TitansConfig
        configure state_detach state_repeat state_select state_stack state_to tree_leaves tree_map
    """,
    "nestling.continuum": """
        Block BlockState Chain Channel Continuum ContinuumState Factors Fast FeedForward
        InContext LevelState MLP MemoryLevel Output Pairs Parallel Part Slot SwiGLU align
        level_names level_parts meta_loss naive own_slots shared_slots
    """,
    "nestling.models": """
        MemoryCache NestlingConfig NestlingForCausalLM NestlingModel StreamOutput byte_tokenizer
        fingerprint load_state model_card presets pretrained save_state stream
    """,
}
"""Module -> its public names."""


@pytest.mark.parametrize("module", list(PUBLIC))
def test_the_public_names_are_these(module: str) -> None:
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(PUBLIC[module].split())
    for name in found.__all__:
        assert getattr(found, name) is not None, name


def test_no_public_name_has_two_homes() -> None:
    """The same name, met in two rooms, is the same thing."""
    homes: dict[str, dict[int, list[str]]] = {}
    for module in PUBLIC:
        for name in PUBLIC[module].split():
            thing = getattr(importlib.import_module(module), name)
            if not isinstance(thing, ModuleType):  # nestling.scan holds its own scan
                homes.setdefault(name, {}).setdefault(id(thing), []).append(module)
    twice = {name: list(places.values()) for name, places in homes.items() if len(places) > 1}
    assert not twice


def test_no_two_public_classes_of_one_name() -> None:
    """Nor does any class of the package share a public name without being it."""
    public = {}
    for module in PUBLIC:
        for name in PUBLIC[module].split():
            thing = getattr(importlib.import_module(module), name)
            if isinstance(thing, type):
                public.setdefault(name, set()).add(f"{thing.__module__}.{thing.__qualname__}")
    assert {name: where for name, where in public.items() if len(where) > 1} == {}


def test_the_top_level_is_quick_and_complete() -> None:
    code = (
        "import sys, nestling; assert 'transformers' not in sys.modules;"
        "nestling.M3, nestling.scan, nestling.memories, nestling.describe, nestling.Continuum;"
        "assert 'transformers' not in sys.modules; assert 'nestling.paper' not in sys.modules;"
        "nestling.adapt, nestling.load_learner, nestling.models;"
        "assert 'nestling.paper' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    import nestling

    assert isinstance(nestling.optim, ModuleType)
    assert set(nestling.__all__) <= set(dir(nestling))
