"""M3, Muon and AdaMuon: hidden matrices are orthogonalised, everything else takes AdamW.

A group without `orthogonal` is divided in two when it is added (see `labels`): one with
`orthogonal=True`, one with `orthogonal=False` whose `lr` is `adam_lr`. Every group then has one
rate of its own, and learning rate schedulers scale both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nestling.optim.labels import is_hidden_matrix
from nestling.optim.shell import Group, RuleOptimizer, check_decays, require, settings
from nestling.rules import Rule, adamuon, multiscale, multiscale_literal, muon
from nestling.rules.adam import adam

__all__ = ["M3", "AdaMuon", "Muon"]

Betas = tuple[float, float]


class OrthogonalOptimizer(RuleOptimizer):
    """What M3, Muon and AdaMuon share: the division of parameters, and AdamW for the rest."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; a group that does not say `orthogonal` is divided by shape."""
        group = {**self.defaults, **param_group}
        chosen = group.pop("orthogonal")
        rate = group["lr"] if group["adam_lr"] is None else group["adam_lr"]
        if chosen is not None:
            lr = group["lr"] if chosen else rate
            super().add_param_group({**group, "orthogonal": bool(chosen), "lr": lr})
            return
        params = group["params"]
        params = [params] if hasattr(params, "shape") else list(params)
        hidden = [entry for entry in params if is_hidden_matrix(_tensor(entry))]
        rest = [entry for entry in params if not is_hidden_matrix(_tensor(entry))]
        if hidden or not rest:
            super().add_param_group({**group, "params": hidden, "orthogonal": True})
        if rest:
            super().add_param_group({**group, "params": rest, "orthogonal": False, "lr": rate})

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense."""
        super().check(group)
        rate = group["adam_lr"]
        require(
            "adam_lr", rate, rate is None or rate >= 0, "None (as lr) or a number of at least 0"
        )
        check_decays("adam_betas", group["adam_betas"])
        require("eps", group["eps"], group["eps"] >= 0, "a number of at least 0")
        require("steps", group["steps"], group["steps"] >= 1, "at least 1")

    def rule(self, group: Group, vector: bool) -> Rule:
        """Newton-Schulz for the matrices, AdamW for the rest."""
        if group["orthogonal"]:
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
    scale (deviation 10). See the module about which parameters are orthogonalised.
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
        orthogonal: bool | None = None,
        adam_lr: float | None = None,
        adam_betas: Betas = (0.9, 0.95),
        maximize: bool = False,
        foreach: bool | None = None,
        master_weights: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__(params, settings(locals()))

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense."""
        super().check(group)
        betas, chunk = group["betas"], group["chunk"]
        require("betas", betas, len(betas) == 3, "three numbers in [0, 1)")
        check_decays("betas", betas)
        require("chunk", chunk, isinstance(chunk, int) and chunk >= 1, "an int of at least 1")
        require("slow_weight", group["slow_weight"], group["slow_weight"] >= 0, "at least 0")

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
        )


class Muon(OrthogonalOptimizer):
    """Muon (Eq. 42): orthogonalised momentum; equal to `torch.optim.Muon`, but in float32.

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
        orthogonal: bool | None = None,
        adam_lr: float | None = None,
        adam_betas: Betas = (0.9, 0.95),
        maximize: bool = False,
        foreach: bool | None = None,
        master_weights: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__(params, settings(locals()))

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
        orthogonal: bool | None = None,
        adam_lr: float | None = None,
        adam_betas: Betas = (0.9, 0.95),
        maximize: bool = False,
        foreach: bool | None = None,
        master_weights: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__(params, settings(locals()))

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
        )


def _tensor(entry: Any) -> Any:
    """A parameter, also out of `named_parameters()`."""
    return entry[1] if isinstance(entry, tuple) else entry
