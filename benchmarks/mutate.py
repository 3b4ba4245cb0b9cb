"""Is every equation verified, or only called? Break its symbol on purpose and see a test fail.

    python benchmarks/mutate.py                  # every equation, until one wrong version is caught
    python benchmarks/mutate.py 57 88            # these equations
    python benchmarks/mutate.py --all            # every wrong version of every equation's symbols
    python benchmarks/mutate.py --sample 4       # four equations drawn by --seed, as the tests do

A wrong version changes one thing in a function that cites the equation: a sign, a term left out, a
number off by one, operands exchanged, a transpose forgotten, a function not applied, a switch the
other way. The tests marked with the equation run
on it, each time in a process forked from one that has imported everything; what they do not run is
not changed. A wrong version is
caught when an assertion fails; one that raises, dies or does not end has crashed, which shows only
that the symbol was called. Printed: per equation what was tried, and how many were caught in all.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import io
import os
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 90  # of processor time: a wrong version that takes more counts as crashed
CAUGHT, CRASHED, SURVIVED, UNTOUCHED = "caught", "crashed", "survived", "not reached"


class Mutant(NamedTuple):
    """One wrong version of a file: what was changed where, and the changed syntax tree."""

    symbol: str
    line: int
    what: str
    path: Path
    tree: ast.Module
    rank: int  # tried in this order: from NOT_ARITHMETIC on, what is called is changed, no number


NOT_ARITHMETIC = 4
CHECKS = ("require", "one_of", "whole_number")  # of `nestling.checks`: they compute nothing


def wrong_versions(symbol) -> list[Mutant]:
    """All mutants of the code of one symbol of the registry, signs and terms first."""
    tree = ast.parse(symbol.path.read_text(encoding="utf-8"))
    inside = [n for n in _code(tree) if symbol.first <= getattr(n, "lineno", 0) <= symbol.last]
    arguments = [node for node in ast.walk(tree) if isinstance(node, ast.arg)]
    switches = {a.arg for a in arguments if getattr(a.annotation, "id", None) == "bool"}
    made: list[Mutant] = []
    for node in inside:
        for rank, what, new in _changes(node, switches):
            other = copy.deepcopy(tree, {id(node): _placed(new, node)})
            made.append(Mutant(symbol.name, node.lineno, what, symbol.path, other, rank))
    random.Random(symbol.name).shuffle(made)
    return sorted(made, key=lambda mutant: mutant.rank)


def _placed(new: ast.AST, old: ast.AST) -> ast.AST:
    return ast.fix_missing_locations(ast.copy_location(new, old))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that compute something: no annotations, docstrings, messages or checks."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "exc", "msg", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Raise):
                continue
            if isinstance(child, ast.If) and all(isinstance(s, ast.Raise) for s in child.body):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.Call) and getattr(child.func, "id", None) in CHECKS:
                continue
            yield from _code(child)


def _changes(node: ast.AST, switches: set[str]) -> Iterator[tuple[int, str, ast.AST]]:
    """The mistakes one node can have: rank (0 first), words, and the wrong node.

    switches: arguments that are True or False.
    """
    if isinstance(node, ast.BinOp):
        text = ast.unparse(node)
        signs: dict[type, ast.operator] = {ast.Add: ast.Sub(), ast.Sub: ast.Add()}
        if type(node.op) in signs:
            flipped = ast.BinOp(node.left, signs[type(node.op)], node.right)
            yield 0, f"sign of {text}", flipped
            yield 1, f"only {ast.unparse(node.left)} of {text}", node.left
        elif isinstance(node.op, ast.Mult):
            yield 1, f"only {ast.unparse(node.right)} of {text}", node.right
            yield 1, f"only {ast.unparse(node.left)} of {text}", node.left
        elif isinstance(node.op, ast.MatMult):
            yield 2, f"exchanged {text}", ast.BinOp(node.right, node.op, node.left)
            yield 2, f"twice {text}", ast.BinOp(ast.Constant(2), ast.Mult(), node)
        elif isinstance(node.op, ast.Div):
            yield 1, f"only {ast.unparse(node.left)} of {text}", node.left
        elif isinstance(node.op, ast.FloorDiv | ast.Mod | ast.Pow):
            yield 1, f"one more in {text}", ast.BinOp(node, ast.Add(), ast.Constant(1))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield 0, f"sign of {ast.unparse(node)}", node.operand
    elif isinstance(node, ast.Attribute) and node.attr == "mT" and isinstance(node.ctx, ast.Load):
        yield 3, f"not transposed: {ast.unparse(node)}", node.value
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
        other = ast.NotEq() if isinstance(node.ops[0], ast.Eq) else ast.Eq()
        yield 2, f"not {ast.unparse(node)}", ast.Compare(node.left, [other], node.comparators)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield 3, f"{node.value} + 1", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call):
        yield from _wrong_calls(node, switches)


def _wrong_calls(node: ast.Call, switches: set[str]) -> Iterator[tuple[int, str, ast.AST]]:
    text, name = ast.unparse(node), ast.unparse(node.func).rpartition(".")[2]
    if name in TWO_FIRST and len(node.args) > 1:
        first, second, *rest = node.args
        wrong = ast.Call(node.func, [second, first, *rest], node.keywords)
        yield 2, f"arguments exchanged in {text}", wrong
    if name in TWO_LAST and len(node.args) > 2:
        *first, second, third = node.args
        wrong = ast.Call(node.func, [*first, third, second], node.keywords)
        yield 2, f"last arguments exchanged in {text}", wrong
    if node.args and not isinstance(node.args[0], ast.Starred) and name not in ITERATES:
        yield NOT_ARITHMETIC, f"only {ast.unparse(node.args[0])} of {text}", node.args[0]
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None and getattr(keyword.value, "id", None) in switches:
            other = ast.keyword(keyword.arg, ast.UnaryOp(ast.Not(), keyword.value))
            words = [*node.keywords[:place], other, *node.keywords[place + 1 :]]
            wrong = ast.Call(node.func, node.args, words)
            yield NOT_ARITHMETIC, f"not {keyword.arg} in {text}", wrong


TWO_FIRST = ("accumulate", "add", "addcmul", "lerp", "gd", "apply", "proximity", "loss", "gradient")
"""Functions whose first two arguments are not the same thing."""

TWO_LAST = ("loss", "gradient", "surprise")
"""Functions whose last two arguments are a key and a value."""

ITERATES = ("zip", "enumerate", "isinstance", "len", "range", "reversed", "list", "tuple")
"""Calls that are no mathematics: left out, they would only crash."""


LIVE: list[FunctionType] = []
"""The package's functions, as they were before the first fork."""


