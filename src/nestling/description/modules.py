"""The parts of a model that learn in context: our memories, attention, nothing guessed.

A module can also speak for itself: one that has a method `describe_levels(name)` returning
`Component`s is taken at its word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from nestling.continuum.layers import Block, Chain, Parallel
from nestling.description.description import Component, every
from nestling.memories import (
    Attention,
    LinearMemory,
    Memory,
    Omega,
    SelfModifying,
    Steered,
    Titans,
)
from nestling.memories.adaptive import AdaptiveMLP
from nestling.memories.linear import LinearConfig
from nestling.memories.oja import OjaConfig
from nestling.tree import tree_leaves

PAIRS = "keys and values of the sequence"
ATTENDED = "keys and values of what was attended to"
UNKNOWN = "its own; not described"
START = "its start is learned by backpropagation"
WHOLE = "backpropagation through its state"


def in_context(model: nn.Module) -> list[Component]:
    """The components that change while a sequence is read, the same of all layers as one."""
    return collapse(_found(model, ""))


def continuum(model: nn.Module) -> list[str]:
    """Notes on continuum memories that stay as they are while a sequence is read."""
    declared = {
        tuple((level.name, every("token", level.chunk)) for level in module.levels)
        for module in model.modules()
        if isinstance(module, Chain | Parallel)
    }
    return [
        "continuum memory: "
        + ", ".join(f"{name} {pace}" for name, pace in levels)
        + f", as declared; {_learning(model, [name for name, _ in levels])}"
        for levels in sorted(declared)
    ]


def level_weights(model: nn.Module) -> dict[str, tuple[str, str]]:
    """The modules of continuum levels by name: the level's own name, and the pace it declares."""
    return {
        f"{name}.mlps.{number}": (f"{name} level {level.name}", every("token", level.chunk))
        for name, module in model.named_modules()
        if isinstance(module, Chain | Parallel)
        for number, level in enumerate(module.levels)
    }


def _learning(model: nn.Module, names: list[str]) -> str:
    """Which of the levels change within a sequence."""
    config: Any = getattr(model, "config", None)
    learning = [level.name for level in getattr(config, "memory_levels", ()) if level.active]
    if not learning:
        return "within a sequence it is frozen, its weights are listed where they step"
    still = [name for name in names if name not in learning]
    rest = f"; {', '.join(still)} frozen" if still else ""
    first = getattr(config, "first_learning", 0)
    where = f" in the layers from {first} on" if first else ""
    return f"{', '.join(learning)} learn while a sequence is read{where}{rest}"


MIXING = re.compile(r"Attention|Mixer|Mamba|SSM|Recurrent|RWKV|LSTM|GRU|RNN|DeltaNet|Retention")


def unknown_mixers(model: nn.Module) -> list[str]:
    """A note on modules that mix a sequence, by their names, in a way that is not known here."""
    names = sorted(set(_unknown(model)))
    if not names:
        return []
    return [
        f"shown as weights only, as what it does inside a sequence is not known here: "
        f"{', '.join(names)} (a module can say it with describe_levels)"
    ]


def _unknown(module: nn.Module) -> Iterator[str]:
    """The innermost such modules, by class."""
    known = callable(getattr(module, "describe_levels", None)) or _is_causal_attention(module)
    if known or isinstance(module, tuple(kind for kind, _ in KNOWN)):
        return
    inside = [name for child in module.children() for name in _unknown(child)]
    yield from inside
    if (
        not inside
        and MIXING.search(type(module).__name__)
        and next(module.parameters(), None) is not None
    ):
        yield type(module).__name__


def _found(module: nn.Module, name: str) -> Iterator[Component]:
    speaks = getattr(module, "describe_levels", None)
    if callable(speaks):
        yield from speaks(name)
        return
    for kind, describe in KNOWN:
        if isinstance(module, kind):
            yield from describe(module, name or type(module).__name__)
            return
    if _is_causal_attention(module):
        yield _attention(name or type(module).__name__, _window(module))
        return
    parts = [part for child, m in module.named_children() for part in _found(m, _join(name, child))]
    yield from _chained(module, parts, name)


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _chained(module: nn.Module, parts: list[Component], name: str) -> Iterator[Component]:
    """In a block the channel's memory is written from what the mixer answers: it needs it."""
    mixer = tuple(p.name for p in parts if p.name.startswith(_join(name, "mixer")))
    for part in parts:
        in_channel = part.name.startswith(_join(name, "channel")) and isinstance(module, Block)
        yield replace(part, needs=(*part.needs, *mixer)) if in_channel else part


def _attention(name: str, window: int | None) -> Component:
    context = "whole sequence" if window is None else f"last {window} tokens"
    return Component(
        name=f"{name} (cache)",
        kind="non-parametric",
        clock="token",
        state=0,
        objective="Nadaraya-Watson, non-parametric",
        context=f"keys and values, {context}",
        transfer="direct, non-parametric",
    )


def _memory(
    module: Memory,
    name: str,
    field: str,
    objective: str,
    context: str = PAIRS,
    transfer: str = START,
    what: str = "memory",
) -> Component:
    """A component that learns with every token: what stands in a `field` of its state."""
    return Component(
        name=f"{name} ({what})",
        kind="memory",
        clock="token",
        state=_size(module, field),
        objective=objective,
        context=context,
        transfer=transfer,
    )


