"""Make a memory's configuration from plain options, as saved models hold them in JSON.

    configure(SelfModifyingConfig, width=64, heads=2, chunk=32, retention={"tied": True})

Groups are given as mappings; what they leave out is as the configuration has it by default.
Options from before there were groups (`retain_max=0.999`, `negative=True`) are taken too, and mean
what they meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

from nestling.checks import one_of
from nestling.memories.self_modifying import GROUPS, SelfModifyingConfig
from nestling.memories.titans import TitansConfig
from nestling.objectives import Objective, dot, l2

Config = TypeVar("Config")
"""A frozen dataclass with `width` and `heads`."""

OBJECTIVES: dict[str, Objective] = {"dot": dot, "l2": l2}


def _same(value: Any) -> Any:
    return value


def _objective(value: Any) -> Any:
    if isinstance(value, Objective):
        return value
    one_of("objective", value, OBJECTIVES)
    return OBJECTIVES[value]


GroupField = tuple[str, str, Callable[[Any], Any]]
"""A group, its field, and how a plain value becomes the field's."""

GATES: dict[str, GroupField] = {
    "negative": ("rates", "most", lambda on: 2.0 if on else 1.0),
    "rates": ("rates", "start", _same),
    "retain": ("retention", "start", lambda start: (start, start)),
    "retain_max": ("retention", "most", _same),
}

GROUPED = (Mapping, *GROUPS.values())
"""The forms in which a whole group may be given."""

FLAT: dict[type, dict[str, GroupField]] = {
    SelfModifyingConfig: GATES
    | {
        option.name: (group, option.name, _objective if option.name == "objective" else _same)
        for group in ("projections", "learning")
        for option in fields(GROUPS[group])
    },
    TitansConfig: GATES,
}
"""The fields that hold options from before there were groups, by configuration."""

TITANS = {
    "adaptive": (), "own_values": False, "objective": "l2", "erase": False, "residual": False,
    "steering": 0, "adding": 0, "read_start": False, "chunk_others": None,
}  # fmt: skip
"""Options that Titans once took from the self-modifying memory, and the only value they have."""


STEERED = (
    "the self-modifying memory no longer has the option steering (got {value!r}): a memory that a"
    " small one steers is the mixer 'steered'; weights of the earlier form need the release they"
    " were trained with"
)
"""Said of models whose self-modifying memory was steered."""


def option_names(kind: type) -> list[str]:
    """The options of a configuration, beside its sizes."""
    return sorted(f.name for f in fields(kind) if f.name not in ("width", "heads"))


def configure(kind: type[Config], *, width: int, heads: int, **options: Any) -> Config:
    """A memory's configuration from plain options; raises ValueError for what it does not allow."""
    known, flat = option_names(kind), FLAT.get(kind, {})
    given: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if kind is TitansConfig and name in TITANS:
            _only_titans(name, value)
        elif kind is SelfModifyingConfig and name == "steering":
            _not_steered(value)
        elif name in flat and not (name in known and isinstance(value, GROUPED)):
            group, option, make = flat[name]
            _put(groups.setdefault(group, {}), option, make(value), group)
        elif name in known and name in GROUPS:
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"{name} must be a mapping of its options, as in {name}="
                    f"{{{fields(GROUPS[name])[0].name!r}: ...}}; got {value!r}"
                )
            for option, part in value.items():
                if kind is SelfModifyingConfig and option == "steering":
                    _not_steered(part)
                else:
                    _put(groups.setdefault(name, {}), option, part, name)
        elif name in known:
            given[name] = value
        else:
            raise ValueError(f"{kind.__name__} has no option {name}; it has {', '.join(known)}")
    given |= {name: _group(name, parts, kind) for name, parts in groups.items()}
    build: Callable[..., Config] = kind
    return build(width=width, heads=heads, **given)


def _put(group: dict[str, Any], option: str, value: Any, name: str) -> None:
    if option in group:
        raise ValueError(f"{name}.{option} is given twice, in the group and outside of it")
    group[option] = _objective(value) if option == "objective" else value


def _group(name: str, parts: dict[str, Any], kind: type) -> Any:
    """The group of a configuration as it is by default, with what was given on top."""
    own = next(f for f in fields(kind) if f.name == name)
    usual: Any = own.default if own.default_factory is MISSING else own.default_factory()
    known = [f.name for f in fields(usual)]
    if wrong := sorted(set(parts) - set(known)):
        raise ValueError(
            f"{name} has no option {', '.join(wrong)}; it has {', '.join(sorted(known))}"
        )
    return replace(usual, **parts)


def _only_titans(name: str, value: Any) -> None:
    only = TITANS[name]
    same = only is None or value == only or (only == () and not value)
    if not same:
        raise ValueError(
            f"titans has no option {name} (it is {only!r}); with {name}={value!r} it is the mixer"
            " 'self_modifying' with adaptive=[], own_values=False, residual=False, expansion=1"
        )


def _not_steered(value: Any) -> None:
    """Take an option older than `nestling.memories.Steered` at 0, where it had no effect."""
    if value != 0:
        raise ValueError(STEERED.format(value=value))
