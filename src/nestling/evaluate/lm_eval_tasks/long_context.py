"""The long-context suites as tasks of lm-eval: `lm_eval --include_path ... --tasks nestling_ruler`.

lm-eval calls these with the model's arguments and with `--metadata`: `max_seq_lengths` (numbers of
tokens), `data` (a folder as `nestling eval --data` takes), `samples` per length.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nestling.evaluate.samples import Sample, Tokens
from nestling.evaluate.suites import SUITES, Sources, samples


def _tokenizer(given: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    name = next(
        (given[key] for key in ("tokenizer", "pretrained", "model") if given.get(key)), None
    )
    if name is None:
        raise ValueError("a tokenizer is needed to size the texts: --model_args pretrained=...")
    if not isinstance(name, str):
        return name
    trusted = given.get("trust_remote_code") is True  # as lm-eval was told
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trusted)


def documents(suite: str, task: str, **given: Any) -> dict[str, Any]:
    """The samples of a task as a data set with the split `test`."""
    import datasets

    if not given.get("data"):
        raise ValueError("these tasks need texts: --metadata '{\"data\": FOLDER}'")
    data = Sources.load(given["data"])
    tokens = Tokens(_tokenizer(given))
    count = int(given.get("samples", 100))
    rows = [
        {
            "suite": suite,
            "task": task,
            "input": "".join([*sample.pieces(), sample.question]),
            "prefix": sample.prefix.strip(),
            "question": sample.question,
            "answers": list(sample.answers),
            "labels": list(sample.labels),
            "length": length,
        }
        for length in given.get("max_seq_lengths", [4096])
        for sample in samples(suite, task, length, data=data, count=count, tokens=tokens)
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def score(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
    """The score of one output, over all lengths and at its own."""
    sample = Sample(
        task=doc["task"],
        length=doc["length"],
        pieces=lambda: iter(()),
        question=doc["question"],
        prefix="",
        answers=tuple(doc["answers"]),
        labels=tuple(doc["labels"]),
    )
    return {"score": SUITES[doc["suite"]].score(sample, results[0])}


for _suite, _entry in SUITES.items():
    for _task in _entry.tasks:
        globals()[f"{_suite}_{_task}"] = partial(documents, _suite, _task)
