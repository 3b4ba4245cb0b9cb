"""Fast weights: differences from a model's weights, kept, added up, and read with.

**Reading.** Inside `with Reading(...)` every linear layer whose weight is a slot answers with `W0 +
sum_l Delta_l`, each sequence with its own; the model is not touched. The layers of our own levels
ask for it (`LevelLinear`); in other models every operation is looked at (`_Watch`). Both belong to
the thread, so other threads may use the same model at the same time. A slot nobody has written to
runs the model's own operation. When recording, each such layer's input x and output y are kept: the
gradient by the weight is then `delta^T x` with `delta = dL/dy`, per sequence, and no gradient of
the base weights is ever formed.

**Differences.** A difference is None (zero), a Tensor [B, Do, Di], or `Factors` (left right^T).
Truncation keeps the best approximation of the given rank, by whichever way is cheapest:

- few columns: QR of both sides and the singular values of what is between (`_exact`);
- more: with the Gram matrices `gl = left^T left` and `gr = right^T right` every product with
  `M M^T` is one with `gr gl` in the space of the columns, `M M^T (left a) = left (gr gl a)`, so
  subspace iteration touches only small matrices (`_by_grams`);
- so many that the matrix itself is smaller: subspace iteration on it (`_by_matrix`).

Subspace iteration carries a few more columns than asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nestling.continuum.layers import NOW, LevelLinear


class Part(NamedTuple):
    """One level's part of a slot: all of it, or `start:stop` along one axis.

    `axis` 0 are the layer's outputs (rows of W), 1 its inputs (columns); None is the whole matrix.
    """

    level: int  # index into the continuum's levels
    axis: int | None = None
    start: int = 0
    stop: int = 0


class Owned(NamedTuple):
    """One part of one slot, as its level sees it."""

    slot: int  # index into the slots
    part: Part

    @property
    def key(self) -> tuple[int, int | None, int, int]:
        """The piece of the model this is, whichever level owns it."""
        return self.slot, self.part.axis, self.part.start, self.part.stop


class Factors(NamedTuple):
    """A compact matrix `left right^T`."""

    left: Tensor  # [B, Do, R]
    right: Tensor  # [B, Di, R]


Fast = Tensor | Factors | None
"""One part's difference [B, Do, Di]; None is zero, as long as nothing was learned."""


EXTRA = 8
"""Columns of a subspace beyond the rank asked for."""

PASS = 22
"""Operations that take as long as writing a number and reading it again, as measured."""


def dense(fast: Tensor | Factors) -> Tensor:
    """The matrix [B, Do, Di]."""
    return fast.left @ fast.right.mT if isinstance(fast, Factors) else fast


def read(x: Tensor, fast: Tensor | Factors) -> Tensor:
    """`x Delta^T` sequence by sequence: [B, n, Di] -> [B, n, Do]."""
    if isinstance(fast, Factors):
        return (x @ fast.right.to(x.dtype)) @ fast.left.mT.to(x.dtype)
    return torch.bmm(x, fast.mT.to(x.dtype))


def smaller(columns: int, outputs: int, inputs: int) -> bool:
    """Whether factors of so many columns take less room than the matrix."""
    return columns * (outputs + inputs) < outputs * inputs


def norm2(fast: Fast) -> Tensor | float:
    """The squared Frobenius norm of each sequence's difference: [B]."""
    if fast is None:
        return 0.0
    if isinstance(fast, Factors):
        return _norm2(*fast).clamp(min=0)
    return torch.linalg.vector_norm(fast, dim=(-2, -1)).square()


def scale(fast: Fast, factor: Tensor | float) -> Fast:
    """`factor Delta`; the factor is a number or [B, 1, 1]."""
    if isinstance(fast, Factors):
        return Factors(fast.left * factor, fast.right)
    return None if fast is None else fast * factor


def turn(fast: Fast, by: Tensor) -> Fast:
    """`Delta R` with a symmetric R [Di, Di]."""
    if fast is None:
        return None
    if isinstance(fast, Factors):
        return Factors(fast.left, by.to(fast.right.dtype) @ fast.right)
    return fast @ by.to(fast.dtype)


