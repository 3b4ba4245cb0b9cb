"""One token at a time, as `generate` reads: the model's weights put together for few operations.

What a small model writes costs as many operations as a token takes, hardly what each of them does.
So where a call brings one token a sequence, and nobody looks in between (gradients, hooks, wrapped
layers), copies of the weights serve that make one product of many. They are of the weights as they
were, so every call looks whether those changed: the objects, their versions, their places in
memory. What is written past all of these (`weight.data.add_(...)`) is seen with the next cache,
whose first call compares sums.

Levels that learn are read so, too, between two moments at which they step. The engine's state goes
on as `nestling.continuum.stream.TokenStream.learn` would have left it.

Shapes: B sequences, D width, F hidden width of all levels of a channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import embedding, silu

from nestling.continuum.layers import (
    ACTIVATIONS,
    MLP,
    NOW,
    BlockState,
    Chain,
    FeedForward,
    LevelLinear,
    Parallel,
    SwiGLU,
)
from nestling.continuum.stream import ContinuumState
from nestling.memories.core import Room
from nestling.models.cache import Learned, MemoryCache
from nestling.models.learning import engine_of
from nestling.norm import RMSNorm

MOST = 2**26
"""Weights beyond which copies are large, and operations cost more than calling them."""

_PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList)
"""Torch's modules that do what they are named for; all others are to be our own."""

_GATHERING = "transformers.utils.output_capturing"

_States = tuple[Any, ...]
_Weights = Callable[[Tensor], Tensor]
"""The value of a parameter: [Do, Di], or [B, Do, Di] where every sequence has its own."""


def read_one_token(model: Any, ids: Tensor, cache: MemoryCache) -> Tensor | None:
    """Logits [B, 1, V] of one token a sequence, [B, 1], and the cache goes on; None if it cannot.

    In a model whose levels learn, the cache has what they learned, and they learn on.
    """
    if not _undisturbed(model):
        return None
    reader = _KEPT.get(model)
    if reader is None or not reader.serves(cache):
        if not _simple(model):
            return None
        reader = _KEPT[model] = OneToken(model, cache)
    if cache.learned is not None:
        return reader.learn(model, ids, cache)
    if cache.states is None:
        return None
    logits, after = reader.read(ids, cache.states, reader.channels)
    cache.advance(after, 1)
    return logits


def _undisturbed(model: Any) -> bool:
    """Whether plain operations may stand for modules at this moment."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or NOW.depth:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    return not torch.is_autocast_enabled(model.lm_head.weight.device.type)


def _simple(model: Any) -> bool:
    """Whether every module is what its class says, with weights of one dtype, not too many."""
    weights = list(model.parameters())
    dtype, like = weights[0].dtype, weights[0].device
    if dtype not in (torch.float32, torch.float64) or sum(p.numel() for p in weights) > MOST:
        return False
    if any(p.dtype != dtype or p.device != like or p.is_inference() for p in weights):
        return False
    return all(
        (type(m) in _PLAIN or type(m).__module__.startswith("nestling.")) and not _hooked(m)
        for m in model.modules()
        if m is not model
    )


def _hooked(module: nn.Module) -> bool:
    """Whether a module has hooks or another `forward`. The hooks with which transformers gathers
    hidden states do not count: they stay on layers, and do nothing in calls that ask for none."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    others = [hook for hook in hooks if getattr(hook, "__module__", None) != _GATHERING]
    return bool(others) or "forward" in module.__dict__


