"""`nestling eval`."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any

from nestling.checks import one_of
from nestling.cli import Parser
from nestling.cli.options import MODEL, folder, load, new_file, quiet, trust_option, whole

_EXAMPLES = """examples:
  nestling eval runs/tiny/model book.txt
  nestling eval runs/tiny/model book.txt --bins 12 --out loss.json
  nestling eval runs/tiny/model book.txt --memory mine            (after `nestling learn`)
  nestling eval runs/tiny/model diary.txt --memory mine --facts   (names, dates, numbers: recalled?)
  nestling eval runs/tiny/model --tasks wikitext,lambada_openai       (needs nestling[eval])
  nestling eval runs/tiny/model --tasks mine --include my_tasks --limit 200
  nestling eval runs/tiny/model --suite ruler --lengths 1k,4k,16k --limit 20
  nestling eval runs/tiny/model --suite babilong --tasks qa1,qa2 --lengths 4k,1M --data DATA

A file is read as one stream, in constant memory for models whose memory has a fixed size, so the
loss at position 100,000 is the loss of a model that has read all of it."""


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        "eval",
        description="Perplexity on a file and loss against position, or tasks of lm-eval.",
        epilog=_EXAMPLES,
    )
    made.add_argument("model", help=MODEL)
    made.add_argument("file", nargs="?", type=Path, help="text to read")
    made.add_argument("--memory", type=folder, help="folder of a memory made by `nestling learn`")
    made.add_argument("--facts", action="store_true", help="ask for the file's names and numbers")
    made.add_argument(
        "--bins", type=whole(), default=8, help="positions are shown in this many bins"
    )
    made.add_argument("--tokens", type=whole(2), help="read at most this many tokens")
    made.add_argument("--tasks", help="lm-eval tasks, or tasks of the suite, separated by commas")
    made.add_argument("--suite", help="long texts: ruler, babilong, qasper, longhealth")
    made.add_argument("--lengths", default="1k,4k", help="of the suite, in tokens: 1k,4k,16k,1M")
    made.add_argument(
        "--data",
        type=Path,
        help="folder with ruler_words, gutenberg_books, babi, qasper_leval; without it the suite"
        " takes words of its own and the built-in corpus",
    )
    made.add_argument("--include", type=Path, help="folder with task files (YAML) of your own")
    made.add_argument("--limit", type=whole(), help="examples per task")
    made.add_argument("--out", type=new_file(), help="write the figures as JSON")
    trust_option(made)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Print what was measured."""
    if arguments.memory is not None and arguments.suite:
        raise ValueError("--memory goes with a file or --tasks, not with --suite")
    if (arguments.file is None) == (arguments.tasks is None and arguments.suite is None):
        raise ValueError("give a file to read, or --tasks, or --suite")
    if arguments.facts and arguments.file is None:
        raise ValueError("--facts asks about a file; give one")
    if arguments.tasks is not None and not all(arguments.tasks.split(",")):
        raise ValueError(f"--tasks names tasks, separated by commas; got {arguments.tasks!r}")
    if arguments.include is not None and not arguments.include.is_dir():
        raise ValueError(f"--include: {arguments.include} is not a folder")
    if arguments.suite:
        found = _suite(arguments)
    else:
        found = _tasks(arguments) if arguments.tasks else _file(arguments)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _file(arguments: argparse.Namespace) -> dict[str, object]:
    from nestling.evaluate.lm import loss_by_position
    from nestling.train.corpus import read_text

    text = read_text(arguments.file)
    model, tokenizer = load(arguments)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    reader = model if arguments.memory is None else _with_memory(arguments.memory, model, tokenizer)
    result = loss_by_position(reader, ids[: arguments.tokens], bins=arguments.bins)
    if not math.isfinite(result.loss):
        raise ValueError(f"{arguments.model}: its loss on {arguments.file} is {result.loss}")
    print(f"{result.tokens} tokens, loss {result.loss:.4f}, perplexity {result.perplexity:.2f}")
    for start, stop, loss in result.bins:
        print(f"  positions {start:>7}-{stop:<7} loss {loss:.4f}")
    found: dict[str, object] = result._asdict()
    if reader is not model:
        plain = loss_by_position(model, ids[: arguments.tokens], bins=1)
        print(f"without the memory: loss {plain.loss:.4f}, perplexity {plain.perplexity:.2f}")
        found["without_memory"] = plain.loss
    if arguments.facts:
        found["facts"] = _facts(text, reader, model, tokenizer, arguments.limit)
    return found


def _facts(text: str, reader: Any, model: Any, tokenizer: Any, most: int | None) -> dict[str, Any]:
    """Questions about the text's names, places, dates and numbers, with and without a memory."""
    from nestling.evaluate.facts import likelihoods, make_questions, recall

    questions = make_questions(text, most=most or 50)
    if not questions:
        raise ValueError("--facts: the file has no names, dates or numbers to ask for")
    found = recall(questions, likelihoods(reader, tokenizer))
    print(f"facts: {found.right} of {found.asked} recalled, a guess gives {found.asked / 4:.0f}")
    if reader is model:
        return found._asdict()
    plain = recall(questions, likelihoods(model, tokenizer))
    print(f"without the memory: {plain.right} of {plain.asked}")
    return {**found._asdict(), "without_memory": plain.right}


def _with_memory(memory: Path, model: Any, tokenizer: Any) -> Any:
    from nestling import load_learner

    return load_learner(model, memory, tokenizer=tokenizer)


def _suite(arguments: argparse.Namespace) -> dict[str, object]:
    from nestling.evaluate.samples import PLAIN_WORDS, Books, parse_lengths
    from nestling.evaluate.suites import SUITES, Sources, evaluate
    from nestling.train.builtin_text import chronicles

    one_of("--suite", arguments.suite, SUITES)
    lengths = parse_lengths(arguments.lengths)
    if arguments.data is None:
        data = Sources(words=PLAIN_WORDS, books=Books((lambda: " ".join(chronicles(100)),)))
    else:
        data = Sources.load(arguments.data)
    model, tokenizer = load(arguments)
    found: dict[str, object] = {}
    for result in evaluate(
        model,
        tokenizer,
        arguments.suite,
        lengths,
        data=data,
        tasks=arguments.tasks.split(",") if arguments.tasks else None,
        count=arguments.limit or 100,
    ):
        name = f"{result.task} at {result.length}"
        print(f"{arguments.suite}  {name} tokens  {result.score:.1f}%  ({result.samples} samples)")
        found[name] = result._asdict()
    return found


def _tasks(arguments: argparse.Namespace) -> dict[str, object]:
    with quiet():  # the harness logs, draws bars, and asks git about a folder of its own
        try:
            import lm_eval
            from lm_eval.models.huggingface import HFLM
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ValueError("--tasks needs lm-eval: pip install 'nestling[eval]'") from error
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        known = TaskManager(include_path=arguments.include and str(arguments.include))

    wanted = [task.strip() for task in arguments.tasks.split(",")]
    unknown = [task for task in wanted if task not in known.all_tasks]
    if unknown:
        raise ValueError(f"--tasks: lm-eval has no task {unknown[0]!r} (`lm-eval ls tasks` lists)")
    model, tokenizer = load(arguments)
    memory = arguments.memory and _with_memory(arguments.memory, model, tokenizer)
    with quiet(), memory.reading() if memory else contextlib.nullcontext():
        results = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer),
            tasks=wanted,
            task_manager=known,
            limit=arguments.limit,
        )["results"]
    for task, figures in results.items():
        for name, value in figures.items():
            if isinstance(value, float):
                print(f"{task}  {name}  {value:.4f}")
    return dict(results)
