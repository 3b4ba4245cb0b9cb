"""Where a pretrained decoder keeps what it knows: the weight matrices of its MLPs.

Works on the names of sub-modules, not on classes, so one function serves Llama, Qwen, Mistral,
Gemma, GPT-2, GPT-J, GPT-NeoX, Falcon, MPT, Phi, OPT and our own models. The experts of a mixture
are one tensor, not linear layers, and do not learn: there a shared expert does, or, where there is
none, the matrix that closes the attention; `left_out` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from nestling.checks import one_of
from nestling.continuum import Part, Slot
from nestling.continuum.assignment import own_slots

PATTERNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),  # Llama, Qwen, Mistral, Gemma, ...
    (("gate_up_proj",), "down_proj"),  # Phi-3
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),  # GPT-2, whose Conv1D holds [in, out]
    (("dense_h_to_4h",), "dense_4h_to_h"),  # GPT-NeoX, Pythia
    (("fc1",), "fc2"),  # Phi, OPT
    (("fc_in",), "fc_out"),  # GPT-J
    (("gate", "up"), "down"),  # ours: SwiGLU
    (("up",), "down"),  # ours: a level of a chain
)
"""Names of an MLP's parts: those that open it, and the one that closes it."""

OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
"""Names of the matrix that closes an attention."""

ASSIGNMENTS = ("share", "split", "layers", "own")
"""How the levels divide the pretrained MLPs."""


class WeightMatrix(NamedTuple):
    """One weight matrix of an MLP: the parameter's name and its layer.

    `axis` is the one that runs over the MLP's hidden units, in the orientation outputs x inputs
    (as in `nestling.continuum.Part`): 0 for the matrices that open an MLP, 1 for the one that
    closes it. A `fused` matrix holds two such runs, one after the other.
    """

    name: str
    layer: int
    axis: int
    fused: bool
    transposed: bool  # stored inputs first, as GPT-2's Conv1D does
    weight: Tensor

    @property
    def hidden(self) -> int:
        """The number of hidden units."""
        stored = 1 - self.axis if self.transposed else self.axis
        return self.weight.shape[stored] // (2 if self.fused else 1)


def mlp_matrices(
    model: nn.Module, layers: Any = None, *, closing: bool = False
) -> list[WeightMatrix]:
    """The MLP matrices of the chosen decoder layers, in the order of the layers.

    closing: only those that close an MLP.
    """
    prefix, blocks = _decoder(model)
    chosen = choose_layers(layers, len(blocks))
    matrices: list[WeightMatrix] = []
    for number in chosen:
        found = _matrices_of(blocks[number], f"{prefix}.{number}", number)
        if not found:
            some = [n for n, block in enumerate(blocks) if _matrices_of(block, "", n)]
            raise ValueError(
                f"layers: layer {number} of {type(model).__name__} has no MLP whose matrices can"
                f" learn; choose among {some}"
            )
        matrices += [matrix for matrix in found if matrix.axis == 1 or not closing]
    return matrices


def left_out(model: nn.Module) -> list[str]:
    """The MLPs of a model that cannot learn, by name: the experts of its mixtures."""
    return [name for name, module in model.named_modules() if _is_experts(module)]


