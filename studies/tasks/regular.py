"""The regular tasks of length generalisation (Deletang et al. 2023): a string, then its answer.

Trained on lengths 1 to 40, tested on 41 to 100. The answer is asked at a last token of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from studies.tasks.formal import IGNORE, Language, Sample

__all__ = ["LONG", "REGULAR", "SHORT"]

SHORT, LONG = (1, 40), (41, 100)
"""Lengths of training and of the test."""
Rng = np.random.Generator


def _asked(symbols: int, draw: Callable[[Rng, int], list[int]], answer: Callable) -> Callable:
    """A string of a uniform length, then the question (the token `symbols`) and its answer."""

    def sample(rng: Rng, low: int, high: int) -> Sample:
        tokens = draw(rng, int(rng.integers(low, high + 1)))
        return [*tokens, symbols], [IGNORE] * len(tokens) + [int(answer(tokens))]

    return sample


def _uniform(symbols: int) -> Callable[[Rng, int], list[int]]:
    return lambda rng, length: rng.integers(symbols, size=length).tolist()


def _expression(rng: Rng, length: int) -> list[int]:
    """Digits 0 to 4 with +, - or * (5 to 7) between them; an odd length."""
    count = (length + 1) // 2
    digits = rng.integers(5, size=count).tolist()
    signs = rng.integers(5, 8, size=count - 1).tolist()
    return [t for pair in zip(digits, [*signs, None], strict=True) for t in pair if t is not None]


def _value(tokens: list[int]) -> int:
    """The expression modulo 5; products first."""
    total, sign, product = 0, 1, tokens[0]
    for mark, digit in zip(tokens[1::2], tokens[2::2], strict=True):
        if mark == 7:
            product = product * digit % 5
        else:
            total, sign, product = total + sign * product, 1 if mark == 5 else -1, digit
    return (total + sign * product) % 5


REGULAR: dict[str, Language] = {
    language.name: language
    for language in (
        Language(
            name="parity check",
            symbols=3,
            classes=2,
            draw=_asked(2, _uniform(2), lambda tokens: sum(tokens) % 2),
        ),
        Language(
            name="even pairs",
            symbols=3,
            classes=2,
            draw=_asked(2, _uniform(2), lambda tokens: tokens[0] == tokens[-1]),
        ),
        Language(
            name="cycle navigation",
            symbols=4,
            classes=5,
            draw=_asked(3, _uniform(3), lambda t: (t.count(1) - t.count(2)) % 5),
        ),
        Language(
            name="modular arithmetic",
            symbols=9,
            classes=5,
            draw=_asked(8, _expression, _value),
        ),
    )
}
"""The four regular tasks."""
