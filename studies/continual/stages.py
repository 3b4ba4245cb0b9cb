"""What the whole study runs, in this order: bases, streams, readouts, slices, methods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from studies.continual.methods import METHODS

__all__ = ["STREAMS", "Stage", "default_methods", "stages"]

STREAMS = ("clinc150", "banking77", "dbpedia70", "dbpedia14")
CORE = ("sequential", "ewc", "replay", "cms-1", "cms-4", "ncm", "lda", "joint")
READING = ("sequential", "ewc", "cms-1", "cms-4", "joint", "adapt-1", "adapt-3", "icl")
"""Methods that can answer with label texts."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One base model on one stream; `per_class` takes a slice of the data.

    `tuned`: base and stream whose settings are used for every method, instead of trials of its own.
    """

    base: str
    stream: str
    methods: tuple[str, ...]
    readout: str = "head"
    per_class: int | None = None
    tuned: tuple[str, str] | None = None


def default_methods(readout: str) -> tuple[str, ...]:
    """The methods that make sense with a readout: `adapt` reads and answers with label texts."""
    if readout == "label":
        return READING
    return tuple(name for name, arm in METHODS.items() if arm.group != "adapt")


def stages(pretrained: str | None = None) -> Iterator[Stage]:
    """The whole study; a pretrained model, if there is one, on slices.

    Settings are chosen with the small Transformer on each stream; other base models use them, and
    DBpedia-14 uses those of DBpedia-70, for every method alike.
    """
    small, three = "transformer", STREAMS[:3]
    for stream in three:
        yield Stage(base=small, stream=stream, methods=default_methods("head"))
    for stream in three:
        yield Stage(base="hope", stream=stream, methods=CORE, tuned=(small, stream))
    yield Stage(base=small, stream="dbpedia14", methods=CORE, tuned=(small, "dbpedia70"))
    yield Stage(base=small, stream="banking77", methods=READING[:5], readout="label")
    yield Stage(base=small, stream="banking77", methods=READING, readout="label", per_class=10)
    if pretrained is not None:
        for stream, count in zip(three, (20, 20, 10), strict=True):
            yield Stage(
                base=pretrained,
                stream=stream,
                methods=CORE,
                per_class=count,
                tuned=(small, stream),
            )
