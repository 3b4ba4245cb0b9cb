r"""One chunk of the two-layer scan and its backward pass by hand: matrix products, two inverses.

Legend: N memories (all leading dimensions flattened), C tokens, D width, H hidden width; tokens are
rows. S1 [D, H] and S2 [H, D] are the weights where the chunk starts; `o` is element-wise, a vector
beside a matrix scales its rows.

**Gates** (`tables`, differentiable; `gates` are views into them). With g the running product of
retain in the chunk, `Lb_ts = g_{t-1}/g_s rate_s` (s < t), `cb_s = g_C/g_s rate_s`,
`gp_t = g_{t-1}` and `gC`; for reads `Rb_ts = r_t/g_s rate_s`, `r_t = g_t` and s <= t (after) or
`r_t = g_{t-1}` and s < t (before).
The kernel sees the rate only through these, so its backward pass never divides.

**Write.** `e_t = u_t - S_{t-1} k_t` is what a layer still has to learn when token t comes (DGD);
`nestling.scan.delta.chunk` with `w = rate e`. Layer 2 has inputs X and layer 1 inputs K:

    Z = X S2'   H = sigma(Z)   n = max(1, |H|)   K = H / n   P = K S1'
    U1 = clip(V - X - n P)     A = U1 S1         U2 = clip(sigma'(Z) o A)
    E2 = (I + Lb o X X')^-1 (U2 - gp Z)          E1 = (I + Lb o K K')^-1 (U1 - gp P)
    S2+ = gC S2 + E2' (cb X)                     S1+ = gC S1 + (cb E1)' K

**Read.**

    Zq = (r Q) S2' + (Rb o Q X') E2    Hq = sigma(Zq)    Y = Q + r (Hq S1') + (Rb o Hq K') E1

**Backward of the read**, given dY:

    M1 = dY E1'     dHq = (r dY) S1 + (Rb o M1) K    dS1 = (r dY)' Hq    dK = (Rb o M1)' Hq
    dZq = sigma'(Zq) o dHq     dE1 = (Rb o Hq K')' dY     dE2 = (Rb o Q X')' dZq
    M2 = dZq E2'    dQ = dY + r (dZq S2) + (Rb o M2) X    dS2 = dZq' (r Q)    dX = (Rb o M2)' Q
    dRb = Hq K' o M1 + Q X' o M2     dr = rows of dY o (Hq S1') + Q o (dZq S2)

**Backward of the write**, given dS1+ and dS2+ (and the above, which adds):

    dE2 += (cb X) dS2+'   dE1 += cb (K dS1+')   dcb = rows of X o (E2 dS2+) + E1 o (K dS1+')
    B = (I + Lb o Gram)^-T dE    J = B E'    dLb = -sum Gram o J    (each layer)
    dX += cb (E2 dS2+) - (Lb o J2 + its transpose) X
    dK += (cb E1) dS1+ - (Lb o J1 + its transpose) K
    dgp = -rows of B1 o P + B2 o Z         dgC = <S1, dS1+> + <S2, dS2+>
    through both clips: B2 -> F2, then dA = sigma'(Z) o F2,  B1 + dA S1' -> F1 = dV
    dP = -gp B1 - n F1    dn = -rows of F1 o P    (dot product: without the F1 terms)
    dK += dP S1           dH = dK / n + [n > 1] (dn - (dK . K) / n) K
    dZ = sigma'(Z) o dH + sigma''(Z) o A o F2 - gp B2
    dX += dZ S2 - F1      dS2 += dZ' X + gC dS2+     dS1 += dP' K + U1' dA + gC dS1+

**Several memories that share x, rate and retain** (self-modifying Titans, Eq. 83-93): compute
`tables` and `first_layer` once, repeat them along N, call `write` on the stack of all memories and
`read` on those that are read; their backward passes return the gradient of every input, to be
summed over the memories. x and v may themselves come from chunk-start weights: hand dx and dv on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestling.activations import Activation
from nestling.scan.numerics import Workspace, decay, unit_inverse


class Variant(NamedTuple):
    """The variant: what `scan_mlp` takes as options."""

    squared: bool  # l2, else dot
    erase: bool
    clip: float | None
    bound: bool
    sigma: Activation


class ChunkGates(NamedTuple):
    """Everything a chunk needs of rate and retain."""

    Lb: Tensor  # [N, C, C]
    Rb: Tensor  # [N, C, C]
    cb: Tensor  # [N, C, 1]
    r: Tensor  # [N, C, 1]
    gp: Tensor  # [N, C, 1]
    gC: Tensor  # [N, 1, 1]


class Chunk(NamedTuple):
    """The tokens of a chunk."""

    x: Tensor  # [N, C, D]
    v: Tensor  # [N, C, D]
    q: Tensor | None  # [N, C, D]


class FirstLayer(NamedTuple):
    """Layer 2's products of its inputs; they do not depend on the weights."""

    gram: Tensor | None  # [N, C, C]: X X'
    inverse: Tensor | None  # [N, C, C]
    qx: Tensor | None  # [N, C, C]: Q X'