class OneToken:
    """A model's layers for one token of every sequence, and what they were made of."""

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __init__(self, model: Any, cache: MemoryCache) -> None:
        inside = [m for m in model.modules() if m is not model]
        self.weights = list(model.parameters())
        self.versions = [p._version for p in self.weights]
        self.places = [p.data_ptr() for p in self.weights]
        self.hooks = [h for m in inside for h in (m._forward_hooks, m._forward_pre_hooks)]
        self.hooked = [*map(len, self.hooks)]
        tables = [t for m in (model, *inside) for t in (m._modules, m._parameters)]
        parts = [(table, name, part) for table in tables for name, part in table.items()]
        self.tables, self.names, self.parts = zip(*parts, strict=True)
        self.sums = self._sums()
        self.known = WeakSet([cache])
        inner = model.model
        self.embed, self.norm = inner.embed_tokens.weight.detach(), _Norm(inner.norm)
        self.head = (model.lm_head.weight * self.norm.weight).mT.contiguous()  # [D, V]
        self.mixers = [_Mixer(layer) for layer in inner.layers]
        self.blocks = [layer.channel for layer in inner.layers]
        self.channels = _channels(self.blocks, Tensor.detach)
        self.since: _Since | None = None

    def serves(self, cache: MemoryCache) -> bool:
        """Whether the weights are still those that were put together."""
        if not all(map(is_, map(dict.get, self.tables, self.names), self.parts)):
            return False
        if [*map(len, self.hooks)] != self.hooked:
            return False
        if [p._version for p in self.weights] != self.versions:
            return False
        if [p.data_ptr() for p in self.weights] != self.places:
            return False
        if cache not in self.known:
            if not torch.equal(self.sums, self._sums()):
                return False
            self.known.add(cache)
        return True

    def read(
        self, ids: Tensor, states: _States, channels: Sequence[_Channel]
    ) -> tuple[Tensor, _States]:
        """Logits [B, 1, V] and the states afterwards."""
        x = embedding(ids[:, 0], self.embed)  # [B, D]
        after = []
        for mixer, channel, state in zip(self.mixers, channels, states, strict=True):
            x, mixed = mixer(x, state.mixer)
            x, kept = channel(x, state.channel)
            after.append(BlockState(mixed, kept))
        return torch.mm(self.norm.over_length(x)[0], self.head).unsqueeze(1), tuple(after)

    def learn(self, model: Any, ids: Tensor, cache: MemoryCache) -> Tensor | None:
        """`read` of tokens that are learned from later; None where a level has to step first."""
        learned = cache.learned
        if learned is None or len(learned.rows) != 1 or len(learned.rows[0]) != len(ids):
            return None
        state = learned.states[0]
        waiting = state.tokens.shape[1]
        if waiting == 0 or state.ahead is None:
            return None
        if len(ids) > 1 and len(ids) * sum(p.numel() for p in self.weights) > MOST:
            return None  # every sequence has its own
        with torch.inference_mode(mode=False), torch.no_grad():
            since = self._now(model, state)
            if since.start + waiting + 1 > since.end:
                return None
            logits, after = self.read(ids.clone(), state.ahead, since.channels)
            state = state._replace(
                tokens=torch.cat([state.tokens, ids], 1),
                wanted=torch.cat([state.wanted, torch.ones_like(ids, dtype=torch.bool)], 1),
                ahead=after,
                last=logits[:, 0],
            )
        cache.advance_learned(Learned(learned.rows, (state,)), 1)
        return logits

    def _now(self, model: Any, state: ContinuumState) -> _Since:
        """The levels as they stand since they stepped last; looked up once for many tokens."""
        since = self.since
        if since is None or since.levels is not state.levels or since.begun is not state.start:
            engine, start = engine_of(model), int(state.start[0])
            end = engine.wiring.next_boundary(start)
            live = {id(slot.weight): slot for slot in engine.live(state.levels)}

            def stands(weight: Tensor) -> Tensor:
                slot = live.get(id(weight))
                return weight.detach() if slot is None else slot.whole(constant=True)

            channels = _channels(self.blocks, stands)
            last = math.inf if end is None else end
            since = self.since = _Since(state.levels, state.start, start, last, channels)
        return since

    def _sums(self) -> Tensor:
        return torch.stack([p.detach().sum() for p in self.weights])


class _Since(NamedTuple):
    """Facts that hold from one step of the levels to the next."""

    levels: Any
    begun: Tensor  # where the segment begins, by this very tensor
    start: int
    end: float
    channels: list[_Channel]


_KEPT: WeakKeyDictionary[Any, OneToken] = WeakKeyDictionary()