def _linear(module: Any, name: str) -> Iterator[Component]:
    config: LinearConfig = module.config
    if isinstance(config, OjaConfig):
        objective = "-<M k, v> + |M^T v|^2 / 2"
    else:
        objective = "|M k - v|^2 / 2" if config.erase else "-<M k, v>"
    keeps = {"all": "", "fixed": ", forgets at a fixed pace", "gated": ", gated forgetting"}
    window = f", last {module.config.window} pairs" if isinstance(module, Omega) else ""
    yield _memory(module, name, "weight", objective + keeps[config.retain], PAIRS + window, WHOLE)


def _self_modifying(module: SelfModifying | Titans, name: str) -> Iterator[Component]:
    """The main memory changes with every token; the others are consulted anew every chunk."""
    config, rule, many = module.config, module.rule, len(module.rule.names)
    target = "|M k - v|^2 / 2" if rule.squared else "-<M k, v>"
    values = "values it generates itself" if rule.own_values else "given values"
    how = ", by delta gradient descent" if rule.erase else ""
    if isinstance(module, SelfModifying):
        adding = module.config.learning.heads_adding(config.heads)
        how += f", without erasing in {adding} of {config.heads} heads" if adding else ""
    memory = _memory(module, name, "weights", target + how, f"keys, {values}")
    size = (_size(module, "weights.first") + _size(module, "weights.second")) // many
    memory = replace(memory, state=size, chunk=rule.chunk if rule.read_start else 1)
    if module.theta is not None:
        momentum = _memory(
            module, name, "weights.moved", "-<Z, write>", "the writes of the memories",
            "direct: the memories follow it", "momentum",
        )  # fmt: skip
        yield momentum
        memory = replace(memory, needs=(momentum.name,))
    yield memory
    others = ", ".join(n for n in module.rule.names if n in rule.adaptive)
    if others:
        yield replace(
            memory,
            name=f"{name} ({others})",
            chunk=rule.chunk_others,
            state=size * (many - 1),
            context=f"the same keys, {values}",
        )


def _steered(module: Steered, name: str) -> Iterator[Component]:
    config = module.config
    needs: tuple[str, ...] = ()
    if module.small is not None:
        moved = f"move {', '.join(config.moved)}, and " if config.moved else ""
        how = f"direct: its reads {moved}are read beside the memory"
        small = _memory(module, name, "small", "-<M k, v>", PAIRS, how, "steering")
        needs = (small.name,)
        yield small
    how = ", by delta gradient descent" if config.erase else ""
    yield replace(_memory(module, name, "weight", f"-<M k, v>{how}"), needs=needs)


KNOWN: list[tuple[type, Callable[..., Iterable[Component]]]] = [
    (SelfModifying, _self_modifying),
    (Steered, _steered),
    (Titans, _self_modifying),
    (Attention, lambda m, name: [_attention(name, m.config.window)]),
    (AdaptiveMLP, lambda m, name: [_memory(m, name, "weight", "-<M k, v>", ATTENDED)]),
    (LinearMemory, _linear),
    (Omega, _linear),
    (Memory, lambda m, name: [_memory(m, name, "", UNKNOWN, "the sequence", "", "state")]),
]
"""Modules whose learning in context is known, most special first."""


def _size(module: Memory, field: str) -> int:
    """Numbers in one sequence's state whose name starts with `field`, positions aside."""
    leaves: list[tuple[str, Tensor]] = list(tree_leaves(module.init(1)))
    return sum(
        leaf.numel() for name, leaf in leaves if name.startswith(field) and leaf.is_floating_point()
    )


def _is_causal_attention(module: nn.Module) -> bool:
    """Attention of a decoder in the transformers package: it takes in one token after another.

    Attention that sees its whole input at once (BERT, ViT) keeps nothing from token to token.
    """
    theirs = type(module).__module__.startswith("transformers.")
    named = type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    return theirs and named and getattr(module, "is_causal", None) is True


def _window(module: Any) -> int | None:
    """How many tokens a decoder's attention sees: its own word first, then the configuration's."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    config = getattr(module, "config", None)
    return getattr(config, "sliding_window", None) if not hasattr(config, "layer_types") else None


NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\s|$)")


def collapse(components: Iterable[Component]) -> list[Component]:
    """The same part of several layers as one component: `layers.0-15.mixer`, 16 copies.

    Numbers inside it likewise, as long as nothing but the number differs: `mlp.experts.0-63`.
    """
    before = list(components)
    while len(after := _collapse_once(before)) < len(before):
        before = after
    return after


def _collapse_once(components: list[Component]) -> list[Component]:
    groups: dict[Any, list[Component]] = {}
    for component in components:
        pattern = NUMBER.sub("*", component.name, count=1)
        same = replace(component, name="", needs=(), parameters=0, state=None, copies=1)
        key = (pattern, same)
        groups.setdefault(key, []).append(component)
    names = {c.name: _ranged([m.name for m in group]) for group in groups.values() for c in group}
    return [
        replace(
            group[0],
            name=names[group[0].name],
            copies=sum(c.copies for c in group),
            parameters=sum(c.parameters for c in group),
            state=None if any(c.state is None for c in group) else sum(c.state or 0 for c in group),
            needs=tuple(dict.fromkeys(names.get(n, n) for c in group for n in c.needs)),
        )
        for group in groups.values()
    ]


def _ranged(names: list[str]) -> str:
    """`a.0.b, a.1.b, a.2.b` as `a.0-2.b`."""
    if len(names) == 1:
        return names[0]
    numbers = sorted(int(found.group()) for found in map(NUMBER.search, names) if found)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)
    return NUMBER.sub(text, names[0], count=1)
