"""How devices of EEFT's reproduction are judged: a part and the device's own head behind it, on its task's test images.

Which parts, and when, is `reproduce_eeft_rows`' part; so are the images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_runtime.head import Head
from server_runtime.own_heads import Part
from tools.reproduce_eeft_world import Group, Scenario

JUDGED_AT_ONCE = 500
Floats: TypeAlias = NDArray[np.float32]
Tested: TypeAlias = tuple[torch.Tensor, NDArray[np.int64]]  # images (n, 3, h, w), class numbers (n,)


class Judge:
    """Test accuracy of devices' parts with their own heads."""

    def __init__(
        self, module: nn.Module, scenario: Scenario, tested: Callable[[Group], Tested],
        head_of: Callable[[str], Head | None],
    ) -> None:  # fmt: skip
        """`tested` gives a group's test images where the module is, `head_of` a device's head."""
        self._module, self._scenario = module, scenario
        self._tested, self._head_of = tested, head_of
        self._live = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._before = {name: tensor.detach().clone() for name, tensor in self._live.items()}

    def by_group(self, parts: Mapping[str, Part]) -> dict[str, float]:
        """Mean over each group's devices. The module is left as it was: a device that starts late starts from it."""
        found: dict[str, list[float]] = {group.name: [] for group in self._scenario.groups}
        loaded: Part | None = None
        features: dict[str, Floats] = {}  # by group, of the part that is loaded: an averaged part is many devices'
        for name, group in self._scenario.devices.items():
            if parts[name] is not loaded:
                loaded, features = parts[name], {}
                self._put(loaded)
            if group.name not in features:
                features[group.name] = self._features(group)
            found[group.name].append(self._accuracy(name, group, features[group.name]))
        self._put(self._before)
        return {name: float(np.mean(each)) for name, each in found.items()}

    @torch.no_grad()
    def _put(self, part: Mapping[str, Any]) -> None:
        for name, value in part.items():
            self._live[name].copy_(value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value)))

    @torch.no_grad()
    def _features(self, group: Group) -> Floats:
        """(n, width) of a group's test images, by the part that is loaded."""
        images, _ = self._tested(group)
        return np.concatenate([self._module(piece).cpu().numpy() for piece in images.split(JUDGED_AT_ONCE)])

    def _accuracy(self, name: str, group: Group, features: Floats) -> float:
        head = self._head_of(name)
        assert head is not None  # it has trained
        return float((head.logits(features).argmax(axis=1) == self._tested(group)[1]).mean())
