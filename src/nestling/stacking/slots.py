"""Where a pretrained decoder keeps what it knows: the weight matrices of its MLPs.

Works on the names of sub-modules, not on classes, so one function serves Llama, Qwen, Mistral,
Gemma, GPT-2, GPT-NeoX, Phi and our own models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["Slot", "choose_layers", "mlp_slots"]

PATTERNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),  # Llama, Qwen, Mistral, Gemma, ...
    (("gate_up_proj",), "down_proj"),  # Phi-3
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),  # GPT-2, whose Conv1D holds [in, out]
    (("dense_h_to_4h",), "dense_4h_to_h"),  # GPT-NeoX, Pythia
    (("fc1",), "fc2"),  # Phi, OPT
    (("gate", "up"), "down"),  # ours: SwiGLU
    (("up",), "down"),  # ours: a level of a chain
)
"""Names of an MLP's parts: those that open it, and the one that closes it."""


class Slot(NamedTuple):
    """One weight matrix of an MLP: the parameter's name, its layer, and its place in the MLP.

    `hidden` is the dimension of the matrix that runs over the MLP's hidden units.
    """

    name: str
    layer: int
    hidden: int
    weight: Tensor


def mlp_slots(model: nn.Module, layers: Any = None) -> list[Slot]:
    """The MLP matrices of the chosen decoder layers, in the order of the layers."""
    prefix, blocks = _decoder(model)
    chosen = choose_layers(layers, len(blocks))
    slots: list[Slot] = []
    for number in chosen:
        found = _slots_of(blocks[number], f"{prefix}.{number}", number)
        if not found:
            raise ValueError(
                f"layers: layer {number} of {type(model).__name__} has no MLP whose matrices can"
                f" learn (mixtures of experts and quantised layers are not supported); choose"
                f" among {[n for n, b in enumerate(blocks) if _slots_of(b, '', n)]}"
            )
        slots += found
    return slots


def choose_layers(layers: Any, count: int) -> list[int]:
    """Layer numbers from None (all), a number, a sequence, a slice, or "first/last half|third|N".

    Negative numbers count from the end.
    """
    if layers is None or layers == "all":
        return list(range(count))
    if isinstance(layers, slice):
        return _some(list(range(count))[layers], layers)
    if isinstance(layers, str):
        return _some(_named(layers, count), layers)
    numbers: Sequence[Any] = [layers] if isinstance(layers, int) else list(layers)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not -count <= number < count:
            raise ValueError(
                f"layers: the model has layers 0 to {count - 1} (negative numbers count from the"
                f" end); got {number!r}"
            )
    return _some(sorted({number % count for number in numbers}), layers)


def _some(numbers: list[int], layers: Any) -> list[int]:
    if not numbers:
        raise ValueError(f"layers={layers!r} chooses no layer")
    return numbers


def _named(text: str, count: int) -> list[int]:
    words = text.split()
    shares = {"half": count // 2, "third": count // 3, "quarter": count // 4}
    if len(words) == 2 and words[0] in ("first", "last"):
        many = int(words[1]) if words[1].isdecimal() else shares.get(words[1], 0)
        many = min(max(many, int(words[1] in shares)), count)
        return list(range(many)) if words[0] == "first" else list(range(count - many, count))
    raise ValueError(
        f'layers must be None, numbers, a slice, or "first" or "last" with half, third, quarter or'
        f" a number; got {text!r}"
    )


def _decoder(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of a model's blocks: the longest outermost list of modules that hold MLPs."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and not inside:
            lists += [(name, module)] if any(_slots_of(b, "", 0) for b in module) else []
    if not lists:
        known = "; ".join(", ".join((*opens, close)) for opens, close in PATTERNS)
        raise ValueError(
            f"model: {type(model).__name__} has no decoder blocks with an MLP that is known here"
            f" (sub-modules named {known})"
        )
    return max(lists, key=lambda entry: len(entry[1]))


def _slots_of(block: nn.Module, prefix: str, layer: int) -> list[Slot]:
    """All MLP matrices inside one decoder block."""
    slots: list[Slot] = []
    for name, module in block.named_modules():
        children = dict(module.named_children())
        for opens, close in PATTERNS:
            parts = [children.get(part) for part in (*opens, close)]
            if all(part is not None and _is_matrix(part) for part in parts):
                path = ".".join(filter(None, (prefix, name)))
                slots += [
                    _slot(f"{path}.{part}.weight", children[part], layer, closes=part == close)
                    for part in (*opens, close)
                ]
                break
    return slots


def _slot(name: str, module: Any, layer: int, *, closes: bool) -> Slot:
    output = 1 if type(module).__name__ == "Conv1D" else 0  # which dimension is the output
    return Slot(name, layer, 1 - output if closes else output, module.weight)


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    floating = isinstance(weight, nn.Parameter) and weight.dim() == 2 and weight.is_floating_point()
    return floating and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