def check_model(model: Any) -> None:
    """Refuse what cannot be adapted, with its cause and what to do instead."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: a causal language model of torch; got {kind}")
    if model.training:
        raise ValueError("model: in training mode, where dropout is random; call model.eval()")
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"model: {kind} is wrapped by peft, whose adapters stand between a memory and the"
            " weights; call model.merge_and_unload() first, or adapt the base model"
        )
    heads = getattr(model, "get_output_embeddings", None)
    if heads is not None and heads() is None:
        raise ValueError(
            f"model: {kind} has no language-model head, so no next token can be learned; load it"
            " with AutoModelForCausalLM"
        )
    away = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if away:
        raise ValueError(
            f"model: {len(away)} of its weights ({away[0]}, ...) are offloaded or were never"
            " loaded; load the whole model onto one device (without device_map)"
        )
    for name, module in model.named_modules():
        if _is_quantised(module):
            raise ValueError(
                f"model: {name} is a quantised {type(module).__name__}, whose weight is not a"
                " floating point matrix; load the model unquantised (float32, bfloat16 or"
                " float16); a .gguf file is dequantised by nestling.adaptation.load_pretrained"
            )


def _is_quantised(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear) and isinstance(weight, Tensor):
        return not weight.is_floating_point() or weight.dtype.itemsize < 2
    named = type(module).__name__.lower()
    packed = any(hasattr(module, name) for name in ("qweight", "packed_weight", "_packed_params"))
    return packed or ("quant" in named and "linear" in named)


def _is_experts(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    closing = own.get("down_proj")
    return closing is not None and closing.dim() == 3


def assign_levels(
    model: nn.Module,
    levels: int,
    *,
    layers: Any = None,
    assign: str = "share",
    closing: bool = False,
) -> tuple[Slot, ...]:
    """Which level owns what of the pretrained MLPs; every level starts as they are (section 7.3).

    "share": every level has a difference on every matrix. "split": each MLP's hidden units are
    divided, the first to the fastest level. "layers": each level has layers of its own, the last
    layers the fastest level. "own": the MLPs of our models' chains are the levels (Eq. 70).
    closing: only the matrices that close an MLP.
    """
    if assign == "own":
        return own_slots(model)
    one_of("assign", assign, ASSIGNMENTS)
    matrices = mlp_matrices(model, layers, closing=closing)
    chosen = sorted({matrix.layer for matrix in matrices}, reverse=True)
    if assign == "layers" and len(chosen) < levels:
        raise ValueError(
            f"assign='layers': {levels} levels need as many layers; layers={layers!r} chooses"
            f" {len(chosen)}"
        )
    if assign == "split" and min(matrix.hidden for matrix in matrices) < levels:
        raise ValueError(f"assign='split': an MLP has fewer hidden units than {levels} levels")
    slots = []
    for matrix in matrices:
        if assign == "share":
            parts = tuple(Part(level) for level in range(levels))
        elif assign == "split":
            parts = tuple(part for level in range(levels) for part in _runs(matrix, level, levels))
        else:
            parts = (Part(chosen.index(matrix.layer) * levels // len(chosen)),)
        slots.append(Slot(matrix.name, parts))
    return tuple(slots)


def _runs(matrix: WeightMatrix, level: int, levels: int) -> list[Part]:
    """A level's share of the hidden units; two runs in a fused matrix."""
    units = matrix.hidden
    start, stop = units * level // levels, units * (level + 1) // levels
    offsets = (0, units) if matrix.fused else (0,)
    return [Part(level, matrix.axis, offset + start, offset + stop) for offset in offsets]


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
            lists += [(name, module)] if any(_matrices_of(b, "", 0) for b in module) else []
    if not lists:
        known = "; ".join(", ".join((*opens, close)) for opens, close in PATTERNS)
        raise ValueError(
            f"model: {type(model).__name__} has no decoder blocks with an MLP that is known here"
            f" (sub-modules named {known})"
        )
    return max(lists, key=lambda entry: len(entry[1]))


def _matrices_of(block: nn.Module, prefix: str, layer: int) -> list[WeightMatrix]:
    """All MLP matrices inside one decoder block."""
    found: list[WeightMatrix] = []
    for name, module in block.named_modules():
        children = dict(module.named_children())
        for opens, close in PATTERNS:
            parts = [children.get(part) for part in (*opens, close)]
            if all(part is not None and _is_matrix(part) for part in parts):
                path = ".".join(filter(None, (prefix, name)))
                for part in (*opens, close):
                    full = f"{path}.{part}.weight"
                    found.append(_matrix(full, children[part], layer, closes=part == close))
                break
    if not found and any(_is_experts(module) for module in block.modules()):
        return _attention_output(block, prefix, layer)
    return found


def _attention_output(block: nn.Module, prefix: str, layer: int) -> list[WeightMatrix]:
    """The matrix that closes a block's attention: what learns where all MLPs are experts."""
    for name, module in block.named_modules():
        if name.rpartition(".")[2] in OUTPUTS and _is_matrix(module):
            full = ".".join(filter(None, (prefix, name, "weight")))
            return [_matrix(full, module, layer, closes=True)]
    return []


def _matrix(name: str, module: Any, layer: int, *, closes: bool) -> WeightMatrix:
    fused = name.endswith("gate_up_proj.weight")
    return WeightMatrix(name, layer, int(closes), fused, _conv(module), module.weight)


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    floating = isinstance(weight, nn.Parameter) and weight.dim() == 2 and weight.is_floating_point()
    return floating and (isinstance(module, nn.Linear) or _conv(module))


def _conv(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"