def add(one: Fast, other: Fast) -> Fast:
    """The sum of two differences; factors are joined as long as the matrix is not smaller."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Factors) and isinstance(other, Factors):
        left, right = (torch.cat(sides, -1) for sides in zip(one, other, strict=True))
        if smaller(left.shape[-1], left.shape[-2], right.shape[-2]):
            return Factors(left, right)
        return left @ right.mT
    if isinstance(one, Factors):
        one, other = other, one
    if isinstance(other, Factors):
        return torch.baddbmm(dense(one), other.left, other.right.mT)
    return dense(one) + other


def handier(columns: int, outputs: int, inputs: int, readers: int = 1) -> bool:
    """Whether a gradient of so many columns is better formed once than kept in factors.

    In factors every reader adds it by a product, of `columns Do Di` operations (one of these there
    is in any case), and its norm takes Gram matrices, of `columns^2 (Do + Di)`. Formed, it has to
    be written and read by each, which takes as long as some `PASS` operations on every number.
    """
    size = outputs * inputs
    kept = columns**2 * (outputs + inputs) + (readers - 1) * columns * size
    return kept > readers * PASS * size or not smaller(columns, outputs, inputs)


def handy(fast: Fast) -> Fast:
    """A gradient in the form that is handier for one reader."""
    if not isinstance(fast, Factors):
        return fast
    outputs, inputs, columns = fast.left.shape[-2], *fast.right.shape[-2:]
    return dense(fast) if handier(columns, outputs, inputs) else fast


def step(
    old: Tensor | None,
    gradient: Tensor | Factors,
    strength: float,
    retain: float,
    *,
    in_place: bool = False,
) -> Tensor:
    """`retain Delta + strength G`: [B, Do, Di]; for a gradient in factors in one product."""
    if isinstance(gradient, Tensor):
        if old is None:
            return gradient * strength
        kept = old if in_place else old.clone()
        return (kept if retain == 1.0 else kept.mul_(retain)).add_(gradient, alpha=strength)
    left, right = gradient.left, gradient.right.mT
    if old is None:
        return (left * strength) @ right
    out = old if in_place else None
    return torch.baddbmm(old, left, right, beta=retain, alpha=strength, out=out)


def merge(base: Tensor, parts: list[tuple[Part, Tensor]]) -> Tensor:
    """`W0 + sum_l Delta_l`: [Do, Di], or [B, Do, Di] for several sequences."""
    batch = parts[0][1].shape[0]
    exact = torch.promote_types(base.dtype, parts[0][1].dtype)
    total = base.to(exact)
    fresh = False
    for part, fast in parts:
        fast = fast[0] if batch == 1 else fast
        if part.axis is None:
            total = total.add_(fast) if fresh and not fast.requires_grad else total + fast
        else:
            if not fresh:
                total = (total if batch == 1 else total.expand(batch, -1, -1)).clone()
            total.narrow(-2 + part.axis, part.start, part.stop - part.start).add_(fast)
        fresh = not total.requires_grad
    return total.to(base.dtype)


def weight_of(model: nn.Module, name: str) -> tuple[Tensor, bool]:
    """The matrix behind a parameter's name, and whether it is stored inputs first (Conv1D)."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
        weight: Any = getattr(module, leaf)
    except AttributeError as error:
        raise ValueError(f"slots: the model has no parameter {name!r}") from error
    transposed = type(module).__name__ == "Conv1D"
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"slots: {name!r} must be a floating point matrix of a linear layer")
    if not (transposed or isinstance(module, nn.Linear)):
        raise ValueError(
            f"slots: {name!r} belongs to a {type(module).__name__}; a slot is the weight of an"
            " nn.Linear or a Conv1D"
        )
    return weight, transposed


def cut(weight: Tensor, part: Part) -> Tensor:
    """A part of a matrix [..., Do, Di]: a view."""
    if part.axis is None:
        return weight
    return weight.narrow(-2 + part.axis, part.start, part.stop - part.start)


FEW = 32
"""Up to so many tokens a full difference is read beside the base, not added into it."""


_TRANSPOSES = frozenset([torch.Tensor.T.__get__, torch.Tensor.mT.__get__, torch.Tensor.t, torch.t])  # type: ignore[attr-defined]
_PRODUCTS = frozenset([torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul])
"""How layers with a forward pass of their own (Falcon) read a weight: `x @ weight.T`."""


