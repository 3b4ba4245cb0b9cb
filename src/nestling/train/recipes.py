"""Recipes by name: functions that return a frozen `Recipe`. `nestling train NAME key=value...`."""

from __future__ import annotations

from collections.abc import Callable

from nestling.train.recipe import Data, Model, Optim, Recipe, Run

__all__ = ["RECIPES", "get"]


def tiny() -> Recipe:
    """A Hope of 1M parameters on the built-in chronicles: minutes on a laptop."""
    return Recipe()


def stream() -> Recipe:
    """As tiny, but every row reads whole documents and carries its memory from window to window."""
    return Recipe(data=Data(order="sequential", length=128), run=Run(rows=16))


def small() -> Recipe:
    """A Hope of 5M parameters on text of your own (data.train=FILE data.valid=FILE)."""
    return Recipe(
        model=Model(preset="small"),
        data=Data(tokenizer="bpe:4096", length=512),
        optim=Optim(lr=1e-3, warmup=100),
        run=Run(steps=2000, rows=32, micro=8, eval_every=200, save_every=200),
    )


def hope_760m() -> Recipe:
    """The paper's 760M Hope: 30B tokens, windows of 4,096, on many GPUs through torchrun."""
    return _paper("hope_760m", steps=60_000, lr=1.5e-3)


def hope_1b3() -> Recipe:
    """The paper's 1.3B Hope: 100B tokens, windows of 4,096, on many GPUs through torchrun."""
    return _paper("hope_1b3", steps=200_000, lr=1e-3)


def _paper(preset: str, steps: int, lr: float) -> Recipe:
    return Recipe(
        model=Model(preset=preset),
        data=Data(
            train=("hf:HuggingFaceFW/fineweb-edu",),
            tokenizer="bpe:32000",
            length=4096,
            workers=8,
        ),
        optim=Optim(lr=lr, warmup=2000),
        run=Run(
            steps=steps,
            rows=128,
            micro=1,
            eval_every=1000,
            save_every=1000,
            precision="bf16",
            compile=True,
            recompute=True,
            strategy="fsdp",
        ),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    f.__name__: f for f in (tiny, stream, small, hope_760m, hope_1b3)
}


def get(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    return RECIPES[name]()
