"""What a curious server reads back from the features of EFTViT, after some rounds, with fixed and with fresh masks.

It knows the local module that devices started from, not what they made of it, and has public images (algorithms.md
4.5). It is told which image and which patches each feature is of: the first it would have to guess, the second a linear
reader finds, whose hits are reported. Training is `reproduce_eft_rows`' part, the attack `mask_union`'s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from contract.errors import UsageError
from contract.images import ImageRule, load_pixels, resize
from contract.messages import PatchFeatures
from contract.patch_features import WireFeatures, read_features
from contract.tokens import SentRule, TokenLayout
from edge_runtime.data import Sample
from edge_runtime.round_keeper import RoundKeeper
from exporter.models import family_of
from server_runtime import strategies
from server_runtime.attacks import Effort, Known, Pairs, Seen, Upload
from server_runtime.attacks._release import Law, Release
from server_runtime.attacks.mask_union import MaskUnion
from server_runtime.attacks.ridge import fit_map, split_patches
from server_runtime.report import Table
from server_runtime.strategies import Ask, Reply, Site
from tools.reproduce_eft_rows import EftCell, EftLaboratory
from tools.reproduce_noise_attack import quality
from tools.reproduce_split_rows import SITE
from tools.simulation import Answers, adapt
from tools.torch_worker import PartDevice

AFTER = (1, 5, 20)  # rounds
MASKS = {"fixed": "keyed", "fresh": "fresh"}  # and what `noise` is called in the device's own config
LEAST_IMAGES = 40  # of the device that is watched
LEARN_SHARE = 0.8  # of the public images; on the others the penalty is chosen


@dataclass(frozen=True)
class Sight:
    """A feature (n + 1, d) that left a device, with what it is of: sample and patch positions (n,)."""

    sample: bytes
    places: NDArray[np.int64]
    feature: NDArray[np.float32]


@dataclass(frozen=True)
class Found:
    """What is read back after some rounds: the share of patches that was shown, mean over the images of which anything
    was; PSNR on these patches and of the public mean there; PSNR and SSIM of whole images, filled by the public mean;
    share of this last round's features whose position a linear reader tells."""

    masks: str
    rounds: int
    images: int
    area: float
    visible_psnr_db: float
    guess_psnr_db: float
    psnr_db: float
    ssim: float
    places_read: float


class Watch:
    """The devices' answers on their way, with what the server is not told about features."""

    def __init__(self, answers: Answers, devices: Mapping[str, PartDevice]) -> None:
        self._answers, self.rounds = answers, list[list[Sight]]()
        self._leaving: list[tuple[bytes, NDArray[np.int64]]] = []
        for device in devices.values():
            assert isinstance(device.keeper, RoundKeeper)
            device.keeper.before_release = self._note

    def _note(
        self, sample_ids: Sequence[bytes], cut: object, keep: NDArray[np.int64] | None, sigma: float, draw: str
    ) -> None:
        assert keep is not None
        self._leaving += zip(sample_ids, keep, strict=True)

    def answer(self, ask: Ask) -> Mapping[str, Reply]:
        self._leaving = []
        replies = self._answers.answer(ask)
        if ask.kind == "masked_round":
            sent = [reply for reply in replies.values() if isinstance(reply, PatchFeatures)]
            rows = [row for reply in sent for row in _features(reply)]
            self.rounds.append([Sight(*who, row) for who, row in zip(self._leaving, rows, strict=True)])
        return replies

    def note_checkpoint(self) -> None:
        self._answers.note_checkpoint()


def _features(reply: PatchFeatures) -> Iterable[NDArray[np.float32]]:
    if reply.values is None:
        return []
    scales = None if reply.scales is None else np.array(reply.scales)
    return read_features(WireFeatures(np.array(reply.values), scales))


