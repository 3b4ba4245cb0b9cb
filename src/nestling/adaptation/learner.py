"""One user's memory over a shared pretrained model: it reads, learns, and can be taken back."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.adaptation import memory_files
from nestling.adaptation.drift import (
    Alarm,
    Drift,
    Limits,
    Snapshots,
    as_numbers,
    base_norms,
    find_alarm,
    joint_norm,
    tree_bytes,
    trust_region,
    warn_refused,
)
from nestling.adaptation.memory_files import Text
from nestling.adaptation.metric import model_metric
from nestling.adaptation.own_text import own_texts
from nestling.adaptation.peft_export import LowRank, save_peft
from nestling.adaptation.slots import left_out
from nestling.continuum import Continuum, ContinuumState, Factors, Fast, MemoryLevel
from nestling.continuum import fast as differences
from nestling.continuum.engine import check_move, move
from nestling.continuum.fast import Reading, cut, weight_of
from nestling.levels import LevelUpdate, boundaries
from nestling.losses import pair_losses, windowed_losses

PIECE = 512
"""Tokens between two looks at the limits, at least (a whole number of the fastest chunks)."""

SHORT = ((1024, 4), (4096, 2))
"""(tokens, passes): a text of at most so many tokens is read so many times."""

UNDO = 2
"""So many texts can be undone: the last ones. Each takes half of what the levels take."""

PROBE, PROBES = 64, 8
"""Tokens kept of every text to see whether later ones spoil it, and of how many texts."""

NOTHING = 0.05
"""Share of the limit of forgetting by which losses may rise where nothing counts as spoilt."""

SCORED = 1024
"""Tokens of a text whose loss is measured before and after it is learned."""

OnProgress = Callable[[int, "Report"], None]


@dataclass
class Report:
    """The record of one call of `learn`."""

    tokens: int = 0
    pairs: int = 0
    loss: float = math.nan
    """Mean loss of the stream as it was read, each token judged before it was learned."""
    seconds: float = 0.0
    updates: list[LevelUpdate] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    refused: bool = False
    """An alarm was raised: the memory stands where it stood before."""
    passes: int = 1
    text: tuple[float, float] = (math.nan, math.nan)
    """Loss of the text (its first tokens) before and after; only of whole texts."""
    own: tuple[float, float] = (math.nan, math.nan)
    """Loss of text the model wrote itself before and after: the rise is what was forgotten."""

    def add(self, losses: Tensor, tokens: int) -> None:
        """Count one piece."""
        known = losses[~losses.isnan()].double()
        total = (0.0 if self.pairs == 0 else self.loss * self.pairs) + float(known.sum())
        self.tokens, self.pairs = self.tokens + tokens, self.pairs + len(known)
        self.loss = total / self.pairs if self.pairs else math.nan

    def __str__(self) -> str:
        said = [f"{self.tokens:,} tokens read, {len(self.updates)} updates"]
        if not math.isnan(self.text[0]):
            said.append(f"loss on the text {self.text[0]:.3f} -> {self.text[1]:.3f}")
        if not math.isnan(self.own[0]):
            said.append(f"on the model's own text {self.own[0]:.3f} -> {self.own[1]:.3f}")
        return "; ".join([*said, *(["refused"] if self.refused else [])])


class Learner:
    """A pretrained model with a memory of its own; made by `nestling.adapt`.

    The base model is shared and never changed (except by `merge`). All that is learned lives in
    `state`, plain data; so any number of learners may use one model, also in several threads.
    """

    def __init__(
        self,
        continuum: Continuum,
        *,
        settings: dict[str, Any],
        tokenizer: Any = None,
        limits: Limits | None = None,
        snapshots: int = 3,
        move_share: float | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
        budget: float | None = None,
    ) -> None:
        if move_share is not None:
            check_move(continuum.engine.wiring)
        self.continuum, self.tokenizer, self.settings = continuum, tokenizer, settings
        self.limits = Limits() if limits is None else limits
        self.on_alarm = on_alarm
        self.state: ContinuumState = continuum.init()
        self.history: deque[LevelUpdate] = deque(maxlen=4096)
        self.texts: list[Text] = []
        self.probes: list[Tensor] = []  # the first `watched` are the user's, the others texts'
        self.watched = 0
        self.notes: Any = None  # what was saved beside the memory
        self._snapshots = Snapshots(snapshots)
        self._move_share, self._budget = move_share, budget
        self._norms = base_norms(continuum)
        self._last: dict[str, LevelUpdate] = {}
        self._begun: tuple[str, ContinuumState] | None = None
        self._known: list[float] | None = None  # losses of held-out text where the stream began
        self._moved = False  # something was learned since held-out text was last looked at
        self._kept: set[str] = set()  # the snapshots since the stream began
        self.continuum.confine = trust_region(continuum, self._norms, self.limits)

    # Facts about the memory

    @property
    def model(self) -> Any:
        """The shared base model."""
        return self.continuum.model

    @property
    def config(self) -> Any:
        """The base model's configuration."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where the model and the memory are."""
        return self.state.start.device

    @property
    def levels(self) -> tuple[MemoryLevel, ...]:
        """The levels of the memory, as they were given."""
        return self.continuum.levels

    @property
    def position(self) -> int:
        """How many (input, target) pairs the memory has consumed: its clock."""
        return self.state.position

    @property
    def drift(self) -> tuple[Drift, ...]:
        """Where each level stands."""
        standing = []
        for number, level in enumerate(self.levels):
            last, state = self._last.get(level.name), self.state.levels[number]
            loss, gradient = (last.loss, last.grad_norm) if last else (math.nan, math.nan)
            far = joint_norm(state.fast) / self._norms[level.name]
            updates = int(state.updates[0])
            standing.append(Drift(level.name, level.chunk, updates, loss, gradient, far))
        return tuple(standing)

    def size(self) -> dict[str, int]:
        """Bytes: each level's fast weights, unfinished chunks and rule states, running context,
        what can be undone, and what the snapshots hold beyond that."""
        levels, before = self.state.levels, [text.before for text in self.texts]
        sizes = {
            level.name: tree_bytes(state.fast, state.start)
            for level, state in zip(self.levels, levels, strict=True)
        }
        learned = tree_bytes(*(part for s in levels for part in (s.fast, s.start)))
        total = tree_bytes(self.state)
        kept = tree_bytes(self.state, *self._snapshots.states())
        return {
            **sizes,
            "working": tree_bytes(levels) - learned,
            "context": total - tree_bytes(levels),
            "undo": tree_bytes(*before) // 2,  # as they are saved
            "snapshots": kept - total,
        }

    @property
    def receiving(self) -> tuple[str, ...]:
        """The levels that take no steps of their own, only what the next faster one has learned."""
        moves = self._move_share is not None
        return tuple(level.name for level in self.levels if moves and level.rate == 0)

    def __repr__(self) -> str:
        sizes = self.size()
        lines = [f"Learner over {type(self.model).__name__} at position {self.position:,}"]
        for level, drift in zip(self.levels, self.drift, strict=True):
            receives = level.name in self.receiving
            rate = "receives only" if receives else f"rate {level.rate:<8g}"
            lines.append(
                f"  {level.name:<10} chunk {level.chunk!s:>7}  {rate:<13}"
                f" {drift.updates:>6} updates  drift {drift.drift:.2e}  {_mb(sizes[level.name])}"
            )
        lines.append("  " + ", ".join(f"{k} {_mb(v)}" for k, v in sizes.items() if k in _REST))
        if still := left_out(self.model):
            lines.append(f"  {len(still)} mixtures of experts do not learn: {still[0]}, ...")
        return "\n".join(lines)

    # Reading

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """Within this block, in this thread, the base model answers with what was learned."""
        with Reading(self.continuum.engine.live(self.state.levels), 1):
            yield self.model

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, **options: Any) -> Any:
        """The model's own output, read with what was learned; nothing is learned from it."""
        with self.reading() as model:
            return model(input_ids, **options)

    @torch.no_grad()
    def generate(
        self, prompt: Tensor | str | list[Mapping[str, Any]] | None = None, **options: Any
    ) -> Any:
        """Continue a prompt with what was learned, as the model's own `generate`.

        Text gives text; a chat (a list of `{"role": ..., "content": ...}`) gives the answer's text;
        ids [B, T] give ids. `generate(**tokenizer(text, return_tensors="pt"))` works as well.
        """
        if prompt is None:
            prompt = options.pop("input_ids", None)
        if prompt is None:
            raise ValueError("generate needs a prompt: text, a chat, or ids [B, T]")
        chat = isinstance(prompt, list)
        if isinstance(prompt, str):
            ids = encode(prompt, self.tokenizer, begin=True)[None]
        elif isinstance(prompt, list):
            ids = chat_ids(prompt, self.tokenizer)[None]
        else:
            ids = prompt
        ids = ids.to(self.device)
        options = {"attention_mask": torch.ones_like(ids), **options}
        with self.reading() as model:
            made = model.generate(ids, **options)
        if isinstance(prompt, Tensor):
            return made
        return self.tokenizer.decode(made[0][ids.shape[1] * chat :], skip_special_tokens=True)

    @torch.no_grad()
    def score(self, source: Tensor | str | list[int], *, window: int | None = None) -> float:
        """Mean next-token loss of a text or of ids as a text of its own; nothing is learned.

        Longer texts are read in windows (the context, at most 1,024), each after the first
        starting half a window back.
        """
        ids = self._ids(source).to(self.device)
        if len(ids) < 2:
            raise ValueError(f"score needs at least 2 tokens; got {len(ids)}")
        context = window or min(self.continuum.context or 1024, 1024)
        return float(windowed_losses(lambda part: self(part).logits, ids, context).double().mean())

    @torch.no_grad()
    def own_loss(self) -> float:
        """Mean loss of text that the base model wrote by itself; its rise measures forgetting."""
        ids = own_texts(self.model).held_out
        return float(pair_losses(self(ids[:, :-1]).logits, ids[:, 1:]).double().mean())

    # Learning

    def learn(
        self,
        source: Any,
        *,
        name: str | None = None,
        passes: int | None = None,
        progress: OnProgress | None = None,
    ) -> Report:
        """Read a text, token ids, or an iterator of either, and learn from it (Eq. 71).

        A text (a string, or anything with a `name`) stands for itself: it is read several times if
        it is short (`passes`), the report has its loss before and after, it can be undone by its
        name, and it is refused if it spoils what was known before. Token ids and iterators without
        a name are a stream that goes on where the last call ended, so it may be cut into calls
        anywhere; `new_text` begins another. What spoils more than the limit since the stream began
        is refused, back to the newest snapshot of the stream that spoilt next to nothing (or the
        least). `progress(tokens, report)` is called as it goes.
        """
        if passes is not None and (isinstance(passes, bool) or passes < 1):
            raise ValueError(f"passes must be None or a whole number of at least 1; got {passes!r}")
        if self._budget is not None and self.continuum.metric is None:  # (measured once per model)
            self.continuum.metric = model_metric(self.continuum.engine, self._budget)
        report, begun = Report(), time.perf_counter()

        def note() -> None:
            report.seconds = time.perf_counter() - begun
            if progress is not None:
                progress(report.tokens, report)

        if isinstance(source, str) or name is not None or passes is not None:
            given = pieces(source, self.tokenizer, begin=True)
            ids = torch.cat([check_ids(piece, self._vocabulary) for piece in given])
            self._learn_text(ids, name or _name(source), passes, report, note)
        else:
            fresh = self.state.tokens.shape[1] == 0 and self.state.cache is None
            self._learn_stream(pieces(source, self.tokenizer, begin=fresh), report, note)
        note()
        return report

    def new_text(self) -> None:
        """Begin a new text, which has nothing to do with what was read; the memory stays."""
        self.state = self.continuum.new_context(self.state)
        self._known = None

    def watch(self, source: Tensor | str | list[int]) -> float:
        """Watch the loss of a text of the user's own, which is not learned; returns that loss.

        Texts and streams that raise it by more than `limits.forget` are refused from here on. At
        most 512 tokens of it are kept, in saved memories too; `reset` forgets it.
        """
        ids = self._ids(source)[:PIECE].cpu()
        if self.watched == PROBES:
            raise ValueError(f"at most {PROBES} texts can be watched; `reset` forgets them")
        loss = self.score(ids)
        self.probes.insert(self.watched, ids)
        self.watched, self._known = self.watched + 1, None
        return loss

    def begin_text(self, name: str, *, go_on: bool = False) -> None:
        """Begin one text, which lasts until `end_text`; `learn(text)` calls both.

        go_on: the text was begun before the memory was saved and loaded.
        """
        if not (go_on and self._begun is not None and self._begun[0] == name):
            self._begun = name, self.state
        if not go_on:
            self.new_text()

    @property
    def begun(self) -> Text | None:
        """The text that is being learned, and what every level's parts were before it."""
        if self._begun is None:
            return None
        name, before = self._begun
        return Text(name, tuple(level.fast for level in before.levels))

    def finish_pass(self, report: Report | None = None) -> None:
        """Learn what waits for its chunk to be full, and be ready for another text or pass."""
        waiting, start = self.state.tokens.shape[1], int(self.state.start[0])
        end = self._active[0].next_due(start) if self._active else None
        if waiting > 1 and end is not None:
            missing = end - start + 1 - waiting
            filler = self.state.tokens[:, -1:].expand(1, missing).clone()
            nothing = torch.zeros_like(filler, dtype=torch.bool)
            if filler.shape[1]:
                out = self.continuum(filler, self.state, learn=nothing, keep_logits=False)
                report = Report() if report is None else report
                self._take(out, report)
                self._look(report)
        self.new_text()

    def end_text(self, ids: Tensor, report: Report | None = None) -> Alarm | None:
        """Keep the text that was begun, or refuse it if it spoils what was known before it."""
        if self._begun is None or self.begun is None:
            raise ValueError("no text was begun; call begin_text first")
        now, self.state = self.state, self._begun[1]
        known, self.state = self._held_out(), now
        if alarm := self._forgotten(known):
            self._refuse(alarm, Report() if report is None else report)
            return alarm
        self.texts = [*self.texts, self.begun][-UNDO:]
        self._begun = self._known = None
        middle = max(len(ids) - PROBE, 0) // 2
        mine, others = self.probes[: self.watched], self.probes[self.watched :]
        self.probes = mine + [*others, ids[middle : middle + PROBE].cpu()][-PROBES:]
        self._snapshots.add(self.state)
        return None

    def _learn_text(
        self,
        ids: Tensor,
        name: str,
        passes: int | None,
        report: Report,
        note: Callable[[], None],
    ) -> None:
        if len(ids) < 2:
            raise ValueError(f"a text needs at least 2 tokens to learn from; got {len(ids)}")
        count = passes_for(len(ids)) if passes is None else passes
        before, own = self.score(ids[:SCORED]), self._own_or_nan()
        self.begin_text(name)
        for report.passes in range(1, count + 1):
            self._learn_stream(iter([ids]), report, note)
            if not report.refused:
                self.finish_pass(report)
            if report.refused:
                break
        else:
            self.end_text(ids, report)
        report.text = before, self.score(ids[:SCORED])
        report.own = own, self._own_or_nan()

    def _learn_stream(
        self, source: Iterator[Tensor], report: Report, note: Callable[[], None]
    ) -> None:
        label = self._snapshots.add(self.state)
        if self._begun is None and self._known is None:
            self._known, self._moved, self._kept = self._held_out(), False, set()
        self._kept.add(label)
        waiting = torch.zeros(0, dtype=torch.long)
        for piece in source:
            waiting = torch.cat([waiting, check_ids(piece.cpu(), self._vocabulary)])
            while len(waiting) >= (many := self._until_cut()) and not report.refused:
                self._learn_piece(waiting[:many], report)
                waiting = waiting[many:]
                note()
            if report.refused:
                return
        if len(waiting):
            self._learn_piece(waiting, report)
        self._look(report)

    @property
    def _active(self) -> list[MemoryLevel]:
        """The levels that learn by themselves, fastest first."""
        return sorted((lv for lv in self.levels if lv.active), key=attrgetter("chunk"))

    @property
    def _vocabulary(self) -> int:
        return int(self.config.vocab_size)

    def _until_cut(self) -> int:
        """Tokens until the next absolute position where limits and consolidation are looked at."""
        fastest = int(self._active[0].chunk) if self._active else PIECE
        step = fastest * max(1, PIECE // fastest)
        read = int(self.state.start[0]) + self.state.tokens.shape[1]
        steps = [step]
        if self._move_share is not None:
            steps += [int(self.levels[n].chunk) for n in self.continuum.engine.wiring.moving]
        done = max(read - 1, 0)
        return min(boundaries(done, done + each, each)[0] for each in steps) + 1 - read

    def _learn_piece(self, ids: Tensor, report: Report) -> None:
        out = self.continuum(ids[None].to(self.device), self.state, keep_logits=False)
        report.add(out.losses[0], len(ids))
        made = self._take(out, report)
        if any(update.level == self._active[-1].name for update in made if self._active):
            self._look(report)
            if not report.refused:
                self._kept.add(self._snapshots.add(self.state))

    def _look(self, report: Report) -> None:
        """Refuse what a stream has learned if it spoilt what was known where the stream began.

        Texts are judged as a whole, when they end.
        """
        if self._begun is None and self._known is not None and self._moved and not report.refused:
            self._moved = False
            if alarm := self._forgotten(self._known):
                self._refuse(alarm, report, self._unspoilt(self._known))

    def _unspoilt(self, known: list[float]) -> ContinuumState | None:
        """The newest snapshot of this stream that spoilt next to nothing, or the least spoilt.

        The last one may lie inside the text that is refused, with most of its harm.
        """
        now, found, least = self.state, None, math.inf
        for name in reversed(self._snapshots.names):
            if name in self._kept and least > NOTHING * self.limits.forget:
                self.state = state = self._snapshots.get(name, None)
                if (rise := max(self._rises(known))) < least:
                    found, least = state, rise
        self.state = now
        return found

    def _take(self, out: Any, report: Report) -> list[LevelUpdate]:
        """Take over what a call has learned; with an alarm, nothing of it."""
        made, state = as_numbers(out.updates), out.state
        if self._move_share is not None:
            wiring, share = self.continuum.engine.wiring, self._move_share
            levels = move(state.levels, wiring, state.position, share)
            state = self._within(state._replace(levels=levels))
            made += self._received(state, made)
        if alarm := find_alarm(made, self.limits):
            self._refuse(alarm, report)
            return []
        self.state, self._moved = state, self._moved or bool(made)
        report.updates += made
        self.history.extend(made)
        self._last |= {update.level: update for update in made}
        return made

    def _refuse(self, alarm: Alarm, report: Report, good: ContinuumState | None = None) -> None:
        """Go on from before the text that was begun, a `good` state or the last one; say so."""
        name, good = self._begun or (None, good or [self.state, *self._snapshots.states()][-1])
        self.state, self._begun, self._last = self.continuum.new_context(good), None, {}
        report.alarms.append(alarm)
        report.refused = True
        warn_refused(alarm, name, self.position)
        if self.on_alarm is not None:
            self.on_alarm(alarm)

    def _held_out(self) -> list[float]:
        """The losses that may not rise: of the model's own text (natural steps), of each probe."""
        if math.isinf(self.limits.forget):
            return []
        own = [] if self._budget is None else [self.own_loss()]
        return own + [self.score(ids) for ids in self.probes if len(ids) > 1]

    def _rises(self, known: list[float]) -> list[float]:
        return [new - old for old, new in zip(known, self._held_out(), strict=True)]

    def _forgotten(self, known: list[float]) -> Alarm | None:
        """Whether learning raised a loss of held-out text past the limit, from what was known."""
        own = int(self._budget is not None)
        whose = own * ["the model's own text"] + self.watched * ["a text that is watched"]
        for place, rise in enumerate(self._rises(known)):
            if not rise <= self.limits.forget:
                text = whose[place] if place < len(whose) else "an earlier text"
                measure = f"rise of the loss of {text}"
                return Alarm(self.position, "all", measure, rise, self.limits.forget)
        return None

    def _own_or_nan(self) -> float:
        return math.nan if self._budget is None else self.own_loss()

    def _within(self, state: ContinuumState) -> ContinuumState:
        """Levels that received something, within the drift they may have."""
        levels = list(state.levels)
        for number, level in enumerate(self.levels):
            far, most = joint_norm(levels[number].fast), self.limits.drift * self._norms[level.name]
            if math.isfinite(far) and far > most:
                fast = tuple(differences.scale(part, most / far) for part in levels[number].fast)
                levels[number] = levels[number]._replace(fast=fast)
        return state._replace(levels=tuple(levels))

    def _received(self, state: ContinuumState, made: list[LevelUpdate]) -> list[LevelUpdate]:
        """Levels of rate 0 that were due: they changed by what has moved into them."""
        due = [
            number
            for number in self.continuum.engine.wiring.moving[1:]
            if not self.levels[number].active and self.levels[number].due(state.position)
        ]
        last = made[-1].loss if made else 0.0
        return [
            LevelUpdate(
                state.position,
                self.levels[n].name,
                last,
                0.0,
                0.0,
                joint_norm(state.levels[n].fast),
            )
            for n in due
        ]

    # Going back, saving, exporting

    @property
    def snapshots(self) -> list[str]:
        """Names of the states that can be returned to, the oldest first."""
        return self._snapshots.names

    def snapshot(self, name: str) -> None:
        """Keep the present state under a name; it is not dropped by itself."""
        self._snapshots.add(self.state, name)

    def drop(self, name: str) -> None:
        """Forget a snapshot."""
        self._snapshots.drop(name)

    def rollback(self, which: int | str = 1) -> None:
        """Return to a snapshot by name, or to the n-th last that differs from now, bit for bit."""
        self.state = self._snapshots.get(which, self.state)
        self._last, self._known = {}, None

    def undo(self, name: str | None = None) -> str:
        """Take back what one text changed: the last one, or by name; returns its name.

        What later texts changed stays, within the levels' rank. Undoing the last text returns to
        the memory before it, to the bit (after saving and loading: in half precision); streams
        read since then go with it. See `learner.texts` for what can be undone.
        """
        names = [text.name for text in self.texts]
        if not names or (name is not None and name not in names):
            known = ", ".join(map(repr, names)) or "none"
            raise ValueError(f"no text {name or ''!r} that can be undone; there are {known}")
        place = len(names) - 1 if name is None else len(names) - 1 - names[::-1].index(name)
        text, later = self.texts[place], self.texts[place + 1 :]
        after = later[0].before if later else None
        ranks = [level.rank for level in self.continuum.levels]
        now = tuple(level.fast for level in self.state.levels)
        fasts = text.before if after is None else _without(now, text.before, after, ranks)
        self.state = self.continuum.new_context(_with(self.state, fasts))
        self.texts = self.texts[:place] + [
            Text(each.name, _without(each.before, text.before, after, ranks))
            for each in later
            if after is not None
        ]
        self._last, self._known = {}, None
        return text.name

    def reset(self, level: str | None = None) -> None:
        """Forget everything, or (by name) what one level has learned."""
        self._known = None
        if level is None:
            self.state = self.continuum.init()
            self._snapshots.clear()
            self.history.clear()
            self.texts, self.probes, self.watched, self._last = [], [], 0, {}
            return
        number = self._number(level)
        fresh = self.continuum.init().levels[number]
        levels = self.state.levels
        state = self.state._replace(levels=(*levels[:number], fresh, *levels[number + 1 :]))
        self.state = self.continuum.new_context(state)

    @torch.no_grad()
    def merge(self, level: str | None = None) -> None:
        """Write what a level (or, without a name, every level) learned into the base weights.

        This changes the model for everyone who uses it. The level starts anew; snapshots and
        memories saved for the old weights do not fit any more and are dropped or refused.
        """
        chosen = range(len(self.levels)) if level is None else [self._number(level)]
        for number in chosen:
            parts = self.continuum.parts[number]
            for own, fast in zip(parts, self.state.levels[number].fast, strict=True):
                if fast is not None:
                    weight, transposed = weight_of(self.model, self.continuum.slots[own.slot].name)
                    place = cut(weight.data.mT if transposed else weight.data, own.part)
                    full = differences.dense(fast)[0]
                    place.copy_(place.to(full.dtype) + full)
            self.reset(self.levels[number].name)
        self._snapshots.clear()
        self.texts = []
        own_texts.forget(self.model)
        self.continuum.metric = None
        self._norms |= base_norms(self.continuum)

    def save(self, folder: str | Path, *, context: bool = False, notes: Any = None) -> None:
        """Write the memory to a folder; whatever happens, it holds the old or the new one.

        context: also what was read last, so that learning goes on bit for bit; without it, what
            comes after loading is a new text. notes: anything JSON can hold.
        """
        state = self.state if context else self.continuum.new_context(self.state)
        self.notes = notes
        memory_files.save(Path(folder), self, state, notes)

    def load(self, folder: str | Path) -> Any:
        """Take over a saved memory, and return its notes; nothing changes unless all is right."""
        saved = memory_files.load(Path(folder), self)
        self.state, self.notes = _revived(self.continuum, saved.state), saved.notes
        self.texts, self.probes, self.watched = saved.texts, saved.probes, saved.watched
        self._begun = self._known = None
        if saved.begun is not None:
            self._begun = saved.begun.name, _with(self.state, saved.begun.before)
        if saved.own is not None:
            own_texts.remember(self.model, saved.own)
        self._snapshots.clear()
        self.history = deque(saved.history, maxlen=self.history.maxlen)
        self._last = {update.level: update for update in self.history}
        return saved.notes

    def export_peft(self, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Path:
        """Write the memory as a PEFT LoRA: `PeftModel.from_pretrained(model, folder)` has it.

        Only for memories of low rank (`rank`); the adapter's rank is that of all levels together.
        """
        layers: dict[str, LowRank] = {}
        for slot, live in zip(self.continuum.slots, self.continuum.engine.live(self.state.levels)):
            factors = [fast for _, fast in live.parts]
            if any(part.axis is not None for part, _ in live.parts) or not all(
                isinstance(fast, Factors) for fast in factors
            ):
                raise ValueError(
                    "export_peft: this memory keeps full matrices, which no LoRA can hold; make it"
                    " with a rank and assign='share'"
                )
            if factors:
                left, right = (torch.cat(side, -1)[0] for side in zip(*factors, strict=True))
                layers[slot.name.removesuffix(".weight")] = LowRank(right.mT, left)
        transposed = any(weight_of(self.model, slot.name)[1] for slot in self.continuum.slots)
        base = str(getattr(self.config, "_name_or_path", "") or "")
        return save_peft(Path(folder), layers, base=base, transposed=transposed, dtype=dtype)

    def _number(self, name: str) -> int:
        names = [level.name for level in self.levels]
        if name not in names:
            raise ValueError(f"no level {name!r}; the levels are {', '.join(names)}")
        return names.index(name)

    def _ids(self, source: Any) -> Tensor:
        ids = encode(source, self.tokenizer, begin=True) if isinstance(source, str) else source
        return check_ids(as_ids(ids), self._vocabulary)


def passes_for(tokens: int) -> int:
    """How often a text of so many tokens is read: short ones several times."""
    return next((passes for most, passes in SHORT if tokens <= most), 1)


_REST = ("working", "context", "undo", "snapshots")


Fasts = tuple[tuple[Fast, ...], ...]


def _with(state: ContinuumState, fasts: Fasts) -> ContinuumState:
    """The state with other differences in its levels."""
    both = zip(state.levels, fasts, strict=True)
    return state._replace(levels=tuple(level._replace(fast=fast) for level, fast in both))


def _without(now: Fasts, before: Fasts, after: Fasts, ranks: Sequence[int | None]) -> Fasts:
    """`now - (after - before)` for every level and part, in the level's own form."""
    return tuple(
        tuple(
            fast if new is old else _less(fast, new, old, rank)
            for fast, old, new in zip(*parts, strict=True)
        )
        for rank, *parts in zip(ranks, now, before, after, strict=True)
    )


def _less(fast: Fast, new: Fast, old: Fast, rank: int | None) -> Fast:
    rest = differences.add(differences.add(fast, differences.scale(new, -1.0)), old)
    return rest if rank is None or rest is None else differences.truncate(rest, rank)[0]


def _revived(continuum: Continuum, state: ContinuumState) -> ContinuumState:
    """A loaded state that can go on learning through its updates (transfer="second_order").

    What a level has learned since its context began counts as a constant from here on.
    """
    levels = []
    for fresh, level in zip(continuum.init().levels, state.levels, strict=True):
        starts, fasts = list(level.start), list(level.fast)
        for place, new in enumerate(fresh.start):
            begin, now = starts[place], fasts[place]
            if isinstance(new, Tensor) and isinstance(begin, Tensor) and isinstance(now, Tensor):
                starts[place] = begin = begin.detach().clone().requires_grad_(new.requires_grad)
                fasts[place] = now.detach() + (begin - begin.detach())
        levels.append(level._replace(start=tuple(starts), fast=tuple(fasts)))
    return state._replace(levels=tuple(levels))


def _name(source: Any) -> str:
    """A name for a text that has none: its first words."""
    words = " ".join(source[:200].split()) if isinstance(source, str) else "text"
    return words if len(words) <= 40 else words[:37] + "..."


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def as_ids(ids: Any, name: str = "ids") -> Tensor:
    """Token ids as [T], from a tensor [T] or [1, T] or a sequence of whole numbers."""
    tokens = torch.as_tensor(ids)
    tokens = tokens[0] if tokens.dim() == 2 and tokens.shape[0] == 1 else tokens
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(
            f"{name}: one stream of token ids, [T] or [1, T] whole numbers; got"
            f" {tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    return tokens.long()


def encode(text: str, tokenizer: Any, *, begin: bool) -> Tensor:
    """The tokens of a text; the tokenizer's own first token (BOS) only where a text begins."""
    if tokenizer is None:
        raise ValueError("learning from text needs a tokenizer: adapt(model, tokenizer=...)")
    plain = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    bos = tokenizer.bos_token_id
    if begin and bos is not None and _adds_bos(tokenizer, bos):
        plain = [bos, *plain]
    return torch.tensor(plain, dtype=torch.long)


def chat_ids(chat: list[Any], tokenizer: Any) -> Tensor:
    """The tokens of a chat, [T], up to where the assistant's answer begins."""
    if not chat or not all(isinstance(turn, Mapping) and "role" in turn for turn in chat):
        raise ValueError(
            'a chat is a list of {"role": ..., "content": ...}; token ids go into a tensor [B, T];'
            f" got {str(chat)[:80]}"
        )
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError("a chat needs a tokenizer with a chat template: adapt(model, tokenizer=)")
    made = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    return torch.tensor(made["input_ids"], dtype=torch.long).flatten()


def _adds_bos(tokenizer: Any, bos: int) -> bool:
    ids = tokenizer("a", verbose=False).input_ids
    return bool(ids) and ids[0] == bos


def pieces(source: Any, tokenizer: Any, *, begin: bool) -> Iterator[Tensor]:
    """A source as pieces [T] of one stream; each text of an iterator is encoded by itself."""
    if isinstance(source, str):
        yield encode(source, tokenizer, begin=begin)
    elif isinstance(source, Tensor):
        yield as_ids(source)
    elif isinstance(source, Iterable):
        single: list[int] = []
        for item in source:
            if isinstance(item, int) and not isinstance(item, bool):
                single.append(item)
                if len(single) < 1024:
                    continue
                yield torch.tensor(single)
                single = []
            elif isinstance(item, str):
                yield encode(item, tokenizer, begin=begin)
            else:
                yield as_ids(item)
            begin = False
        if single:
            yield torch.tensor(single)
    else:
        raise TypeError(
            f"learn takes text, token ids or an iterator of them; got {type(source).__name__}"
        )


def check_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """Refuse ids the model does not know."""
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        raise ValueError(
            f"ids: the model knows tokens 0 to {vocabulary - 1}; got {int(ids.min())} to"
            f" {int(ids.max())}"
        )
    return ids