class TwoLayers(NamedTuple):
    """Both layers, or their gradients."""

    s1: Tensor  # [N, D, H]
    s2: Tensor  # [N, H, D]


class SavedWrite(NamedTuple):
    """The results of `write` that the reads and the backward pass use."""

    z: Tensor  # [N, C, H]
    gate: Tensor  # [N, C, H]
    back: Tensor  # [N, C, H]: A
    e2: Tensor  # [N, C, H]
    e1: Tensor  # [N, C, D]
    u1: Tensor  # [N, C, D]
    p: Tensor  # [N, C, D]
    size: Tensor | None  # [N, C, 1]: n
    keep1: Tensor | None  # [N, C, 1]: factor of the clip
    keep2: Tensor | None  # [N, C, 1]
    gram: Tensor | None  # [N, C, C]: K K'
    inverse: Tensor | None  # [N, C, C]


def hidden(saved: SavedWrite, how: Variant) -> Tensor:
    """K, layer 1's inputs, once more."""
    h = how.sigma.value(saved.z, saved.gate)
    return h if saved.size is None else h.div_(saved.size)


class SavedRead(NamedTuple):
    """The results of `read` that the backward pass uses."""

    z: Tensor  # [N, C, H]: Zq
    gate: Tensor  # [N, C, H]
    qk: Tensor  # [N, C, C]: Hq K'
    f: Tensor  # [N, C, D]: Hq S1'


class _Tables(torch.autograd.Function):
    """`(rate, retain) -> (g, rated)`; the backward pass has no division, so retain may be 0."""

    @staticmethod
    def forward(ctx: Any, rate: Tensor, retain: Tensor) -> tuple[Tensor, Tensor]:
        g, table = decay(retain, Workspace(retain, retain.dtype))
        ctx.save_for_backward(rate, g, table)
        return g, table * rate.unsqueeze(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg: Tensor, drated: Tensor) -> tuple[Tensor, Tensor]:
        rate, g, table = ctx.saved_tensors
        drate = (drated * table).sum(-2)
        # table_ts = table_tr retain_r table_{r-1,s} for s < r <= t, and g_t is column s = 0
        later = table[:, 1:].mT
        inner = torch.bmm(later, drated[:, 1:]).mul_(table[:, :-1]).mul_(rate.unsqueeze(-2))
        outer = torch.bmm(later, dg[:, 1:].unsqueeze(-1)).squeeze(-1)
        return drate, inner.sum(-1).addcmul_(outer, g[:, :-1])


def tables(rate: Tensor, retain: Tensor) -> tuple[Tensor, Tensor]:
    """Of chunks `[N, C]`: running products of retain `[N, C + 1]`, from 1 on, and
    `g_t/g_s rate_s`, t = 0..C, s = 1..C, zero where s > t: `[N, C + 1, C]`. Differentiable."""
    return _Tables.apply(rate, retain)


def gates(g: Tensor, rated: Tensor, after: bool) -> ChunkGates:
    """Views into the tables of a chunk, or into their gradients."""
    reads = slice(1, None) if after else slice(None, -1)
    return ChunkGates(
        rated[:, :-1], rated[:, reads], rated[:, -1].unsqueeze(-1),
        g[:, reads].unsqueeze(-1), g[:, :-1].unsqueeze(-1), g[:, -1:].unsqueeze(-1),
    )  # fmt: skip


def _inverse(lower: Tensor) -> Tensor:
    """`(I + lower)^-1`."""
    return unit_inverse(lower, torch.zeros_like(lower), Workspace(lower, lower.dtype))


def first_layer(x: Tensor, q: Tensor | None, lower: Tensor, erase: bool) -> FirstLayer:
    """Gram matrix, inverse and query products of layer 2."""
    gram = torch.bmm(x, x.mT) if erase else None
    inverse = _inverse(lower * gram) if gram is not None else None
    return FirstLayer(gram, inverse, torch.bmm(q, x.mT) if q is not None else None)


def _clip(error: Tensor, most: float | None) -> tuple[Tensor, Tensor | None]:
    if most is None:
        return error, None
    keep = most / torch.linalg.vector_norm(error, dim=-1, keepdim=True).clamp_min(most)
    return error.mul_(keep), keep


def _clip_backward(grad: Tensor, u: Tensor, keep: Tensor | None, most: float | None) -> Tensor:
    """`keep (grad - [keep < 1] (grad . u) u / most^2)`."""
    if keep is None or most is None:
        return grad
    along = _rows(grad, u).mul_(keep < 1).div_(-(most**2))
    return torch.addcmul(grad, u, along).mul_(keep)