class _Norm:
    """RMS norm of [B, D], as [B, 1, D]; the result lasts until the next."""

    def __init__(self, norm: RMSNorm) -> None:
        size = norm.weight.shape[0]
        self.weight = norm.weight.detach() * math.sqrt(size)
        self.eps = self.weight.new_full((), math.sqrt(size * norm.eps))
        self.room = Room(self._places, self.weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.over_length(x)[1].mul_(self.weight)

    def over_length(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`nestling.norm.over_length`, [B, D] and as [B, 1, D]: products have the weight."""
        long, y, as_tokens = self.room.of(len(x))
        vector_norm(x, dim=-1, keepdim=True, out=long).hypot_(self.eps)
        torch.div(x, long, out=y)
        return y, as_tokens

    def _places(self, batch: int) -> tuple[Tensor, ...]:
        y = self.weight.new_empty(batch, len(self.weight))
        return self.weight.new_empty(batch, 1), y, y.unsqueeze(1)


class _Mixer:
    """`x + mixer(norm(x))`, by the memory's own reader of tokens if it has one."""

    def __init__(self, layer: Any) -> None:
        self.norm, self.mixer, self.reader = _Norm(layer.norm), layer.mixer, None
        self.reader = layer.mixer.token_reader()

    def __call__(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        if self.reader is not None:
            return self.reader(self.norm(x), x, state)
        y, state = self.mixer(self.norm(x).clone(), state)
        return x + y[:, 0], state


_Channel = Callable[[Tensor, Any], tuple[Tensor, Any]]


def _channels(blocks: Sequence[Any], weights: _Weights) -> list[_Channel]:
    return [_channel(block, weights) for block in blocks]


def _channel(block: Any, weights: _Weights) -> _Channel:
    """A channel for [B, D]: levels side by side are one stage, levels in a chain one each."""
    match block:
        case FeedForward():
            stages = [_Stage(block.norm, [block.mlp], None, weights)]
        case Parallel():
            stages = [_Stage(block.norm, list(block.mlps), block.weight.detach(), weights)]
        case Chain():
            pairs = zip(block.norms, block.mlps, strict=True)
            stages = [_Stage(norm, [mlp], None, weights) for norm, mlp in pairs]
        case _:

            def read(x: Tensor, state: Any) -> tuple[Tensor, Any]:
                y, state = block(x.unsqueeze(1), state)
                return y[:, 0], state

            return read

    def through(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        for stage in stages:
            x = stage(x)
        return x, state

    return through


class _Stage:
    """`x + sum_i share_i mlp_i(norm(x))` as two products."""

    def __init__(
        self, norm: Any, mlps: Sequence[Any], shares: Tensor | None, weights: _Weights
    ) -> None:
        def standing(layers: Sequence[LevelLinear]) -> list[Tensor]:
            """[1 or B, Do, Di] each, of as many sequences."""
            found = [weights(layer.weight) for layer in layers]
            found = [each if each.dim() == 3 else each.unsqueeze(0) for each in found]
            batch = max(len(each) for each in found)
            return [each.expand(batch, -1, -1) for each in found]

        gates = [mlp.gate for mlp in mlps if isinstance(mlp, SwiGLU)]
        self.activation: Callable[[Tensor], Tensor] = silu
        if isinstance(mlps[0], MLP):
            self.activation = ACTIVATIONS[mlps[0].activation]
        self.gated, self.norm = bool(gates), _Norm(norm)
        inward = torch.cat(standing([*gates, *(mlp.up for mlp in mlps)]), 1)
        inward = (inward * self.norm.weight).mT  # [b, D, F or 2 F]
        down = standing([mlp.down for mlp in mlps])
        if shares is not None:
            down = [share * each for share, each in zip(shares.unbind(), down, strict=True)]
        outward = torch.cat(down, 2).mT  # [b, F, D]
        self.each = max(len(inward), len(outward)) > 1  # every sequence has its own
        self.inward = (inward if self.each else inward[0]).contiguous()
        self.outward = (outward if self.each else outward[0]).contiguous()
        self.room = Room(self._places, inward.device)

    def __call__(self, x: Tensor) -> Tensor:
        """In place."""
        rows, as_tokens = self.norm.over_length(x)
        hidden, gate, up = self.room.of(len(x))
        if self.each:
            torch.bmm(as_tokens, self.inward, out=hidden)
            x.unsqueeze(1).baddbmm_(self._act(hidden, gate, up), self.outward)
            return x
        torch.mm(rows, self.inward, out=hidden)
        return x.addmm_(self._act(hidden, gate, up), self.outward)

    def _act(self, hidden: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return silu(gate, inplace=True).mul_(up) if self.gated else self.activation(hidden)

    def _places(self, batch: int) -> tuple[Tensor, ...]:
        """Hidden units, as tokens where every sequence has its own weights, and their halves."""
        shape = (batch, 1) if self.each else (batch,)
        hidden = self.inward.new_empty(*shape, self.inward.shape[-1])
        return hidden, *hidden.tensor_split(2, -1)
