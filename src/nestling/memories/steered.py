"""A matrix memory whose projections a small memory moves in context: Hope's own (Eq. 64, 79-88).

In the paper every projection (keys, values, rate, retention) is a memory as large as the main one.
None of them depends on the main memory, so one of a few channels can serve them all (deviation 26):

    S_t = a_t S_{t-1} + e_t v'_t k'_t^T                             the small memory adds (Eq. 64)
    (k_t, v_t, eta_t, alpha_t) = W x_t + U norm(S_{t-1} q'_t)       its reads move the projections
    M_t = M_{t-1} (alpha_t I - eta_t k_t k_t^T) + eta_t v_t k_t^T   the main memory learns (Eq. 88)
    y_t = M_{t-1} q_t, and V norm(S_{t-1} q'_t) beside it           both are read (Eq. 83)

The small memory adds what it sees and learns slowly, so it knows how much of a text has passed,
which a gate that sees a few tokens cannot. Nothing that is written depends on the main memory, so
both are matrix scans: every back end of `nestling.scan` serves, and chunks change no result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nestling.checks import one_of, whole_number
from nestling.memories.core import (
    Device,
    Dtype,
    Memory,
    Opened,
    TokenReader,
    advance,
    at_start,
    check_sizes,
    device_and_dtype,
    keep_in_graph,
    make_shell,
    merge_heads,
    split_heads,
    state_dtype,
    state_start,
)
from nestling.memories.self_modifying import Rates, Retention, largest_row
from nestling.memories.steered_token import SteeredToken
from nestling.norm import rms_norm, unit
from nestling.scan import BACKENDS
from nestling.scan.delta.api import scan_unchecked
from nestling.scan.delta.step import TokenParts, takes, token_step
from nestling.scan.self_modifying.rule import SelfRule, clip

__all__ = ["Steered", "SteeredConfig", "SteeredState"]

MOVED = ("k", "v", "q", "eta", "alpha")
"""The projections that a small memory may move."""

NOTHING: Mapping[str, Tensor] = MappingProxyType({})
"""The additions to projections where there is no small memory."""

PARTS = ("k", "v", "q")
"""The projections of a token to vectors, in the order of the shell's."""


RATES = Rates(start=(0.3, 1.0), most=2.0, shut=0.05)
RETENTION = Retention(start=(0.9998, 0.9), tied=True)


@dataclass(frozen=True, kw_only=True)
class SteeredConfig:
    """A matrix memory and a small one that steers it.

    >>> SteeredConfig(width=64, heads=2).moved
    ('k', 'v', 'eta', 'alpha')

    steering: channels of the small memory, 0 for none: then the projections are static.
    moved: which of ("k", "v", "q", "eta", "alpha") its reads move.
    pace: the rates at which the heads of the small memory start; its first one moves projections
        (at 0.02 it settles in about fifty tokens), all are read beside the main memory.
    erase: the main memory learns by the delta rule; False adds (Eq. 77).
    clip: the longest value; longer ones are shortened to it, which bounds the memory (`bound`).
    rates, retention: how strongly tokens write, and what they keep. By default rates reach twice
        the retention, heads keep from long to short, nothing fades where nothing is written, and
        weak writes are none (deviations 24, 25).
    conv: taps of the causal convolution, 1 for none. conv_each: it acts on each projection instead
        of once before them. gate: the input gates the reads.
    chunk: tokens solved together, without effect on the result. recompute: keep less for the
        backward pass. backend: as for `nestling.scan.scan`.
    """

    width: int
    heads: int
    steering: int = 8
    moved: tuple[str, ...] = ("k", "v", "eta", "alpha")
    pace: tuple[float, ...] = (0.02, 0.1)
    erase: bool = True
    clip: float = 8.0
    rates: Rates = RATES
    retention: Retention = RETENTION
    conv: int = 4
    conv_each: bool = False
    gate: bool = True
    chunk: int = 64
    recompute: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "moved", tuple(self.moved))
        object.__setattr__(self, "pace", tuple(self.pace))
        check_sizes(self.width, self.heads, self.conv)
        whole_number("steering", self.steering, least=0)
        whole_number("chunk", self.chunk)
        one_of("backend", self.backend, ("auto", *BACKENDS))
        if list(self.moved) != [name for name in MOVED if name in self.moved]:
            raise ValueError(
                f"moved must be some of {MOVED}, each once, in this order; got {self.moved}"
            )
        if not self.pace or not all(0 < pace < 1 for pace in self.pace):
            raise ValueError(f"pace must be rates between 0 and 1; got {self.pace}")
        _ = self.rule  # (making the rule checks the rest)

    @property
    def rule(self) -> SelfRule:
        """The bounds and gates of the main memory."""
        return self._rule(self.rates.most)

    @property
    def small_rule(self) -> SelfRule:
        """Those of the small one, whose rate is below its retention."""
        return self._rule(1.0)

    def _rule(self, most: float) -> SelfRule:
        return SelfRule(
            adaptive=(), own_values=False, erase=self.erase, rate_max=most, shut=self.rates.shut,
            retain_max=self.retention.most, tied=self.retention.tied, clip=self.clip,
        )  # fmt: skip


