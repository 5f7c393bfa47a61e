"""Every kind of ask: which parameters and tensors a server may send with it, by exact types and shapes.

Data alone: `contract.messages` holds every ask to it, what a device does on one is its keeper's part. Shapes: B samples
in this message, C classes, d channels, n values of a sample, K classes with prototypes, S splits, G strengths of noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

EVERY_IMAGE = -1.0  # as the threshold of an ask for features


@dataclass(frozen=True)
class TensorRule:
    """Types and shape of one array: a number is a size, a letter a size of 1 or more that its message has only once."""

    dtype: type[np.generic] | tuple[type[np.generic], ...]
    shape: tuple[str | int, ...]
    optional: bool = False

    @property
    def dtypes(self) -> tuple[type[np.generic], ...]:
        """The types that are allowed."""
        return self.dtype if isinstance(self.dtype, tuple) else (self.dtype,)


SAMPLE_IDS = TensorRule(np.uint8, ("B", 16))
CUT_GRADIENT = {
    "gradient": TensorRule((np.float32, np.float16, np.int8), ("B", "n"), optional=True),
    "scales": TensorRule(np.float32, ("B",), optional=True),  # with int8 only
}


@dataclass(frozen=True)
class AskRule:
    """What one kind of ask carries: parameters with their exact types, tensors with their rules.

    `tensors` None stands for parameters of a model: arrays of these types by the model's own names, of any shape.
    """

    parameters: Mapping[str, type]
    tensors: Mapping[str, TensorRule] | None
    types: tuple[type[np.generic], ...] = (np.float32,)


_CODED = (np.float32, np.float16, np.int8)
_FORWARD = {"after": int, "batch": int, "epoch": int, "place": int, "size": int, "seed": int, "rate": float}
_KEPT_ROUND = {
    "step": int, "after": int, "base": int, "epoch": int, "epochs": int, "size": int, "seed": int, "rate": float,
}  # fmt: skip

ASK_KINDS: Mapping[str, AskRule] = {
    "collect_features": AskRule({"kappa": float, "seed": int}, {}),
    "score_batch": AskRule({"split": str}, {"logits": TensorRule(np.float32, ("B", "C")), "sample_ids": SAMPLE_IDS}),
    # Step n of a head that was at step `after` before; `base` is the step that the server could fall back to.
    "head_step": AskRule(
        {"step": int, "after": int, "base": int},
        {"features": TensorRule(np.float32, ("B", "d")), "sample_ids": SAMPLE_IDS},
    ),
    # Training of a client part, as `edge_runtime.part_keeper` explains it. The part stands at a numbered step, durably;
    # `batch` counts the batches since. A gradient belongs to the batch before, and moves the part by the rate.
    "load_part": AskRule({"step": int, "after": int, "base": int, "cut": int}, None),
    "forward": AskRule(_FORWARD, CUT_GRADIENT),
    "batch_loss": AskRule({"after": int, "batch": int}, {"values": TensorRule(np.float32, ("B", "C"))}),
    "settle": AskRule({"step": int, "after": int, "base": int, "batch": int, "rate": float}, CUT_GRADIENT),
    "upload_part": AskRule({"after": int}, {}),
    # P3SL: which split a device chooses by its own tables, from the noise `sigma` that each split would have and what
    # leaks at it, `leakage` (FSIM) by split and strength of noise; the layers that it lacks for the split, at whatever
    # step it stands; forward with Laplace noise of that standard deviation; a rest, of which it comes back by itself.
    "choose_split": AskRule(
        {"rule": str, "round": int},
        {
            "splits": TensorRule(np.uint16, ("S",)),
            "sigma": TensorRule(np.float32, ("S",)),
            "strengths": TensorRule(np.float32, ("G",)),
            "leakage": TensorRule(np.float32, ("S", "G")),
        },
    ),
    "take_turn": AskRule({"step": int, "after": int, "base": int, "cut": int}, None),
    "noisy_forward": AskRule({**_FORWARD, "sigma": float}, CUT_GRADIENT),
    "sleep": AskRule({"wake_s": float}, {}),
    # Of a part with a projection head: who is there for a round; the class prototypes towards which it is pulled with a
    # strength from now on; those of its own images since it was loaded.
    "attend": AskRule({"epoch": int}, {}),
    "set_prototypes": AskRule(
        {"step": int, "after": int, "base": int, "strength": float},
        {"classes": TensorRule(np.uint16, ("K",)), "values": TensorRule(np.float32, ("K", "d"))},
    ),
    "give_prototypes": AskRule({"after": int}, {}),
    # The device trains the whole part by itself, on the parameters that come with the ask.
    "local_round": AskRule({"cut": int, "epoch": int, "epochs": int, "size": int, "seed": int, "rate": float}, None),
    # Rounds of devices that keep what they trained and received, as `edge_runtime.round_keeper` explains it: what comes
    # with the ask is what has changed since `after`. EFTViT: coded by `contract.model_delta`; `threshold` times the
    # median of the classes is how many features of each class are sent, 0: as many as the largest has,
    # EVERY_IMAGE: one of each image.
    "masked_round": AskRule({**_KEPT_ROUND, "threshold": float}, None, _CODED),
    "load_global": AskRule({"step": int, "after": int, "base": int}, None, _CODED),
    # FEDBFPT: block `block` and the head are trained.
    "block_round": AskRule({**_KEPT_ROUND, "block": int}, None),
}
