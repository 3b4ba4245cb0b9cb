"""Plain options, as saved models hold them, become a memory's configuration in groups."""

from __future__ import annotations

import json
import math

import pytest
import torch

from nestling.memories import (
    GatedDeltaConfig,
    Learning,
    Projections,
    Rates,
    Retention,
    SelfModifying,
    SelfModifyingConfig,
    Titans,
    TitansConfig,
    configure,
)
from nestling.models import NestlingConfig, NestlingForCausalLM
from nestling.objectives import l2

SIZES = {"width": 12, "heads": 2}

FLAT = {
    "adaptive": ["k", "v"],
    "objective": "l2",
    "own_values": False,
    "erase": True,
    "residual": False,
    "momentum": True,
    "negative": True,
    "expansion": 1,
    "steering": 0,
    "chunk": 8,
    "chunk_others": 16,
    "read_start": True,
    "retain_max": 0.999,
    "retain": 0.99,
    "rates": [0.4, 1.6],
    "adding": 1,
    "clip": 0.5,
    "conv": 3,
    "conv_each": True,
    "gate": False,
    "recompute": True,
}
"""Every option of the configuration before it had groups, none at its default but two."""

SAVED = """{
  "model_type": "nestling", "vocab_size": 50, "hidden_size": 12, "num_hidden_layers": 2,
  "num_attention_heads": 2, "mixer": ["self_modifying", "titans"],
  "mixer_options": {
    "self_modifying": {"chunk": 4, "chunk_others": 8, "residual": false, "adding": 1,
                       "rates": [0.1, 0.4], "retain": 0.99, "retain_max": 0.999, "negative": true},
    "titans": {"chunk": 4, "chunk_others": 4, "momentum": false, "objective": "l2"}
  },
  "levels": [{"name": "fast", "chunk": 16}]
}"""
"""A configuration as the version before the groups saved it."""


def test_every_option_of_before_the_groups_means_what_it_meant():
    assert configure(SelfModifyingConfig, **SIZES, **FLAT) == SelfModifyingConfig(
        **SIZES,
        projections=Projections(adaptive=("k", "v"), residual=False, conv=3, conv_each=True),
        learning=Learning(
            objective=l2, own_values=False, adding=1, momentum=True, clip=0.5, read_start=True
        ),
        rates=Rates(start=(0.4, 1.6), most=2.0),
        retention=Retention(start=(0.99, 0.99), most=0.999),
        expansion=1,
        chunk=8,
        chunk_others=16,
        gate=False,
        recompute=True,
    )


def test_a_saved_model_of_before_the_groups_loads(tmp_path):
    config = NestlingConfig.from_dict(json.loads(SAVED))
    model = NestlingForCausalLM(config)
    hope, titans = (layer.mixer for layer in model.model.layers)
    assert hope.config.rates == Rates(start=(0.1, 0.4), most=2.0)
    assert hope.config.retention == Retention(start=(0.99, 0.99), most=0.999)
    assert not hope.config.projections.residual
    assert (hope.config.chunk, hope.config.chunk_others, hope.config.learning.adding) == (4, 8, 1)
    assert isinstance(titans, Titans)
    assert titans.config == TitansConfig(**SIZES, chunk=4, momentum=False)
    model.save_pretrained(tmp_path)
    assert NestlingForCausalLM.from_pretrained(tmp_path).config.mixer_options == (
        config.mixer_options
    )


def test_groups_are_mappings_and_go_with_options_outside_of_them():
    config = configure(
        SelfModifyingConfig, **SIZES, retention={"tied": True}, retain_max=0.99, rates={"most": 2.0}
    )
    assert config.retention == Retention(tied=True, most=0.99)
    assert config.rates == Rates(most=2.0)
    assert configure(GatedDeltaConfig, **SIZES, chunk=4) == GatedDeltaConfig(**SIZES, chunk=4)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SelfModifyingConfig, {"chunks": 2}, "no option chunks; it has .*chunk, chunk_others"),
        (
            SelfModifyingConfig,
            {"retention": {"ties": True}},
            "retention has no option ties; it has",
        ),
        (SelfModifyingConfig, {"retention": 0.9}, "retention must be a mapping of its options"),
        (SelfModifyingConfig, {"retention": Retention()}, "retention must be a mapping"),
        (SelfModifyingConfig, {"rates": Rates()}, "rates must be a mapping"),
        (SelfModifyingConfig, {"retention": {"most": 0.9}, "retain_max": 0.8}, "given twice"),
        (
            SelfModifyingConfig,
            {"learning": {"objective": "l1"}},
            "objective must be one of dot, l2; got 'l1'",
        ),
        (TitansConfig, {"erase": True}, "titans has no option erase .* 'self_modifying' with"),
        (TitansConfig, {"adaptive": ["k"]}, "titans has no option adaptive"),
        (TitansConfig, {"expansion": 0}, "expansion must be a whole number of at least 1; got 0"),
    ],
)
def test_what_is_not_allowed_is_said(kind, options, message):
    with pytest.raises(ValueError, match=message):
        configure(kind, **SIZES, **options)


def test_a_group_of_the_wrong_kind_is_refused():
    with pytest.raises(TypeError, match=r"rates must be a nestling\.memories\.Rates"):
        SelfModifyingConfig(**SIZES, rates=(0.1, 0.2))


def test_adding_may_be_a_share_of_the_heads():
    def memory(heads: int, adding: float) -> SelfModifying:
        torch.manual_seed(0)
        options = {"learning": {"adding": adding}}
        return SelfModifying(configure(SelfModifyingConfig, width=20, heads=heads, **options))

    x = torch.randn(2, 9, 20)
    for heads, adding in ((1, 0), (2, 1), (4, 2), (5, 2)):
        share, number, none = (memory(heads, many)(x)[0] for many in (0.5, adding, 0))
        assert torch.equal(share, number)
        assert torch.equal(share, none) == (adding == 0)
    for wrong in (1.5, -0.5, True, math.nan):
        with pytest.raises(ValueError, match="adding must be"):
            memory(2, wrong)
