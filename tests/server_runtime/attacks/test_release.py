"""The attacker's own releases have the device's law, and the filter gives back what noise and masks took."""

from __future__ import annotations

import pytest
import torch

from contract.tokens import SentRule, TokenLayout
from server_runtime.attacks._release import Law, Release, images_at_once
from server_runtime.attacks.inverse_net import Decoder, Size

from .small_world import LAYOUT, SIZE, masks, pictures, statistics_of, world


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def release(kappa: float, kept: str = "all", share: float = 1.0) -> tuple[Release, torch.Tensor]:
    small = world()
    tokens = small.known.learn.tokens[0]
    law = Law(LAYOUT, SIZE, statistics_of(tokens), SentRule(kept, share))  # type: ignore[arg-type]
    return Release(law, kappa, tokens), tokens


def test_noise_has_the_strength_of_each_channel_and_half_on_the_prefix() -> None:
    made, tokens = release(0.8, share=0.5)
    noise = made.send(tokens, generator()) - tokens
    wanted = 0.8 * 2**0.5 * tokens[:, 1:].reshape(-1, LAYOUT.dim).std(dim=0)
    assert noise[:, 1:].reshape(-1, LAYOUT.dim).std(dim=0) == pytest.approx(wanted, rel=0.1)
    prefix = 0.4 * 2**0.5 * tokens[:, 0].std(dim=0)
    assert float((noise[:, 0].std(dim=0) / prefix).mean()) == pytest.approx(1.0, rel=0.05)


def test_codes_are_whole_steps_and_no_noise_is_nearly_no_change() -> None:
    made, tokens = release(0.0)
    received = made.send(tokens, generator())
    assert made.steps is not None
    codes = received / made.steps
    assert torch.allclose(codes, codes.round(), atol=1e-3)
    assert float((received - tokens).abs().max()) <= float(made.steps.max()) / 2 + 1e-6


def test_the_filter_takes_noise_away() -> None:
    made, tokens = release(1.0)
    received = made.send(tokens, generator())
    before = (received[:, 1:] - tokens[:, 1:]).square().mean()
    assert made.filters
    assert float((made.restore(received) - tokens[:, 1:]).square().mean()) < 0.5 * float(before)


def test_patches_that_are_not_sent_are_filled_in() -> None:
    made, tokens = release(0.0, kept="checkerboard")
    received = made.send(tokens, generator())
    assert received.shape[1] == 1 + LAYOUT.patches // 2 and len(made.sent) == LAYOUT.patches // 2
    unsent = torch.tensor([place for place in range(LAYOUT.patches) if place not in made.sent.tolist()])
    away = (made.restore(received) - tokens[:, 1:])[:, unsent].square().mean()
    mean = (tokens[:, 1:] - tokens[:, 1:].mean(dim=0))[:, unsent].square().mean()
    assert float(away) < 0.8 * float(mean)


def test_a_masked_frontends_tokens_are_all_sent_under_the_patches_noise() -> None:
    small = world()
    places = masks(200, 4, "x")
    with torch.no_grad():
        tokens = small.part(pictures(200, 4), places)
    noise = small.release(1.0).add_noise(tokens, generator()) - tokens
    wanted = 2**0.5 * small.known.release.scales[-1] / small.known.release.strength
    assert float((noise[:, 1:].std(dim=(0, 1)) / wanted).mean()) == pytest.approx(1.0, rel=0.05)


def test_tokens_that_do_not_divide_the_picture_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        Law(TokenLayout(0, (5, 5), 8), SIZE, None)


def test_images_with_many_values_are_taken_fewer_at_a_time() -> None:
    assert images_at_once(torch.zeros(3, 17, 64)) == 250
    assert images_at_once(torch.zeros(1, 1, 1).expand(2, 1 << 12, 1 << 10)) == 4


def test_a_fine_grid_is_read_in_squares_that_stay_in_their_place() -> None:
    """32 x 32 tokens: squares of 2 x 2, each of which answers for the same square of the picture."""
    layout = TokenLayout(0, (32, 32), 3)
    public = torch.rand((3, 1024, 3), generator=generator())
    made = Release(Law(layout, (32, 32), None), 0.0, public)
    net = Decoder(made, Size(width=16, blocks=1, heads=2))
    tokens = torch.arange(1024.0).view(1, 1024, 1).expand(1, 1024, 3)
    squares = net._squares(tokens)
    assert squares.shape == (1, 256, 12)
    assert squares[0, 17].unique().tolist() == [66.0, 67.0, 98.0, 99.0]  # second row, second column
    assert net(public, public).shape == (3, 3, 32, 32)