class LiveSlot(NamedTuple):
    """A slot as it stands now: the stored weight, and the differences of its parts."""

    weight: Tensor  # as the model stores it
    constant: Tensor  # the same without a gradient
    transposed: bool
    asks: bool  # its layer is a `LevelLinear`
    parts: list[tuple[Part, Tensor | Factors]]

    def base(self, *, constant: bool) -> Tensor:
        """The weight as [Do, Di]."""
        weight = self.constant if constant else self.weight
        return weight.mT if self.transposed else weight

    def whole(self, *, constant: bool) -> Tensor:
        """`W0 + sum_l Delta_l`: [Do, Di], or [B, Do, Di] for several sequences."""
        base, full = self.base(constant=constant), [(p, dense(f)) for p, f in self.parts]
        return merge(base, full) if full else base


class Place(NamedTuple):
    """Where a slot's weight is found again, without walking through the model."""

    parent: nn.Module  # of the layer
    name: str  # the layer's, there
    leaf: str  # the weight's, in the layer
    transposed: bool

    def slot(self) -> LiveSlot:
        """The slot with the weight that is there now, and no differences."""
        layer: Any = self.parent._modules[self.name] if self.name else self.parent
        weight = layer._parameters.get(self.leaf)
        weight = getattr(layer, self.leaf) if weight is None else weight
        asks = isinstance(layer, LevelLinear)
        return LiveSlot(weight, weight.detach(), self.transposed, asks, [])


def place_of(model: nn.Module, name: str) -> Place:
    """The place of a parameter's name; "weight" alone is the model's own."""
    path, _, leaf = name.rpartition(".")
    above, _, layer = path.rpartition(".")
    return Place(model.get_submodule(above), layer, leaf, weight_of(model, name)[1])


class Record(NamedTuple):
    """One call of a slot's layer."""

    x: Tensor  # [B, n, Di]
    y: Tensor  # what the layer returned; its last dimension is Do


class Reading:
    """Fast weights in place of the slots' weights, for this thread; see the module's docstring.

    constant: the slots' own weights get no gradient.
    """

    def __init__(
        self, slots: Sequence[LiveSlot], batch: int, *, record: bool = False, constant: bool = True
    ) -> None:
        self.numbers = {id(slot.weight): number for number, slot in enumerate(slots)}
        self.slots, self.batch = slots, batch
        self.record, self.constant = record, constant
        self.records: list[list[Record]] = [[] for _ in slots]
        self._watch = None if all(slot.asks for slot in slots) else _Watch(self)
        self._before: Any = None

    def __enter__(self) -> Reading:
        NOW.depth += 1
        if self._watch is not None:
            self._watch.__enter__()
        else:
            self._before, NOW.reading = NOW.reading, self
        return self

    def __exit__(self, *error: Any) -> None:
        NOW.depth -= 1
        if self._watch is not None:
            self._watch.__exit__(*error)
        else:
            NOW.reading, self._before = self._before, None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Answer for a layer that asks: with its fast weights, if its weight is a slot."""
        number = self.numbers.get(id(weight))
        if number is None:
            return functional.linear(x, weight, bias)
        return self.answer(number, x, bias, lambda: functional.linear(x, weight, bias))

    def answer(
        self, number: int, x: Tensor, bias: Tensor | None, plain: Callable[[], Tensor]
    ) -> Tensor:
        """The output of a slot's layer; `plain` is the model's own operation."""
        slot = self.slots[number]
        rows = _three(x, self.batch)  # [B, n, Di]
        together = [(p, d) for p, d in slot.parts if isinstance(d, Tensor)]
        beside = [(p, d) for p, d in slot.parts if isinstance(d, Factors)]
        aside: list[tuple[Part, Tensor | Factors]] = [*beside]
        if rows.shape[1] * self.batch <= FEW and not self.record:
            together, aside = [], [*beside, *together]
        if together:
            weight = merge(slot.base(constant=self.constant), together)
            y = _linear(x, rows, weight, bias)
        elif self.constant and slot.weight.requires_grad and torch.is_grad_enabled():
            y = functional.linear(x, slot.base(constant=True), bias)
        else:
            y = plain()
        for part, fast in aside:
            seen = rows[..., part.start : part.stop] if part.axis == 1 else rows
            y = y + _spread(read(seen, fast), part, y.shape).to(y.dtype)
        if self.record:
            if not y.requires_grad:
                y.requires_grad_()
            self.records[number].append(Record(rows, y))
        return y


class _Watch(TorchFunctionMode):
    """Looks at every operation of a model for products with a slot's weight."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.reading, self.numbers = reading, reading.numbers
        self.turned: dict[int, tuple[Tensor, int]] = {}  # transposes of slots' weights, by id

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, answer = kwargs or {}, self.reading.answer
        if func is functional.linear and len(args) > 1 and id(args[1]) in self.numbers:
            number = self.numbers[id(args[1])]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return answer(number, args[0], bias, lambda: func(*args, **kwargs))
        if func is torch.addmm and len(args) > 2 and id(args[2]) in self.numbers and not kwargs:
            number = self.numbers[id(args[2])]
            return answer(number, args[1], args[0], lambda: func(*args))
        if func in _TRANSPOSES and len(args) == 1 and id(args[0]) in self.numbers:
            turned = func(*args)
            self.turned[id(turned)] = turned, self.numbers[id(args[0])]
            return turned
        if func in _PRODUCTS and len(args) == 2 and id(args[1]) in self.turned:
            number = self.turned[id(args[1])][1]
            return answer(number, args[0], None, lambda: func(*args))
        return func(*args, **kwargs)