class SteeredState(NamedTuple):
    """Tokens seen, the convolution's tail, the memory of each head, and the small one."""

    position: Tensor  # [B] int64
    tail: Tensor  # [B, conv - 1, D], or all parts wide with conv_each
    weight: Tensor  # [B, H, d, d]
    small: Tensor | None  # [B, h, s, s]


class Small(nn.Module):
    """The small memory: it adds, and its reads are handed out. h heads of s channels."""

    def __init__(self, config: SteeredConfig) -> None:
        super().__init__()
        self.config, self.rule = config, config.small_rule
        size, head, many = config.steering, config.width // config.heads, len(config.pace)
        self.sizes = {name: head for name in config.moved if name in PARTS}
        gates = [name for name in config.moved if name not in PARTS]
        self.sizes |= {"gates": 2} if len(gates) == 2 else dict.fromkeys(gates, 1)
        self.inward = nn.Linear(config.width, many * (size + 2))  # with both gates
        self.project = nn.Parameter(torch.empty(many, 3 * size, size))  # to k, v, q
        self.norm = nn.Parameter(torch.ones(size))
        self.outward: nn.Linear | None = None
        if self.sizes:
            self.outward = nn.Linear(size, config.heads * sum(self.sizes.values()), bias=False)
        self.beside = nn.Linear(many * size, config.width, bias=False)
        self.weight = nn.Parameter(torch.zeros(many, size, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Nothing stored, and next to nothing handed out: training decides what reads move."""
        config, size = self.config, self.config.steering
        nn.init.ones_(self.norm)
        nn.init.zeros_(self.weight)
        self.inward.reset_parameters()
        nn.init.normal_(self.beside.weight, std=0.01)
        nn.init.normal_(self.project, std=1 / math.sqrt(size))
        if self.outward is not None:
            nn.init.normal_(self.outward.weight, std=0.1 / math.sqrt(size))
        biases = []
        for pace in config.pace:
            start = Rates(start=(pace, pace), shut=config.rates.shut)
            biases.append(start_bias(start, config.retention, 1))
        with torch.no_grad():
            each = self.inward.weight.unflatten(0, (len(biases), -1))
            each[:, -2:].normal_(std=0.1 / math.sqrt(config.width))
            bias = self.inward.bias.view(len(biases), -1)
            bias[:, :-2] = 0.0
            bias[:, -2:] = torch.cat(biases)

    def run(self, x: Tensor, state: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalised reads [B, T, h s] before each token's own write, and the memory after all."""
        k, v, q, raw = self._split(x)
        gates = self.rule.rate_and_retain(raw, None if valid is None else valid.unsqueeze(1))
        y, after = read_then_write(self.config, False, state, k, v, q, *gates)
        return self._normed(y), after

    def ask(self, x: Tensor, state: Tensor) -> Tensor:
        """Normalised reads of the memory as it stands, [B, T, h s]."""
        return self._normed(unit(self._split(x)[2]) @ state.mT)

    def additions(self, read: Tensor) -> Mapping[str, Tensor]:
        """The additions to the projections, each [B, H, T, .]; to both gates at once, as `gates`,
        if both are moved."""
        if self.outward is None:
            return NOTHING
        first = read[..., : self.config.steering]
        parts = self.outward(first.to(self.outward.weight.dtype)).to(read.dtype)
        parts = split_heads(parts, self.config.heads)
        pieces = parts.split_with_sizes(list(self.sizes.values()), -1)
        return dict(zip(self.sizes, pieces, strict=True))

    def _normed(self, y: Tensor) -> Tensor:
        return merge_heads(rms_norm(y, self.norm.to(y.dtype), 1e-6))

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        """k, v, q [B, h, T, s] and the gates' read-outs [B, h, T, 2]."""
        size = self.config.steering
        parts = split_heads(self.inward(x).to(state_dtype(x.dtype)), len(self.config.pace))
        inner, raw = parts.split_with_sizes([size, 2], -1)
        return *(inner @ self.project.to(inner.dtype).mT).chunk(3, -1), raw


class Steered(Memory):
    """A matrix memory per head, and a small memory that moves its projections in context."""

    def __init__(self, config: SteeredConfig) -> None:
        super().__init__()
        self.config, self.rule, self.width = config, config.rule, config.width
        size = config.width // config.heads
        self.shell = make_shell(config, len(PARTS))
        self.gates = nn.Linear(config.width, 2 * config.heads)
        self.weight = nn.Parameter(torch.zeros(config.heads, size, size))
        self.small = Small(config) if config.steering else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Nothing stored; gates as configured."""
        config = self.config
        nn.init.zeros_(self.weight)
        nn.init.normal_(self.gates.weight, std=0.1 / math.sqrt(self.width))
        with torch.no_grad():
            bias = start_bias(config.rates, config.retention, config.heads)
            self.gates.bias.copy_(bias.flatten())

    def init(self, batch_size: int, *, device: Device = None, dtype: Dtype = None) -> SteeredState:
        """The trained initial memories (zero at first) for every sequence."""
        device, dtype = device_and_dtype(self.weight, device, dtype)

        def started(weight: Tensor) -> Tensor:
            return state_start(weight.to(device, state_dtype(dtype)), batch_size)

        return SteeredState(
            at_start(batch_size, device),
            self.shell.init(batch_size, device, dtype),
            started(self.weight),
            None if self.small is None else started(self.small.weight),
        )

    def run(
        self, x: Tensor, state: SteeredState, valid: Tensor | None, position: int | None
    ) -> tuple[Tensor, SteeredState]:
        """Convolve, project, steer, scan, and project back; see `Memory.run`."""
        opened = self.shell.open(x, state.tail, valid)
        read, small, added = None, state.small, NOTHING
        if self.small is not None and small is not None:
            read, small = self.small.run(opened.x, small, valid)
            added = self.small.additions(read)
        k, v, q = moved(opened.parts, added)
        raw = split_heads(self.gates(opened.x).to(v.dtype), self.config.heads)
        raw = moved_gates(raw, added)
        gates = self.rule.rate_and_retain(raw, None if valid is None else valid.unsqueeze(1))
        y, weight = read_then_write(self.config, self.config.erase, state.weight, k, v, q, *gates)
        after = advance(state.position, x, valid)
        y = self._close(y, opened, read)
        y = keep_in_graph(y, self.weight, *([] if self.small is None else [self.small.weight]))
        return y, SteeredState(after, opened.tail, weight, small)

    def token_reader(self) -> TokenReader | None:
        """See `Memory.token_reader`."""
        config = self.config
        plain = config.backend == "auto" and not config.conv_each and math.isfinite(config.clip)
        return SteeredToken(self) if plain else None

    def read(self, x: Tensor, state: SteeredState) -> Tensor:
        """Ask both memories as they stand about each token (Eq. 83)."""
        opened = self.shell.ask(x, state.tail)
        read, added = None, NOTHING
        if self.small is not None and state.small is not None:
            read = self.small.ask(opened.x, state.small)
            added = self.small.additions(read)
        q = moved(opened.parts, added)[2]
        return self._close(unit(q) @ state.weight.mT, opened, read)

    def bound(self) -> Tensor:
        """The largest norm any row of the main memory can ever have, [1] (deviations 8, 24)."""
        most = largest_row(self.rule, momentum=False, adding=False)
        return self.weight.detach().norm(dim=-1).max().clamp_min(most).view(1)

    def _close(self, y: Tensor, opened: Opened, read: Tensor | None) -> Tensor:
        out = self.shell.close(y, opened.gate)
        if self.small is None or read is None:
            return out
        return out + self.small.beside(read.to(self.small.beside.weight.dtype))


def moved(parts: Sequence[Tensor], added: Mapping[str, Tensor]) -> list[Tensor]:
    """k, v and q with what the small memory adds, each [B, H, T, d]."""
    pairs = zip(PARTS, parts, strict=True)
    return [part + added[name] if name in added else part for name, part in pairs]


def moved_gates(raw: Tensor, added: Mapping[str, Tensor]) -> Tensor:
    """The read-outs of both gates with what the small memory adds, [B, H, T, 2]."""
    if "gates" in added:
        raw = raw + added["gates"]
    for i, name in enumerate(("eta", "alpha")):
        if name in added:
            raw = raw + torch.nn.functional.pad(added[name], (i, 1 - i))
    return raw


def read_then_write(
    config: SteeredConfig, erase: bool, weight: Tensor, k: Tensor, v: Tensor, q: Tensor,
    rate: Tensor, retain: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Reads before each token's own write, and the memory after all: [B, H, T, d] each."""
    if k.shape[-2] == 1 and config.backend == "auto" and takes(weight, k, v, rate):
        both = unit(torch.cat([k, q], -2))
        token = TokenParts(both, clip(v, config.clip), rate.unsqueeze(-1), retain.unsqueeze(-1))
        return token_step(weight, token, erase, "before")
    return scan_unchecked(
        weight, unit(k), clip(v, config.clip), rate, retain, unit(q),
        erase=erase, read="before", chunk=config.chunk, recompute=config.recompute,
        backend=config.backend,
    )  # fmt: skip


def start_bias(rates: Rates, retention: Retention, heads: int) -> Tensor:
    """The biases of rate and retention with which each head's gates start, [H, 2]."""
    shares = rates.spread(heads)
    kept = retention.spread(shares)
    write = torch.logit(rates.shut + (1 - rates.shut) * shares.double())
    return torch.stack([write, torch.log(kept / (1 - kept))], -1)
