"""The checks of arguments that all rooms share."""

from __future__ import annotations

import pytest

from nestling.checks import one_of, whole_number


def test_a_value_that_is_not_allowed_is_named_with_those_that_are():
    one_of("rule", "gd", ("dgd", "gd"))
    with pytest.raises(ValueError, match=r"^rule must be one of dgd, gd; got 'adam'$"):
        one_of("rule", "adam", ("dgd", "gd"))
    with pytest.raises(ValueError, match="meta must be one of None, frozen; got 1"):
        one_of("meta", 1, iter((None, "frozen")))


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, None])
def test_what_is_not_a_whole_number_is_refused(value):
    whole_number("chunk", 1)
    whole_number("steering", 0, least=0)
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1; got"):
        whole_number("chunk", value)
