"""M3, Muon and AdaMuon: hidden matrices are orthogonalised, everything else takes AdamW.

`labels` tells them apart; a group without `orthogonal` keeps the answer for each of its parameters
under "hidden". AdamW's share of such a group steps with `lr` times `adam_scale`, which
is `adam_lr / lr` as they were given, so that schedulers scale both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.optim.labels import label
from nestling.optim.shell import Group, RuleOptimizer, check_decays, common
from nestling.rules import Rule, adamuon, multiscale, multiscale_literal, muon
from nestling.rules.adam import adam

Betas = tuple[float, float]


class Kind(NamedTuple):
    """How a parameter is stepped: orthogonalised or by AdamW, and whether it is a vector."""

    hidden: bool
    vector: bool


def matrices(
    steps: int,
    eps: float,
    precision: torch.dtype | None,
    orthogonal: bool | None,
    adam_lr: float | None,
    adam_betas: Betas,
) -> dict[str, Any]:
    """The settings of Newton-Schulz, of which parameters take it, and of AdamW for the rest."""
    return {
        "steps": steps,
        "eps": eps,
        "precision": precision,
        "orthogonal": orthogonal,
        "adam_lr": adam_lr,
        "adam_betas": adam_betas,
    }


class OrthogonalOptimizer(RuleOptimizer):
    """The common part of M3, Muon and AdaMuon: what is orthogonalised, and AdamW for the rest."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._together = True  # all first groups are one model's
        super().__init__(params, defaults)
        self._together = False
        self._label([g for g in self.param_groups if g["orthogonal"] is None])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; those of a group that does not say `orthogonal` are told apart."""
        group = {**self.defaults, **param_group}
        if group["orthogonal"] is not None:
            group["orthogonal"] = bool(group["orthogonal"])
            if not group["orthogonal"] and group["adam_lr"] is not None:
                group["lr"] = group["adam_lr"]
        super().add_param_group(group)
        group = self.param_groups[-1]
        group["adam_scale"] = 1.0
        if group["orthogonal"] is None:
            if group["adam_lr"] is not None and float(group["lr"]):
                group["adam_scale"] = float(group["adam_lr"]) / float(group["lr"])
            if not self._together:
                self._label([group])

    def _label(self, groups: list[dict[str, Any]]) -> None:
        """Note for every parameter of the groups whether it is orthogonalised."""
        parameters = [p for group in groups for p in group["params"]]
        names = None
        if groups and all("param_names" in group for group in groups):
            names = [name for group in groups for name in group["param_names"]]
        found = iter(label(parameters, names))
        for group in groups:
            group["hidden"] = [next(found) for _ in group["params"]]

    def kind(self, group: Group, parameter: Tensor) -> Kind:
        """Orthogonalised or not, vector or not."""
        hidden = group["orthogonal"]
        if hidden is None:
            places = (i for i, p in enumerate(group["params"]) if p is parameter)
            hidden = group["hidden"][next(places)]
        return Kind(hidden, parameter.ndim < 2)

    def _kinds(self, group: Group) -> dict[Any, list[Tensor]]:
        if group["orthogonal"] is not None:
            return super()._kinds(group)
        found: dict[Any, list[Tensor]] = {}
        for hidden, parameter in zip(group["hidden"], group["params"], strict=True):
            found.setdefault(Kind(hidden, parameter.ndim < 2), []).append(parameter)
        return found

    def rate(self, group: Group, kind: Kind) -> float | Tensor:
        """`lr`, and for AdamW's share of a group `lr * adam_scale`."""
        same = kind.hidden or group["adam_scale"] == 1.0
        return group["lr"] if same else group["lr"] * group["adam_scale"]

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense."""
        super().check(group)
        rate = group["adam_lr"]
        require(rate is None or rate >= 0, "adam_lr", rate, "None (as lr) or at least 0")
        check_decays("adam_betas", group["adam_betas"])
        require(group["eps"] >= 0, "eps", group["eps"], "a number of at least 0")
        require(group["steps"] >= 1, "steps", group["steps"], "at least 1")
        chosen = group["precision"]
        known = (None, torch.bfloat16, torch.float32, torch.float64)
        require(chosen in known, "precision", chosen, "None, bfloat16, float32 or float64")

    def rule(self, group: Group, kind: Kind) -> Rule:
        """Newton-Schulz for the matrices, AdamW for the rest."""
        if kind.hidden:
            return self.matrix_rule(group)
        beta1, beta2 = group["adam_betas"]
        return adam(beta1, beta2, eps=group["eps"])

    def matrix_rule(self, group: Group) -> Rule:
        """The rule of the orthogonalised parameters."""
        raise NotImplementedError


class M3(OrthogonalOptimizer):
    """Multi-scale momentum Muon (Eq. 75, Algorithm 1): Adam + Muon + two momenta.

    `betas` are those of the fast momentum, the second moment and the slow momentum, which changes
    every `chunk` steps and joins the update with `slow_weight`. Steps have AdamW's size, so a
    learning rate found for AdamW is a good start; scaling all gradients changes nothing.
    `literal=True` is Algorithm 1 as printed: nothing decays, and the step depends on the gradient's
    scale (deviation 10). `precision` is that of Newton-Schulz (None: bfloat16 where it is quicker).
    Give it `param_groups(model)`; `nestling.optim.labels` says what happens to plain parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float, float] = (0.95, 0.99, 0.8),
        slow_weight: float = 0.1,
        chunk: int = 16,
        literal: bool = False,
        weight_decay: float = 0.0,
        steps: int = 5,
        eps: float = 1e-8,
        precision: torch.dtype | None = None,
        orthogonal: bool | None = None,
        adam_lr: float | None = None,
        adam_betas: Betas = (0.9, 0.95),
        maximize: bool = False,
        foreach: bool | None = None,
        master_weights: bool = False,
        compile: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "slow_weight": slow_weight,
            "chunk": chunk,
            "literal": literal,
            **matrices(steps, eps, precision, orthogonal, adam_lr, adam_betas),
            **common(weight_decay, maximize, foreach, master_weights, compile),
        }
        super().__init__(params, defaults)

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense."""
        super().check(group)
        betas, chunk = group["betas"], group["chunk"]
        require(len(betas) == 3, "betas", betas, "three numbers in [0, 1)")
        check_decays("betas", betas)
        require(isinstance(chunk, int) and chunk >= 1, "chunk", chunk, "an int of at least 1")
        require(group["slow_weight"] >= 0, "slow_weight", group["slow_weight"], "at least 0")

    def matrix_rule(self, group: Group) -> Rule:
        """M3's rule (Eq. 75)."""
        beta1, beta2, beta3 = group["betas"]
        make = multiscale_literal if group["literal"] else multiscale
        return make(
            beta1=beta1,
            beta2=beta2,
            beta3=beta3,
            slow_weight=group["slow_weight"],
            chunk=group["chunk"],
            steps=group["steps"],
            eps=group["eps"],
            precision=group["precision"],
        )


