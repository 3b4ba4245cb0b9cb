"""The demo's report: what small models whose levels learn did with unseen text, in pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nestling.continuum import MemoryLevel
from nestling.description import Description, Timeline
from nestling.description.draw import picture
from nestling.description.svg import COLOURS
from nestling.report.page import Page
from nestling.report.plots import Line, lines

WHERE = "position in the document (bytes)"


class Trained(NamedTuple):
    """One trained model: its cost, its validation loss, and (step, loss) on the way."""

    name: str
    parameters: int
    tokens: int
    seconds: float
    best: float
    curve: Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class DemoResults:
    """Everything the report shows; points are (x, y) by the reader's or the level's name."""

    result: Sequence[str]  # the outcome in a few sentences
    trained: Sequence[Trained]
    documents: int
    positions: Mapping[str, Sequence[tuple[float, float]]]
    kept: Mapping[
        str, Sequence[tuple[float, float]]
    ]  # nats saved after so many bytes of other text
    passages: Mapping[str, Sequence[tuple[str, float]]]  # words with their losses, by place
    description: Description
    timeline: Timeline
    levels: Mapping[str, MemoryLevel]
    distances: Mapping[str, Sequence[tuple[float, float]]]  # of one document, by position
    worth: Mapping[str, float]  # nats per byte that each level's learning saves
    samples: Mapping[str, str] = field(default_factory=dict)


def demo_page(results: DemoResults) -> Page:
    """Make the page."""
    first, *more = results.result
    page = Page("A model whose levels learn while it reads", first)
    for line in more:
        page.text(line)
    page.text(
        "Two small language models of equal size were trained on the same invented chronicles, both"
        " with levels that learn while they read: Hope, whose layers are steered memories,"
        " and a Transformer with window attention (the recipe hope_attention). Then both met"
        " documents they had never seen."
    )
    _levels(page, results)
    _reading(page, results)
    _forgetting(page, results)
    _surprise(page, results)
    _training(page, results)
    _samples(page, results)
    page.footer(
        "Made by `nestling demo` on this machine, offline. One seed and models of a million"
        " parameters trained for minutes: a demonstration of the machinery, not a result. Studies"
        " with several seeds and confidence intervals are in docs/results."
    )
    return page


def _training(page: Page, results: DemoResults) -> None:
    page.heading("Two models, one diet")
    page.table(
        ["", "parameters", "tokens read", "training time", "validation loss"],
        [
            (t.name, f"{t.parameters:,}", f"{t.tokens:,}", f"{t.seconds:,.0f} s", f"{t.best:.3f}")
            for t in results.trained
        ],
    )
    order = list(results.positions)  # a reader has the same colour in every picture
    trained = sorted(results.trained, key=lambda t: order.index(t.name) if t.name in order else -1)
    drawn = [Line(t.name, *_xy(t.curve)) for t in trained if len(t.curve) > 1]
    if drawn:
        page.figure(
            lines(drawn, x="training step", y="loss (nats per byte)"),
            "Training loss. Both read the same bytes in the same order.",
        )


def _reading(page: Page, results: DemoResults) -> None:
    page.heading("Reading on")
    page.text(
        f"Each of the {results.documents} new documents tells of another valley, with people,"
        " places and words invented for it. The language is familiar; the facts can only be"
        " learned while reading. The same Hope reads them three times: with all levels learning,"
        " with only the fastest one, and with all of them frozen, when only its memories go on. The"
        " Transformer's levels learn, too; its attention sees a window."
    )
    page.figure(
        _curves(results.positions, x=WHERE, y="loss (nats per byte)", log_x=True),
        "Loss against position, mean over the documents. Lower is better; a falling line is"
        " learning from the document itself.",
    )
    ends = {name: points[-1][1] for name, points in results.positions.items() if points}
    if len(ends) > 1:
        best = min(ends, key=lambda name: ends[name])
        rest = ", ".join(f"{name} {loss:.3f}" for name, loss in ends.items())
        page.text(f"At the end of the documents: {rest} nats per byte; {best} reads best here.")


def _surprise(page: Page, results: DemoResults) -> None:
    if not results.passages:
        return
    page.heading("What surprised it")
    page.text(
        "Two passages of one document as the learning Hope read them. The darker a word, the more"
        " it was surprised: at first by every name, later mostly by what is really new."
    )
    for title, words in results.passages.items():
        page.marked(title, words)


def _forgetting(page: Page, results: DemoResults) -> None:
    page.heading("How much is left after reading something else")
    page.text(
        "Each reader reads two thirds of a document, then a stretch of other documents, then the"
        " last third. How much better does it read the last third than a reader that skipped the"
        " first two? Zero means: forgotten. Attention forgets what has left its window; a"
        " memory forgets by being overwritten; a slow level is overwritten last."
    )
    page.figure(
        _curves(results.kept, x="bytes of other text between", y="nats saved per byte", level=0.0),
        "What the first two thirds are still worth. Higher is better.",
    )


def _levels(page: Page, results: DemoResults) -> None:
    page.heading("Levels, each at its own pace")
    page.text(
        "While Hope read the first new document, the weights of its levels changed by gradient"
        " descent on the next byte. A fast level changes often and a little, a slow one seldom."
    )
    page.figure(
        _curves(results.distances, x=WHERE, y="distance from where it began", colours=COLOURS),
        "How far each level has gone from its trained starting point: every step is an update.",
    )
    counts = {name: (len(points) - 2) // 2 for name, points in results.distances.items()}
    far = {name: f"{points[-1][1]:.3f}" for name, points in results.distances.items()}
    page.table(
        [
            "level",
            "changes every",
            "rate",
            "updates",
            "distance at the end",
            "worth, nats per byte",
        ],
        [
            (
                name,
                f"{level.chunk:,} bytes",
                f"{level.rate:g}",
                counts[name],
                far[name],
                f"{results.worth[name]:+z.4f}",
            )
            for name, level in results.levels.items()
        ],
    )
    page.text(
        "What a level is worth is the loss of all documents with its learning switched off, less"
        " the loss with all levels learning. Its surprise at every update:"
    )
    page.figure(
        results.timeline.picture({name: f"distance {end}" for name, end in far.items()}),
        "Timeline of the levels: every update, its surprise, and the path of its weights.",
        wide=True,
    )
    page.text(
        "The same Hope as a nested system: every part that learns, what it learns from, and how"
        " often, the fastest on top."
    )
    caption = "Levels of Hope and its optimizer during training."
    page.figure(picture(results.description), caption, wide=True)


def _samples(page: Page, results: DemoResults) -> None:
    if not results.samples:
        return
    page.heading("What they write")
    page.text("Each continues the same opening. Minutes of training, letter by letter.")
    for name, text in results.samples.items():
        page.text(f"{name}:")
        page.code(text)


def _curves(points: Mapping[str, Sequence[tuple[float, float]]], **axes: Any) -> str:
    """A picture with one line for each name."""
    return lines([Line(name, *_xy(some)) for name, some in points.items()], **axes)


def _xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
