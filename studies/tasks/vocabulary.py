"""The tokens of the long-context studies: 2,048 byte pairs, fitted once and kept beside this file.

    vocabulary = load()
    vocabulary(" Mary went to the office.").input_ids

Numbers are read digit by digit. A piece of text that begins with a space or a line end has the same
tokens alone as in its text, so that long texts can be cut into pieces. `fit` made the file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nestling.evaluate import babilong, ruler
from nestling.evaluate.samples import Books, Words

__all__ = ["END", "HELD_OUT", "SIZE", "Vocabulary", "fit", "load", "shelf"]

SIZE = 2048
PAD, END = 0, 2
FILE = Path(__file__).with_name("vocabulary.json")
HELD_OUT = (
    "dracula",
    "emma",
    "great_expectations",
    "the_picture_of_dorian_gray",
    "the_war_of_the_worlds",
    "treasure_island",
)
"""Books that neither the tokens nor any model of the long-context studies are made from."""


class Found(NamedTuple):
    """Tokens as Hugging Face's tokenizers give them."""

    input_ids: list[int]


class Vocabulary:
    """As much of a Hugging Face tokenizer as `nestling.evaluate` needs; knows sentences again.

    A background comes back to the same sentences: their tokens are kept, `most` texts of them.
    """

    pad_token_id, eos_token_id = PAD, END

    def __init__(self, backend: Tokenizer, most: int = 400_000) -> None:
        self.backend, self.most = backend, most
        self.known: dict[str, Found] = {}

    def __call__(self, text: str, **_: object) -> Found:
        found = self.known.get(text)
        if found is None:
            found = Found(self.backend.encode(text, add_special_tokens=False).ids)
            if len(self.known) < self.most:
                self.known[text] = found
        return found

    def decode(self, ids: list[int]) -> str:
        return str(self.backend.decode(ids, skip_special_tokens=True))


@cache
def load() -> Vocabulary:
    """The tokens of all long-context studies."""
    return Vocabulary(Tokenizer.from_file(str(FILE)))


def shelf(data: Path, *, held_out: bool) -> list[Path]:
    """The books that are held out, or the others."""
    books = sorted((data / "gutenberg_books").glob("*.txt.gz"))
    if not books:
        raise FileNotFoundError(f"{data / 'gutenberg_books'}: no books there; see --data")
    return [path for path in books if (path.name.split(".")[0] in HELD_OUT) == held_out]


def fit(data: Path) -> Tokenizer:
    """The byte pairs of books, of bAbI's training stories and of made-up needles."""
    books = Books(tuple(shelf(data, held_out=False)))
    texts = [books.text(number) for number in range(len(books.sources))]
    for task in babilong.TASKS:
        told = babilong.stories(data / "babi", task, "train")
        texts += [" ".join((*story.facts, story.question, story.answer)) for story in told]
    words, short = Words.load(data / "ruler_words"), Books((lambda: "It was so. " * 50,))
    for seed in range(300):
        for task in ruler.NEEDLES:
            made = ruler.sample(task, 1500, 9_000_000 + seed, words=words, books=short)
            texts.append(made.text())
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend
