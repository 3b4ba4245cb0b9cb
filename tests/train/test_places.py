"""Training takes the levels of its parameters from the one assignment."""

from __future__ import annotations

import pytest

from nestling.continuum import own_slots
from nestling.models import NestlingForCausalLM, presets
from nestling.train.optimizers import by_level, places


@pytest.mark.parametrize("model", ["hope", "transformer"])
def test_every_parameter_has_the_place_the_assignment_gives_it(model):
    made = NestlingForCausalLM(presets.tiny(model=model))
    found = places(made)
    assert set(found) == {name for name, _ in made.named_parameters()}
    owned = {} if model == "transformer" else {s.name: s.parts[0].level for s in own_slots(made)}
    levels = made.config.level_list
    for name, place in found.items():
        other = "mixer" if ".mixer." in name else "rest"
        assert place == (levels[owned[name]].name if name in owned else other)
    grouped = {name: place for place, some in by_level(made).items() for name, _ in some}
    assert grouped == found