def _three(x: Tensor, batch: int) -> Tensor:
    """[B, n, D], where more or fewer dimensions were given."""
    alike = x.dim() == 3 and x.shape[0] == batch
    return x if alike else x.reshape(batch, -1, x.shape[-1])


def _linear(x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer with one weight for all ([Do, Di]) or one per sequence ([B, Do, Di])."""
    if weight.dim() == 2:
        return functional.linear(x, weight, bias)
    y = torch.bmm(rows, weight.mT)
    y = y if bias is None else y + bias
    return y if y.shape[:-1] == x.shape[:-1] else y.reshape(*x.shape[:-1], weight.shape[-2])


def _spread(y: Tensor, part: Part, shape: torch.Size) -> Tensor:
    """A part's answer [B, n, Do'] in the place of the whole layer's."""
    if part.axis == 0:
        y = functional.pad(y, (part.start, shape[-1] - part.stop))
    return y.reshape(shape)


def truncate(fast: Tensor | Factors, rank: int) -> tuple[Factors, Tensor]:
    """The best approximation of at most `rank` columns, and the norm of what it drops: [B]."""
    return truncate_all([fast], rank)[0]


def truncate_all(fasts: Sequence[Tensor | Factors], rank: int) -> list[tuple[Factors, Tensor]]:
    """`truncate` of several differences: small matrices of one size are worked on together."""
    done: dict[int, tuple[Factors, Tensor]] = {}
    alike: dict[int, list[int]] = {}
    for place, fast in enumerate(fasts):
        columns = fast.left.shape[-1] if isinstance(fast, Factors) else 0
        if not _finite(fast):  # the decompositions below raise where a caller wants to see it
            done[place] = _lost(fast, rank)
            continue
        if isinstance(fast, Tensor):
            done[place] = _by_matrix(fast, rank)
        elif columns <= rank:
            done[place] = fast, fast.left.new_zeros(fast.left.shape[0])
        elif columns <= max(2 * rank, rank + EXTRA):
            done[place] = _exact(*fast, rank)
        elif smaller(columns, fast.left.shape[-2], fast.right.shape[-2]):
            alike.setdefault(columns, []).append(place)
        else:
            done[place] = _by_matrix(dense(fast), rank)
    for places in alike.values():
        some = [fast for place in places if isinstance(fast := fasts[place], Factors)]
        done |= zip(places, _by_grams(some, rank), strict=True)
    return [done[place] for place in range(len(fasts))]


def _finite(fast: Tensor | Factors) -> bool:
    return all(
        bool(each.isfinite().all()) for each in ([fast] if isinstance(fast, Tensor) else fast)
    )