def put_in(mutant: Mutant) -> bool:
    """Give every live function of the file the mutant's code; False if none changed."""
    path = str(mutant.path)
    new: dict[tuple[str, int], CodeType] = {}

    def walk(code: CodeType) -> None:
        new[code.co_qualname, code.co_firstlineno] = code
        for part in code.co_consts:
            if isinstance(part, CodeType):
                walk(part)

    walk(compile(mutant.tree, path, "exec"))
    changed = False
    for function in LIVE:
        old = function.__code__
        code = new.get((old.co_qualname, old.co_firstlineno)) if old.co_filename == path else None
        if code is not None and code != old and code.co_freevars == old.co_freevars:
            function.__code__ = code
            changed = True
    return changed


def outcome(mutant: Mutant | None, tests: Sequence[str]) -> str:
    """The tests' verdict on a mutant (None: on the code as it is), in a process of its own."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        gc.disable()
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            code = _run(mutant, tests)
        os._exit(code)
    _, status = os.waitpid(child, 0)
    code = -1 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return {0: SURVIVED, 1: CAUGHT, 99: UNTOUCHED}.get(code, CRASHED)


def lines_run(tests: Sequence[str]) -> set[tuple[str, int]]:
    """File and line of all code of the package that the tests call."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        seen: set[CodeType] = set()

        put = sys.setprofile

        def watch(also: Any) -> None:
            def profile(frame: FrameType, event: str, argument: object) -> None:
                if event == "call":
                    seen.add(frame.f_code)
                if also is not None:
                    also(frame, event, argument)

            put(profile)

        sys.setprofile = watch  # tests/conftest.py puts a profile of its own around each test
        watch(None)
        with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
            _run(None, tests)
        put(None)
        inside = [code for code in seen if code.co_filename.startswith(str(ROOT / "src"))]
        lines = {(c.co_filename, line) for c in inside for *_, line in c.co_lines() if line}
        with os.fdopen(write, "w") as told:
            told.writelines(f"{file}\t{line}\n" for file, line in lines)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        pairs = [line.rstrip("\n").split("\t") for line in told]
    os.waitpid(child, 0)
    return {(file, int(line)) for file, line in pairs}


