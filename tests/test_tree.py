"""One tree module: maps, names, dictionaries and the packed form of any state."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nestling.tree import (
    named_tuples,
    pack,
    tree_dict,
    tree_from_dict,
    tree_leaves,
    tree_map,
    tree_walk,
    unpack,
)


class Pair(NamedTuple):
    left: Any
    right: Any = None


def test_tensors_are_named_by_their_path_and_come_back():
    tree = Pair((torch.zeros(1), torch.ones(1)), Pair(torch.full((1,), 2.0)))
    assert list(tree_dict(tree)) == ["left.0", "left.1", "right.left"]
    back = tree_from_dict(tree_map(torch.zeros_like, tree), tree_dict(tree))
    assert back == tree
    assert isinstance(back.right, Pair)
    assert tree_dict(torch.ones(1)) == {"state": torch.ones(1)}
    assert tree_from_dict(torch.zeros(1), {"state": torch.ones(1)}) == torch.ones(1)
    owners = [[type(part) for part, _ in path] for path, _ in tree_walk(tree)]
    assert owners == [[Pair, tuple], [Pair, tuple], [Pair, Pair]]


def test_other_values_are_refused_by_place_or_kept_when_plain():
    mixed = {"a": [torch.ones(1), 3], "b": ("text", None)}
    with pytest.raises(TypeError, match=r"got int at a\.1"):
        list(tree_leaves(mixed))
    with pytest.raises(TypeError, match="got int"):
        tree_map(torch.neg, mixed)
    assert tree_map(torch.neg, mixed, plain=True) == {"a": [-torch.ones(1), 3], "b": ("text", None)}
    with pytest.raises(ValueError, match="different form"):
        tree_map(torch.add, (torch.ones(1),), (torch.ones(1), torch.ones(1)))


def test_named_tuples_are_packed_by_name_and_made_only_when_known():
    tree = (Pair(torch.ones(2), Pair(1, "x")), None)
    tensors, skeleton = pack(tree)
    back = unpack(tensors, skeleton, named_tuples(tree))
    assert isinstance(back[0].right, Pair)
    assert back[0].right == Pair(1, "x")
    assert unpack(tensors, skeleton)[0][1] == (1, "x")
    with pytest.raises(ValueError, match="unknown type 'Pair'"):
        unpack(tensors, skeleton, {"Other": Pair})


def test_keys_that_look_alike_keep_their_own_tensors():
    value = {0: torch.zeros(1), "0": torch.ones(1)}
    back = unpack(*pack(value))
    assert back[0] == 0
    assert back["0"] == 1


@pytest.mark.parametrize(
    "skeleton",
    [
        {"tensor": "gone"},
        {"tensor": []},
        {"dict": 3},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"tuple": "ab"},
        {"named": []},
        {"named": [["Pair"], 1, 2]},
        {"named": ["Pair", 1]},
        {"dtype": "load"},
        {"float": "x"},
        {"a": 1, "b": 2},
        {"unknown": 1},
        1.5,
    ],
    ids=str,
)
def test_a_skeleton_nobody_wrote_is_refused(skeleton):
    with pytest.raises(ValueError):
        unpack({}, skeleton, {"Pair": Pair})


def test_nesting_is_bounded():
    skeleton: Any = 1
    for _ in range(100_000):
        skeleton = [skeleton]
    with pytest.raises(ValueError, match="64 levels"):
        unpack({}, skeleton)
    while isinstance(skeleton, list):  # taken apart level by level: its end would recurse as deep
        skeleton = skeleton.pop()


def test_a_tree_of_one_tensor_is_a_tree():
    assert isinstance(tree_map(torch.neg, torch.ones(1)), Tensor)