def _lost(fast: Tensor | Factors, rank: int) -> tuple[Factors, Tensor]:
    """A difference that is not finite, in the form of its rank: every number is nan."""
    outputs, inputs = fast.shape[-2:] if isinstance(fast, Tensor) else (s.shape[-2] for s in fast)
    like = fast if isinstance(fast, Tensor) else fast.left
    sides = (like.new_full((like.shape[0], size, rank), torch.nan) for size in (outputs, inputs))
    return Factors(*sides), like.new_full((like.shape[0],), torch.nan)


def _exact(left: Tensor, right: Tensor, rank: int) -> tuple[Factors, Tensor]:
    q, r = torch.linalg.qr(left)
    p, s = torch.linalg.qr(right)
    u, sizes, v = torch.linalg.svd(r @ s.mT, full_matrices=False)
    root = sizes[..., None, :rank].sqrt()
    kept = Factors(q @ (u[..., :rank] * root), p @ (v.mT[..., :rank] * root))
    return kept, torch.linalg.vector_norm(sizes[..., rank:], dim=-1)


def _by_grams(many: list[Factors], rank: int) -> list[tuple[Factors, Tensor]]:
    """Subspace iteration in the space of the columns, in float64, for all at once."""
    gl = torch.cat([left.mT @ left for left, _ in many]).double()  # [all B, m, m]
    gr = torch.cat([right.mT @ right for _, right in many]).double()
    a = _start(gl.shape[-1], rank, gl).expand(gl.shape[0], -1, -1)
    for _ in range(2):
        for _ in range(2):
            a = gr @ (gl @ a)
        a, _ = torch.linalg.qr(a)
    sizes, turn = torch.linalg.eigh(a.mT @ gl @ a)
    a = a @ (turn * _inverse(sizes).sqrt().unsqueeze(-2))  # left a is orthonormal
    c = gl @ a  # M^T (left a) = right c
    squares, turn = torch.linalg.eigh(c.mT @ gr @ c)
    best = turn[..., -rank:]
    root = squares[..., None, -rank:].clamp(min=0).sqrt().sqrt()
    total, most = (gl * gr).sum((-2, -1)), squares[..., -rank:].sum(-1)
    batch, dtype = many[0].left.shape[0], many[0].left.dtype
    mixed = (a @ best * root).to(dtype), (c @ best * _inverse(root)).to(dtype)
    lost = _dropped(total, most, dtype)
    each = zip(many, *(part.split(batch) for part in (*mixed, lost)), strict=True)
    return [(Factors(f.left @ mine, f.right @ its), gone) for f, mine, its, gone in each]


def _by_matrix(matrix: Tensor, rank: int) -> tuple[Factors, Tensor]:
    """Subspace iteration on the matrix itself."""
    basis, _ = torch.linalg.qr(matrix @ _start(matrix.shape[-1], rank, matrix))
    for _ in range(2):
        back, _ = torch.linalg.qr(matrix.mT @ basis)
        basis, _ = torch.linalg.qr(matrix @ back)
    kept, _ = _exact(basis, matrix.mT @ basis, rank)
    total = torch.linalg.vector_norm(matrix, dim=(-2, -1)).square()
    return kept, _dropped(total, _norm2(*kept), matrix.dtype)


def _start(rows: int, rank: int, like: Tensor) -> Tensor:
    """The same random columns every time: [rows, rank + EXTRA]."""
    generator = torch.Generator().manual_seed(rows)
    start = torch.randn(rows, min(rank + EXTRA, rows), generator=generator, dtype=torch.float64)
    return start.to(like)


def _inverse(sizes: Tensor) -> Tensor:
    """1 / sizes; 0 for what is zero beside the largest."""
    least = sizes.amax(-1, keepdim=True) * torch.finfo(sizes.dtype).eps * sizes.shape[-1]
    return torch.where(sizes > least, 1.0 / sizes, torch.zeros_like(sizes))


def _dropped(total: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm of what is missing, [B]; nothing where the squares differ by rounding only."""
    gap, least = total - kept, 64 * torch.finfo(dtype).eps * total
    return torch.where(gap > least, gap, torch.zeros_like(gap)).sqrt().to(dtype)


def _norm2(left: Tensor, right: Tensor) -> Tensor:
    if not smaller(left.shape[-1], left.shape[-2], right.shape[-2]):
        return torch.linalg.vector_norm(left @ right.mT, dim=(-2, -1)).square()
    return ((left.mT @ left) * (right.mT @ right)).sum((-2, -1))