def _rows(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def write(
    w: TwoLayers, c: Chunk, g: ChunkGates, first: FirstLayer, how: Variant
) -> tuple[TwoLayers, SavedWrite, Tensor]:
    """The weights after the chunk, what is worth keeping, and K (Eq. 88, 90 layer by layer)."""
    s1, s2 = w
    z = torch.bmm(c.x, s2.mT)
    gate = how.sigma.gate(z)
    k = how.sigma.value(z, gate)
    size = None
    if how.bound:
        size = torch.linalg.vector_norm(k, dim=-1, keepdim=True).clamp_min_(1.0)
        k.div_(size)
    p = torch.bmm(k, s1.mT)
    error = c.v.clone()
    if how.squared:
        error.sub_(c.x).sub_(p if size is None else p * size)
    u1, keep1 = _clip(error, how.clip)
    back = torch.bmm(u1, s1)
    u2, keep2 = _clip(how.sigma.slope(z, gate).mul_(back), how.clip)
    e1, e2, gram, inverse = u1, u2, None, None
    if how.erase and first.inverse is not None:
        gram = torch.bmm(k, k.mT)
        one = torch.eye(c.x.shape[1], dtype=z.dtype, device=z.device).expand_as(gram)
        lower = g.Lb * gram  # the unit diagonal is implied
        inverse = torch.linalg.solve_triangular(lower, one, upper=False, unitriangular=True)
        e1 = torch.bmm(inverse, torch.addcmul(u1, p, g.gp, value=-1.0))
        e2 = torch.bmm(first.inverse, u2.addcmul_(z, g.gp, value=-1.0))
    new1 = (s1 * g.gC).baddbmm_((e1 * g.cb).mT, k)
    new2 = (s2 * g.gC).baddbmm_(e2.mT, c.x * g.cb)
    saved = SavedWrite(z, gate, back, e2, e1, u1, p, size, keep1, keep2, gram, inverse)
    return TwoLayers(new1, new2), saved, k


def read(
    w: TwoLayers,
    c: Chunk,
    g: ChunkGates,
    first: FirstLayer,
    e1: Tensor,
    e2: Tensor,
    k: Tensor,
    how: Variant,
) -> tuple[Tensor, SavedRead]:
    """Reads at every token: two composed reads (Eq. 88, 91)."""
    if c.q is None or first.qx is None:
        raise ValueError("read needs queries")
    z = torch.bmm(c.q * g.r, w.s2.mT).baddbmm_(first.qx * g.Rb, e2)
    gate = how.sigma.gate(z)
    h = how.sigma.value(z, gate)
    f, qk = torch.bmm(h, w.s1.mT), torch.bmm(h, k.mT)
    y = torch.addcmul(c.q, f, g.r).baddbmm_(qk * g.Rb, e1)
    return y, SavedRead(z, gate, qk, f)


class Adjoint(NamedTuple):
    """The gradients that the backward of the read hands to the backward of the write."""

    weights: TwoLayers
    k: Tensor  # [N, C, H]
    e1: Tensor  # [N, C, D]
    e2: Tensor  # [N, C, H]
    x: Tensor  # [N, C, D]


class ReadGrads(NamedTuple):
    """Gradients of what only the read uses."""

    q: Tensor  # [N, C, D]
    Rb: Tensor  # [N, C, C]
    r: Tensor  # [N, C, 1]


def read_backward(
    dy: Tensor, w: TwoLayers, c: Chunk, g: ChunkGates, first: FirstLayer, saved: SavedRead,
    e1: Tensor, e2: Tensor, k: Tensor, how: Variant,
) -> tuple[ReadGrads, Adjoint]:  # fmt: skip
    """See the module's docstring."""
    if c.q is None or first.qx is None:
        raise ValueError("read_backward needs queries")
    h = how.sigma.value(saved.z, saved.gate)
    scaled = dy * g.r
    m1 = torch.bmm(dy, e1.mT)
    k1 = m1 * g.Rb
    dh = torch.bmm(scaled, w.s1).baddbmm_(k1, k)
    ds1, dk = torch.bmm(scaled.mT, h), torch.bmm(k1.mT, h)
    de1 = torch.bmm((saved.qk * g.Rb).mT, dy)
    dz = dh.mul_(how.sigma.slope(saved.z, saved.gate))
    m2 = torch.bmm(dz, e2.mT)
    k2 = m2 * g.Rb
    through = torch.bmm(dz, w.s2)
    dq = torch.addcmul(dy, through, g.r).baddbmm_(k2, c.x)
    ds2 = torch.bmm(dz.mT, c.q * g.r)
    de2 = torch.bmm((first.qx * g.Rb).mT, dz)
    dr = _rows(dy, saved.f).add_(_rows(c.q, through))
    d_rb = m1.mul_(saved.qk).addcmul_(m2, first.qx)
    adjoint = Adjoint(TwoLayers(ds1, ds2), dk, de1, de2, torch.bmm(k2.mT, c.q))
    return ReadGrads(dq, d_rb, dr), adjoint


class WriteGrads(NamedTuple):
    """Gradients of what the write uses."""

    weights: TwoLayers
    x: Tensor  # [N, C, D]
    v: Tensor  # [N, C, D]
    Lb: Tensor | None  # [N, C, C]
    cb: Tensor  # [N, C, 1]
    gp: Tensor | None  # [N, C, 1]
    gC: Tensor  # [N, 1, 1]


def write_backward(
    d: TwoLayers, add: Adjoint | None, w: TwoLayers, c: Chunk, g: ChunkGates, first: FirstLayer,
    saved: SavedWrite, k: Tensor, how: Variant,
) -> WriteGrads:  # fmt: skip
    """Gradients of a chunk's inputs from those of its end and of its reads; overwrites `add`."""
    (s1, s2), (d1, d2), s = w, d, saved
    y1, y2 = torch.bmm(k, d1.mT), torch.bmm(s.e2, d2)  # [N, C, D]
    scaled = c.x * g.cb
    if add is None:
        de1, de2 = y1 * g.cb, torch.bmm(scaled, d2.mT)
        dk, dx = torch.bmm(s.e1 * g.cb, d1), y2 * g.cb
        n1, n2 = d1 * g.gC, d2 * g.gC
    else:
        de1, de2 = add.e1.addcmul_(y1, g.cb), add.e2.baddbmm_(scaled, d2.mT)
        dk, dx = add.k.baddbmm_(s.e1 * g.cb, d1), add.x.addcmul_(y2, g.cb)
        n1, n2 = add.weights.s1.addcmul_(d1, g.gC), add.weights.s2.addcmul_(d2, g.gC)
    dcb = _rows(c.x, y2).add_(_rows(s.e1, y1))
    dgc = (_rows(s1, d1).sum(-2, keepdim=True)).add_(_rows(s2, d2).sum(-2, keepdim=True))
    b1, b2, dp, d_lb, dgp = de1, de2, None, None, None
    if s.inverse is not None and s.gram is not None and first.gram is not None:
        assert first.inverse is not None  # made together with the Gram matrix
        b1, b2 = torch.bmm(s.inverse.mT, de1), torch.bmm(first.inverse.mT, de2)
        dgp = _rows(b1, s.p).add_(_rows(b2, s.z)).neg_()
        dp = (b1 * g.gp).neg_()
        j1, j2 = torch.bmm(b1, s.e1.mT), torch.bmm(b2, s.e2.mT)
        t1, t2 = j1 * g.Lb, j2 * g.Lb
        dk.baddbmm_(t1 + t1.mT, k, alpha=-1.0)
        dx.baddbmm_(t2 + t2.mT, c.x, alpha=-1.0)
        d_lb = j1.mul_(s.gram).addcmul_(j2, first.gram).neg_()
    slope = how.sigma.slope(s.z, s.gate)
    f2 = b2
    if s.keep2 is not None:
        f2 = _clip_backward(b2, (slope * s.back).mul_(s.keep2), s.keep2, how.clip)
    da = slope * f2
    f1 = _clip_backward(torch.baddbmm(b1, da, s1.mT), s.u1, s.keep1, how.clip)
    n1.baddbmm_(s.u1.mT, da)
    dsize = None
    if how.squared:
        dx.sub_(f1)
        pushed = f1 if s.size is None else f1 * s.size
        dp = pushed.neg() if dp is None else dp.sub_(pushed)
        dsize = _rows(f1, s.p).neg_()
    if dp is not None:
        dk.baddbmm_(dp, s1)
        n1.baddbmm_(dp.mT, k)
    dh = dk if s.size is None else _bound_backward(dk, k, s.size, dsize)
    dz = dh.mul_(slope).addcmul_(torch.mul(s.back, f2, out=da), how.sigma.curve(s.z, s.gate))
    if dgp is not None:
        dz.addcmul_(b2, g.gp, value=-1.0)
    dx.baddbmm_(dz, s2)
    n2.baddbmm_(dz.mT, c.x)
    return WriteGrads(TwoLayers(n1, n2), dx, f1, d_lb, dcb, dgp, dgc)


def _bound_backward(dk: Tensor, k: Tensor, size: Tensor, dsize: Tensor | None) -> Tensor:
    """`dk / n + [n > 1] (dn - (dk . k) / n) k`, in place."""
    along = _rows(dk, k).div_(size).neg_()
    if dsize is not None:
        along.add_(dsize)
    return dk.div_(size).addcmul_(k, along.mul_(size > 1))
