"""DGD on the weights themselves, delta and deep momentum on a memory of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.checks import require
from nestling.optim.batch import Item
from nestling.optim.inputs import Capture, require_capture
from nestling.optim.shell import Group, RuleOptimizer, check_decays, common
from nestling.rules import Gates, Rule, State, Write, delta_momentum, delta_momentum_literal, dgd
from nestling.rules.deep_momentum import deep_momentum
from nestling.rules.dgd import dgd_factors
from nestling.shards import is_sharded


class DGD(RuleOptimizer):
    """Delta gradient descent (Eq. 54-58, 112-121) on linear layers, exact for the whole batch.

        optimizer = DGD(model.parameters(), lr=0.1, inputs=capture(model))

    Weights of captured `nn.Linear` layers take the exact proximal step; all other parameters, their
    biases too, plain gradient descent. The loss is a mean over its rows (`mean=False`: a sum), so
    each of the n captured rows weighs 1/n; to first order in lr the step is then SGD's.

    `erase=1` is the paper's rule (Eq. 57): it also pulls every output towards zero, so it does not
    converge to a minimum of the loss (on a squared error, to half the target). The default 0 takes
    the present output, moved against its gradient, as the target: the minima are the loss's own.
    `momentum` accumulates the exact steps, as SGD's does its gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        *,
        inputs: Capture,
        momentum: float = 0.0,
        mean: bool = True,
        erase: float = 0.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        master_weights: bool = False,
        compile: bool = False,
    ) -> None:
        self.inputs = require_capture(inputs)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "mean": mean,
            "erase": erase,
            **common(weight_decay, maximize, foreach, master_weights, compile),
        }
        super().__init__(params, defaults)

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense."""
        super().check(group)
        require(0.0 <= group["erase"] <= 1.0, "erase", group["erase"], "in [0, 1]")
        check_decays("momentum", (group["momentum"],))
        self.inputs.keep_reads |= group["erase"] > 0.0
        for parameter in group["params"]:
            if is_sharded(parameter):
                raise TypeError(
                    "DGD does not take sharded parameters (DTensor): a rank sees only its own"
                    " inputs, but the step needs those of all. Use it without FSDP"
                )

    def follow(self, group: Group) -> float:
        """Momentum over the exact steps."""
        return group["momentum"]

    def rule(self, group: Group, kind: Any) -> Rule:
        """DGD where the pairs are known, gradient descent elsewhere."""
        exact = dgd(mean=group["mean"], erase=group["erase"])

        def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
            return (write, state) if write.x is None else exact.step(write, state, weight, gates)

        return Rule(exact.init, step)

    def items(self, group: Group, parameters: Sequence[Tensor]) -> list[Item]:
        """The writes of a step, with the pairs of captured weights."""
        items = super().items(group, parameters)
        if group["lr"] == 0:
            return items
        for place, (item, parameter) in enumerate(zip(items, parameters, strict=True)):
            if self.inputs.covers(parameter):
                x, u = self.inputs.pairs(parameter)
                u = -u if group["maximize"] else u
                exact = item.weight.dtype
                items[place] = item._replace(x=x.to(exact), u=u.to(exact))
        return items

    def take_directly(self, group: Group, parameter: Tensor, gates: Gates) -> bool:
        """The step of a captured weight as one product, added to the weight where it lies."""
        plain = parameter.dtype in (torch.float32, torch.float64) and not group["compile"]
        plain = plain and not group["momentum"]
        if not (plain and group["lr"] and self.inputs.covers(parameter)):
            return False
        x, u = self.inputs.pairs(parameter)
        if x.shape[0] > x.shape[1]:
            return False
        row_weight = 1.0 / max(x.shape[0], 1) if group["mean"] else 1.0
        x, error = x.to(parameter.dtype), (u if group["maximize"] else -u).to(parameter.dtype)
        if group["erase"]:
            read = self.inputs.reads(parameter)
            near = gates.retain * (x @ parameter.mT if read is None else read)
            error = error + (row_weight * group["erase"]) * near
        left, right = dgd_factors(x, error, row_weight * gates.rate)
        parameter.addmm_(left.mT, right, beta=float(gates.retain), alpha=-float(gates.rate))
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and captured pairs together."""
        super().zero_grad(set_to_none)
        self.inputs.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inputs": self.inputs}


class DeltaMomentum(RuleOptimizer):
    """Momentum that is a memory with the delta rule (Eq. 48-49).

    Before a gradient is stored, what the memory already holds along it is taken out; `rate` is the
    memory's own, `momentum` its decay. Vectors take the element-wise form of Eq. 100-102.
    `literal=True` is Eq. 49 as printed, which diverges for large gradients (deviation 16).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        momentum: float = 0.9,
        rate: float = 0.2,
        literal: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        master_weights: bool = False,
        compile: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "rate": rate,
            "literal": literal,
            **common(weight_decay, maximize, foreach, master_weights, compile),
        }
        super().__init__(params, defaults)

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense."""
        super().check(group)
        check_decays("momentum", (group["momentum"],))
        require(group["rate"] > 0, "rate", group["rate"], "positive")

    def rule(self, group: Group, kind: bool) -> Rule:
        """Delta momentum for matrices, its element-wise form for vectors."""
        if group["literal"]:
            return delta_momentum_literal(decay=group["momentum"])
        return delta_momentum(decay=group["momentum"], rate=group["rate"], elementwise=kind)


class DeepMomentum(RuleOptimizer):
    """Momentum whose memory is a small MLP, trained at each step (Eq. 50; deviation 17).

    `hidden` is its width, `momentum` its decay, `rate` its own learning rate, `gain` (below 1) how
    far it may bend the gradient. State: `2 * hidden * columns` numbers per matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        hidden: int = 16,
        momentum: float = 0.99,
        rate: float = 0.5,
        gain: float = 0.9,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        master_weights: bool = False,
        compile: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "hidden": hidden,
            "momentum": momentum,
            "rate": rate,
            "gain": gain,
            **common(weight_decay, maximize, foreach, master_weights, compile),
        }
        super().__init__(params, defaults)

    def check(self, group: Group) -> None:
        """Refuse settings that make no sense."""
        super().check(group)
        check_decays("momentum", (group["momentum"],))
        check_decays("gain", (group["gain"],))
        require(group["rate"] > 0, "rate", group["rate"], "positive")
        hidden = group["hidden"]
        require(isinstance(hidden, int) and hidden >= 1, "hidden", hidden, "an int of at least 1")

    def rule(self, group: Group, kind: Any) -> Rule:
        """Deep momentum on the rows; a vector is one row."""
        return deep_momentum(
            hidden=group["hidden"],
            decay=group["momentum"],
            rate=group["rate"],
            gain=group["gain"],
        )
