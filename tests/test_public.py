"""The public names: what a user may rely on. A change here is a change of the API."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "nestling"

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
        BACKENDS MLPState MatrixAndVelocity any_order mlp_naive scan scan_mlp scan_naive
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


def names(kind: type[ast.AST]) -> dict[str, list[str]]:
    """The module-level names of a kind, but for private ones, with the files that define them."""
    homes: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, kind) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    return homes


def test_a_class_has_one_home() -> None:
    """No two classes of the package share a name, public or not: a word means one thing."""
    assert {n: homes for n, homes in names(ast.ClassDef).items() if len(homes) > 1} == {}


def test_a_public_function_has_one_home() -> None:
    """No other function is called like a public one, but where presets and recipes make models."""
    public = {name for words in PUBLIC.values() for name in words.split()}
    makers = {"models/presets.py", "train/recipe.py"}
    found = {n: set(h) - makers for n, h in names(ast.FunctionDef).items() if n in public}
    assert {n: homes for n, homes in found.items() if len(homes) > 1} == {}


def test_a_name_is_imported_from_where_it_lives() -> None:
    """A module is no second home for what it imports; a package's `__init__` may gather names."""
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nestling."):
                source = SOURCE.parent.joinpath(*node.module.split(".")).with_suffix(".py")
                made = _made_by(source) if source.is_file() else None
                wrong += [
                    f"{path.relative_to(SOURCE)}: {node.module}.{each.name}"
                    for each in node.names
                    if made is not None and each.name not in made
                ]
    assert wrong == []


def _made_by(path: Path) -> set[str]:
    """The names that a module makes itself: what it defines or assigns, at any level."""
    made = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
    return made


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