class Muon(OrthogonalOptimizer):
    """Muon (Eq. 42): orthogonalised momentum; equal to `torch.optim.Muon` up to rounding.

    `scale` fixes the step's length: "match_rms_adamw" (a rate means what it means for AdamW),
    "original" or "none".
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: str = "match_rms_adamw",
        weight_decay: float = 0.0,
        steps: int = 5,
        eps: float = 1e-8,
        precision: torch.dtype | None = None,
        orthogonal: bool | None = None,
        adam_lr: float | None = None,
        adam_betas: Betas = (0.9, 0.95),
        maximize: bool = False,
        foreach: bool | None = None,
        master_weights: bool = False,
        compile: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "scale": scale,
            **matrices(steps, eps, precision, orthogonal, adam_lr, adam_betas),
            **common(weight_decay, maximize, foreach, master_weights, compile),
        }
        super().__init__(params, defaults)

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense."""
        super().check(group)
        check_decays("momentum", (group["momentum"],))
        self.matrix_rule(group)  # knows the allowed scales

    def matrix_rule(self, group: Group) -> Rule:
        """Muon's rule (Eq. 42)."""
        return muon(
            decay=group["momentum"],
            nesterov=group["nesterov"],
            steps=group["steps"],
            scale=group["scale"],
            precision=group["precision"],
        )


class AdaMuon(OrthogonalOptimizer):
    """AdaMuon (Si, Zhang, Shen 2025), a baseline: Muon over its output's root mean square."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: Betas = (0.95, 0.95),
        nesterov: bool = True,
        weight_decay: float = 0.0,
        steps: int = 5,
        eps: float = 1e-8,
        precision: torch.dtype | None = None,
        orthogonal: bool | None = None,
        adam_lr: float | None = None,
        adam_betas: Betas = (0.9, 0.95),
        maximize: bool = False,
        foreach: bool | None = None,
        master_weights: bool = False,
        compile: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "nesterov": nesterov,
            **matrices(steps, eps, precision, orthogonal, adam_lr, adam_betas),
            **common(weight_decay, maximize, foreach, master_weights, compile),
        }
        super().__init__(params, defaults)

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense."""
        super().check(group)
        check_decays("betas", group["betas"])

    def matrix_rule(self, group: Group) -> Rule:
        """AdaMuon's rule."""
        decay, second_decay = group["betas"]
        return adamuon(
            decay=decay,
            second_decay=second_decay,
            nesterov=group["nesterov"],
            steps=group["steps"],
            eps=group["eps"],
            precision=group["precision"],
        )
