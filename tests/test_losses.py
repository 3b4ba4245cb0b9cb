"""The loss of pairs, streams and windows against the plain formula."""

from __future__ import annotations

import pytest
import torch

from nestling.losses import IGNORE, pair_losses, stream_losses, windowed_losses


def plain(logits, targets):
    return -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def test_pairs_in_any_shape_and_in_float32_at_least():
    logits, targets = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    assert torch.allclose(pair_losses(logits, targets), plain(logits, targets))
    assert pair_losses(logits.bfloat16(), targets).dtype == torch.float32
    assert pair_losses(logits.double(), targets).dtype == torch.float64
    assert pair_losses(logits[0, 0], targets[0, 0]).shape == ()
    targets[0, 1] = IGNORE
    assert pair_losses(logits, targets)[0, 1] == 0


def test_a_stream_in_two_pieces_is_the_stream_in_one():
    logits, ids = torch.randn(2, 9, 7), torch.randint(7, (2, 9))
    whole = stream_losses(logits, ids)
    assert whole[:, 0].isnan().all()
    assert torch.allclose(whole[:, 1:], plain(logits[:, :-1], ids[:, 1:]))
    later = stream_losses(logits[:, 4:], ids[:, 4:], logits[:, 3])
    assert torch.equal(later, whole[:, 4:])


@pytest.mark.parametrize("context", [2, 3, 4, 7, 50])
def test_windows_judge_every_token_once_by_what_the_window_holds(context):
    ids = torch.randint(11, (29,))

    def forward(window):  # logits that depend on the token and the place in the window
        assert window.shape[1] <= context
        place = torch.arange(window.shape[1])
        return torch.sin(window[..., None] * 3.0 + place[:, None] + torch.arange(11.0))

    got = windowed_losses(forward, ids, context)
    assert got.shape == (28,)
    expected, done = [], 1
    while done < 29:
        start = max(0, done - context // 2)
        part = ids[start : start + context]
        losses = plain(forward(part[None])[0, :-1], part[1:])
        expected += losses[done - start - 1 :].tolist()
        done = start + len(part)
    assert torch.allclose(got, torch.tensor(expected))
    with pytest.raises(ValueError, match="at least 2 tokens; got 1"):
        windowed_losses(forward, ids, 1)