class Failures:
    """A plugin of pytest that remembers whether a test failed by anything but an assertion."""

    crashed = False

    def pytest_runtest_makereport(self, item, call) -> None:
        """Look at the exception a test raised."""
        import pytest

        wrong = (AssertionError, pytest.fail.Exception)
        if call.excinfo is not None and not issubclass(call.excinfo.type, wrong):
            self.crashed = True


def _run(mutant: Mutant | None, tests: Sequence[str]) -> int:
    import pytest

    if mutant is not None and not put_in(mutant):
        return 99
    options = [
        "-x",
        "-q",
        "--no-header",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
    ]
    failures = Failures()
    code = int(pytest.main([*options, *tests], plugins=[failures]))
    return 98 if failures.crashed else code


class Verdict(NamedTuple):
    """One equation: how many wrong versions were tried and caught, and the first that was."""

    number: int
    tried: int
    caught: int
    example: str
    missed: list[str]  # those that survived or crashed


def examine(entry, *, every: bool, most: int = 40) -> Verdict:
    """Try wrong versions of an equation's symbols, all or until one is caught."""
    everything = [test.name for test in entry.tests]
    tests = [name for name in everything if name.startswith("tests/equations/")] or everything
    ran = lines_run(tests)
    tried, caught, example = 0, 0, ""
    missed: list[str] = []
    queues = [
        [m for m in wrong_versions(symbol) if (str(m.path), m.line) in ran]
        for symbol in sorted(entry.symbols, key=_plainness)
    ]
    turns = [m for turn in range(most) for q in queues for m in q[turn : turn + 1]]
    turns.sort(key=lambda mutant: mutant.rank >= NOT_ARITHMETIC)
    for mutant in turns if every else turns[:most]:
        found = outcome(mutant, tests)
        if found == UNTOUCHED:
            continue
        tried += 1
        words = f"{mutant.symbol}:{mutant.line} {mutant.what}"
        if found == CAUGHT:
            caught += 1
            example = example or words
            if not every:
                break
        else:
            missed.append(f"{found}: {words}")
    return Verdict(entry.equation.number, tried, caught, example, missed)


def _plainness(symbol) -> int:
    """The plain functions of an equation come before the layers and optimizers that use them."""
    places = (".paper.exhibits.", ".levels.", ".objectives.", ".rules.", "naive", ".paper.")
    return next((rank for rank, place in enumerate(places) if place in symbol.name), len(places))


def prepare(numbers: Sequence[int] = (), sample: int = 0, seed: int = 0) -> list:
    """The equations asked for (default all), with everything their tests need imported once."""
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import pytest
    import torch

    from nestling.paper.registry import index

    torch.set_num_threads(1)
    entries = [e for e in index() if not numbers or e.equation.number in numbers]
    if unknown := set(numbers) - {entry.equation.number for entry in entries}:
        raise SystemExit(f"no such equations: {sorted(unknown)}")
    if sample:
        entries = random.Random(seed).sample(entries, min(sample, len(entries)))
    files = sorted({test.name.partition("::")[0] for entry in entries for test in entry.tests})
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *files])
    source = str(ROOT / "src")
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(source):
            LIVE.append(thing)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    return entries


def main() -> int:
    """Examine the equations asked for; 0 if each has a wrong version that was caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("equations", nargs="*", type=int, help="numbers; default all")
    parser.add_argument("--all", action="store_true", help="try every wrong version")
    parser.add_argument("--show", action="store_true", help="name those that were not caught")
    parser.add_argument("--sample", type=int, default=0, help="only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="of processor time: then no new one"
    )
    arguments = parser.parse_args()
    verdicts = []
    start = time.perf_counter()
    for entry in prepare(arguments.equations, arguments.sample, arguments.seed):
        if verdicts and sum(os.times()[:4]) > arguments.seconds:
            break
        verdict = examine(entry, every=arguments.all)
        verdicts.append(verdict)
        print(
            f"Eq. {verdict.number:>3}: {verdict.caught} of {verdict.tried} caught "
            f" {verdict.example[:90]}",
            flush=True,
        )
        for words in verdict.missed if arguments.show else ():
            print(f"          {words}")
    verified = [v.number for v in verdicts if v.caught]
    caught, tried = sum(v.caught for v in verdicts), sum(v.tried for v in verdicts)
    missing = [v.number for v in verdicts if not v.caught]
    print(
        f"{len(verified)} of {len(verdicts)} equations verified; {caught} of {tried} wrong versions"
        f" caught in {time.perf_counter() - start:.0f} s"
    )
    if missing:
        print(f"not verified: {missing}")
    return 0 if not missing else 1


if __name__ == "__main__":
    sys.exit(main())
