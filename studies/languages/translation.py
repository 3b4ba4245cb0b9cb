"""New languages, one after another (CTNL, Fig. 8): pairs of sentences, and made-up languages.

Real pairs come from files: Kalamang and Indonesian to English from the Kalamang dictionary, Manchu
to English from files the user has. The enciphered languages are an analogue that small models can
learn: a few hundred English sentences whose words are replaced by invented ones, in an order of
the language's own. They say how methods forget, not how well anyone translates.
"""

from __future__ import annotations

import csv
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Language", "chrf", "cipher", "indonesian", "kalamang", "manchu", "word_tokenizer"]

_HELD_OUT = 50  # dictionary pairs that only tuning sees


@dataclass(frozen=True, kw_only=True)
class Language:
    """Pairs (sentence, English) to learn from and to be tested on."""

    name: str
    train: tuple[tuple[str, str], ...]
    test: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if not self.train or not self.test:
            raise ValueError(f"{self.name}: needs training and test pairs")
        if seen := {s for s, _ in self.train} & {s for s, _ in self.test}:
            raise ValueError(f"{self.name}: test sentences among the training ones: {min(seen)!r}")


def chrf(guesses: list[str], references: list[str]) -> float:
    """Corpus chrF (character n-grams to 6, beta 2), 0 to 100, by sacrebleu."""
    try:
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise ValueError("chrF needs sacrebleu: pip install 'nestling[studies]'") from error
    if len(guesses) != len(references):
        raise ValueError(f"{len(guesses)} translations for {len(references)} references")
    return float(CHRF().corpus_score(guesses, [references]).score)


def _dictionary(data: Path, column: str, seed: int, train: int, test: int, valid: bool) -> Language:
    path = data / "kalamang" / "parallel_dictionary_examples.tsv"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; --data names the folder of the data sets")
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    pairs: dict[str, str] = {}
    for row in rows:
        if row[column] and row["english"]:
            pairs.setdefault(row[column].strip(), row["english"].strip())
    chosen = list(pairs.items())
    random.Random(0).shuffle(chosen)
    tuning, chosen = chosen[:_HELD_OUT], chosen[_HELD_OUT:]
    random.Random(seed).shuffle(chosen)
    test = min(test, len(chosen) // 2)
    asked = tuning[:test] if valid else chosen[:test]
    return Language(name=column, train=tuple(chosen[test : test + train]), test=tuple(asked))


def kalamang(
    data: Path, *, seed: int = 0, train: int = 400, test: int = 50, valid: bool = False
) -> Language:
    """Kalamang to English: example sentences of the Kalamang dictionary.

    With `valid` the test pairs are held-out ones that no other choice of pairs contains.
    """
    return _dictionary(data, "kalamang", seed, train, test, valid)


def indonesian(
    data: Path, *, seed: int = 1, train: int = 400, test: int = 50, valid: bool = False
) -> Language:
    """Indonesian to English, from the same dictionary: a second real language."""
    return _dictionary(data, "indonesian", seed, train, test, valid)


def manchu(folder: Path) -> Language:
    """Manchu to English: `train.tsv` and `test.tsv` in a folder, columns `manchu` and `english`."""
    splits = {}
    for split in ("train", "test"):
        path = folder / f"{split}.tsv"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: the Manchu set needs train.tsv and test.tsv")
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t")
            if not {"manchu", "english"} <= set(reader.fieldnames or ()):
                raise ValueError(f"{path}: needs the columns manchu and english")
            splits[split] = tuple((r["manchu"].strip(), r["english"].strip()) for r in reader)
    return Language(name="manchu", **splits)


_PARTS = {
    "who": "the cat,the dog,a girl,a boy,the king,my friend,the farmer,a bird".split(","),
    "does": "sees,likes,finds,wants,brings,hides,eats,draws".split(","),
    "what": "an apple,the ball,a book,the red hat,some bread,the key,a stone,the fish".split(","),
    "where": "at home,in the park,by the river,near the tree,on the hill,at night".split(","),
}
_SYLLABLES = "ba ce di fo gu ha ki le mo nu pa re si to vu wa xi yo zu".split()


def cipher(name: str, seed: int, *, train: int = 600, test: int = 60) -> Language:
    """An invented language: English sentences with every word replaced, and its own word order.

    The lexicon (two syllables for each word) and the order of the four parts of a sentence
    are drawn from the seed.
    """
    draw = random.Random(seed)
    words = _english()
    lexicon = dict(zip(words, draw.sample(_forms(), len(words)), strict=True))
    order = list(range(4))
    while order == [0, 1, 2, 3]:
        draw.shuffle(order)
    everything = list(itertools.product(*_PARTS.values()))
    draw.shuffle(everything)
    pairs = []
    for parts in everything[: train + test]:
        coded = [" ".join(lexicon[w] for w in parts[i].split()) for i in order]
        pairs.append((" ".join(coded), " ".join(parts)))
    return Language(name=name, train=tuple(pairs[test:]), test=tuple(pairs[:test]))


def _english() -> list[str]:
    return sorted({word for part in _PARTS.values() for phrase in part for word in phrase.split()})


def _forms() -> list[str]:
    return ["".join(pair) for pair in itertools.product(_SYLLABLES, repeat=2)]


def word_tokenizer() -> Any:
    """A Hugging Face tokenizer whose tokens are the words of all invented languages and English."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "\n", "=", *_english(), *_forms()]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    cut = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence(cut)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