class Attacker:
    """Public images (n, 3, h, w) in [0, 1], and the local module as it was shipped, on `normalised` ones."""

    def __init__(self, local: nn.Module, public: Tensor, normalised: Tensor, grid: tuple[int, int], kept: int) -> None:
        count = grid[0] * grid[1]
        rng = np.random.default_rng(0)
        keep = np.sort(np.stack([rng.permutation(count)[:kept] for _ in range(len(public))]), axis=1)
        self._places, self._count, self._public = torch.from_numpy(keep), count, public
        with torch.no_grad():
            masked, whole = local(normalised, self._places.to(normalised.device)), local(normalised)
        self._masked, whole = masked.float().cpu(), whole.float().cpu()
        self._prefix = whole.shape[1] - count
        size = (public.shape[2], public.shape[3])
        law = Law(TokenLayout(self._prefix, grid, whole.shape[2]), size, None, SentRule())
        self._grid, split = grid, int(LEARN_SHARE * len(public))
        pairs = [
            Pairs(public[rows], (self._masked[rows],), self._places[rows])
            for rows in (slice(0, split), slice(split, None))
        ]
        self._pairs = pairs
        self.union = MaskUnion(Effort())
        self.union.fit(Known(pairs[0], pairs[1], Release(law, 0.0, whole)))
        self._reader = fit_map(self._of_places(pairs[0]), self._of_places(pairs[1]))

    def _of_places(self, pairs: Pairs) -> list[tuple[Tensor, Tensor]]:
        assert pairs.places is not None
        return [(pairs.tokens[0][:, self._prefix :], functional.one_hot(pairs.places, self._count).float())]

    def read(self, masks: str, rounds: Sequence[Sequence[Sight]], truth: Mapping[bytes, Tensor]) -> Found:
        """Of all that was seen; `truth` holds the images (3, h, w) in [0, 1]."""
        seen: dict[bytes, list[Sight]] = {}
        for sight in (each for shown in rounds for each in shown):
            seen.setdefault(sight.sample, []).append(sight)
        mean = self._public.mean(dim=0)
        found, area, visible, guess = [], [], [], []
        for sample, sights in seen.items():
            uploads = tuple(
                Upload(torch.from_numpy(each.feature)[None], 0.0, torch.from_numpy(each.places)[None])
                for each in sights
            )
            found.append(self.union.reconstruct(Seen(uploads=uploads))[0])
            area.append(self.union.coverage)
            shown = torch.from_numpy(np.unique(np.concatenate([each.places for each in sights])))
            true = self._patches(truth[sample], shown)
            visible.append(_psnr_db(true, self._patches(found[-1], shown)))
            guess.append(_psnr_db(true, self._patches(mean, shown)))
        whole = quality(torch.stack([truth[sample] for sample in seen]), torch.stack(found))
        return Found(
            masks, len(rounds), len(seen), float(np.mean(area)), float(np.mean(visible)), float(np.mean(guess)),
            whole.psnr_db, whole.ssim, self._places_read(rounds[-1]),
        )  # fmt: skip

    def _patches(self, image: Tensor, places: Tensor) -> Tensor:
        return split_patches(image[None], self._grid)[0, places]

    def _places_read(self, sights: Sequence[Sight]) -> float:
        tokens = torch.from_numpy(np.stack([each.feature[self._prefix :] for each in sights]))
        places = torch.from_numpy(np.stack([each.places for each in sights]))
        return float((self._reader(tokens).argmax(dim=2) == places).double().mean())


@torch.no_grad()
def leaks(laboratory: EftLaboratory, cell: EftCell, dealt: Mapping[str, Sequence[str]], classes: int) -> list[Found]:
    """What a server reads back from one device, the smallest that has enough images, when it takes part in every round.

    The public images are the test images; `dealt` are each device's. Raises: UsageError where no device has enough.
    """
    shipped, installed = laboratory.package(cell)
    enough = [name for name, own in dealt.items() if len(own) >= LEAST_IMAGES]
    if not enough:
        raise UsageError(f"no device has {LEAST_IMAGES} images", "choose another --seeds or --betas")
    name = min(enough, key=lambda each: len(dealt[each]))
    local = family_of(shipped.module)[1].cut(copy.deepcopy(shipped.module).eval(), cell.local)[0].eval()
    cut = next(cut for cut in shipped.plan.cuts if cut.loss == "none")
    assert cut.patches is not None and cut.kept is not None
    side, image = math.isqrt(cut.patches), installed.manifest.image
    normalised, _ = laboratory.test_images()
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (image.mean, image.std))
    public = (normalised.cpu() * std + mean).clamp(0, 1)
    attacker = Attacker(local, public, normalised, (side, side), cut.kept)
    found = []
    for masks, noise in MASKS.items():
        devices = laboratory.devices(cell, [name], noise)
        watch = Watch(Answers(devices, laboratory.terms(cell)), devices)
        settings = replace(laboratory.settings(cell), fraction=1.0)
        with torch.enable_grad():
            adapt(strategies.find(cell.strategy).build(shipped, settings), watch, Site(SITE, (name,), classes))
        truth = {each.sample_id: _picture(each, image) for each in devices[name].dataset.samples}
        after = [rounds for rounds in AFTER if rounds <= len(watch.rounds)]
        found += [attacker.read(masks, watch.rounds[:rounds], truth) for rounds in after]
    return found


def _picture(sample: Sample, rule: ImageRule) -> Tensor:
    """(3, h, w) in [0, 1], as a device makes it before it normalises."""
    pixels = resize(load_pixels(sample.path, sample.relative, rule.max_pixels), rule)
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def _psnr_db(true: Tensor, found: Tensor) -> float:
    error = float((true - found).double().square().mean())
    return float(-10 * np.log10(max(error, 1e-10)))


def table_of(found: Sequence[Found]) -> Table:
    """As it is printed."""
    shown = tuple(
        (
            each.masks, each.rounds, each.images, f"{100 * each.area:.1f}", f"{each.visible_psnr_db:.2f}",
            f"{each.guess_psnr_db:.2f}", f"{each.psnr_db:.2f}", f"{each.ssim:.3f}", f"{100 * each.places_read:.1f}",
        )
        for each in found
    )  # fmt: skip
    columns = ("masks", "rounds", "images", "area in %", "dB", "dB by guess", "whole dB", "whole SSIM", "places read %")
    note = (
        "A ridge on the shipped local module, which flatters the defence. dB: PSNR on the patches that were shown; a "
        "guess: the public images' mean. Whole images are filled with that mean. Places: told by a linear reader."
    )
    return Table("What a curious server reads back", columns, shown, note=note)
