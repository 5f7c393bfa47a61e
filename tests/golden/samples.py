"""One message of every type, one manifest and one training plan, whose bytes in protocol 1 are kept beside this file.

`python -m tests.golden.samples` writes the files that are missing; one that exists is never written again, since
devices in the field speak these bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from contract import manifest as package
from contract import training
from contract.codec import encode
from contract.images import ImageRule
from contract.messages import (
    Activations,
    Ask,
    Bye,
    Challenge,
    Checkpoints,
    Choice,
    Chunk,
    Enrol,
    Enrolled,
    Features,
    Fetch,
    Gradient,
    Heartbeat,
    Hello,
    Message,
    Offer,
    PatchFeatures,
    Piece,
    Proof,
    Prototypes,
    Refuse,
    Scores,
    Settled,
    Update,
    Verdict,
    Vouch,
    Welcome,
)
from contract.tokens import Statistics, TokenLayout

FOLDER = Path(__file__).parent / "protocol_1"
MANIFEST_FILE = Path(__file__).parent / "manifest_1.json"
TRAINING_FILE = Path(__file__).parent / "training_1.json"
SEQ, ACK = 7, 3

_DIGEST = "0123456789abcdef" * 4


def _codes(*shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape)) % 255 - 127).reshape(shape).astype(np.int8)


def _floats(*shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape)) / 8 - 1).reshape(shape).astype(np.float32)


def _ids(count: int) -> np.ndarray:
    return np.arange(count * 16, dtype=np.uint8).reshape(count, 16)


MESSAGES: dict[str, Message] = {
    "hello": Hello("pi-4", "0123456789abcdef", 1, 1, ("ask-head-step",), _DIGEST, 10, _DIGEST, "adapt", "s-1", 5),
    "hello_first": Hello("pi-4", "0123456789abcdef", 1, 2, (), None, 0, None, "infer", None, 0, 262144),
    "challenge": Challenge(bytes(range(32))),
    "proof": Proof(bytes(range(64))),
    "enrol": Enrol("pi-4", "0123456789abcdef", bytes(range(32))),
    "vouch": Vouch(bytes(range(64)), bytes(range(64, 128))),
    "enrolled": Enrolled("clinic", "0123456789abcdef"),
    "welcome": Welcome(
        *("s-1", "run-3", "clinic", "split_adaptation", "permuted-label", 10, _DIGEST, _DIGEST),
        *(1.0, 42, 16, 10.0, 5),
    ),
    "refuse": Refuse("class-list", "expected 10 classes, found 9", "use the class list of the site", None),
    "refuse_later": Refuse("busy", "1000 devices are connected", "wait — it comes back by itself", 30.0),
    "ask": Ask("a-1", "collect_features", {"kappa": 1.0, "seed": 42}, 600.0),
    "ask_score_batch": Ask(
        *("a-2", "score_batch", {"split": "train"}, 60.0),
        {"logits": _floats(2, 3), "sample_ids": _ids(2)},
    ),
    "ask_head_step": Ask(
        *("a-3", "head_step", {"step": 7, "after": 5, "base": 4}, 60.0),
        {"features": _floats(2, 5), "sample_ids": _ids(2)},
    ),
    "ask_load_part": Ask(
        *("a-4", "load_part", {"step": 8, "after": 7, "base": 4, "cut": 2}, 60.0),
        {"layer1.0.conv1.weight": _floats(2, 1, 3, 3), "layer1.0.bn1.running_mean": _floats(2), "scale": _floats()},
    ),
    "ask_forward_first": Ask(
        "a-5",
        "forward",
        {"after": 8, "batch": 0, "epoch": 1, "place": 0, "size": 64, "seed": 42, "rate": 0.125},
        60.0,
    ),
    "ask_forward": Ask(
        "a-6",
        "forward",
        {"after": 8, "batch": 1, "epoch": 1, "place": 1, "size": 64, "seed": 42, "rate": 0.125},
        60.0,
        {"gradient": _codes(2, 6), "scales": _floats(2) + np.float32(1.5)},
    ),
    "ask_batch_loss": Ask("a-7", "batch_loss", {"after": 8, "batch": 1}, 60.0, {"values": _floats(2, 3)}),
    "ask_settle": Ask(
        "a-8",
        "settle",
        {"step": 9, "after": 8, "base": 8, "batch": 2, "rate": 0.0625},
        60.0,
        {"gradient": _floats(2, 6).astype(np.float16)},
    ),
    "ask_upload_part": Ask("a-9", "upload_part", {"after": 9}, 60.0),
    "ask_local_round": Ask(
        "a-10",
        "local_round",
        {"cut": 4, "epoch": 3, "epochs": 2, "size": 64, "seed": 42, "rate": 0.125},
        60.0,
        {"head.weight": _floats(3, 2)},
    ),
    "ask_masked_round": Ask(
        "a-11",
        "masked_round",
        {
            "step": 10,
            "after": 9,
            "base": 8,
            "epoch": 6,
            "epochs": 5,
            "size": 32,
            "seed": 42,
            "rate": 0.125,
            "threshold": 1.5,
        },
        60.0,
        {
            "blocks.2.attn.qkv.weight": _codes(3, 2),
            "blocks.2.attn.qkv.weight.delta_scale": _floats(3),
            "norm.bias": _floats(2).astype(np.float16),
            "head.weight": _floats(3, 2),
        },
    ),
    "ask_load_global": Ask("a-12", "load_global", {"step": 11, "after": 10, "base": 8}, 60.0),
    "ask_block_round": Ask(
        "a-13",
        "block_round",
        {
            "step": 12,
            "after": 11,
            "base": 8,
            "epoch": 6,
            "epochs": 5,
            "size": 32,
            "seed": 42,
            "rate": 0.125,
            "block": 3,
        },
        60.0,
        {"blocks.3.norm1.weight": _floats(2)},
    ),
    "ask_attend": Ask("a-11", "attend", {"epoch": 3}, 60.0),
    "ask_set_prototypes": Ask(
        "a-12",
        "set_prototypes",
        {"step": 13, "after": 11, "base": 7, "strength": 0.75},
        60.0,
        {"classes": np.array([0, 2], np.uint16), "values": _floats(2, 4)},
    ),
    "ask_give_prototypes": Ask("a-13", "give_prototypes", {"after": 13}, 60.0),
    "ask_choose_split": Ask(
        "a-14",
        "choose_split",
        {"rule": "p3sl", "round": 3},
        60.0,
        {
            "splits": np.array([1, 2], np.uint16),
            "sigma": np.array([1.5, 0.25], np.float32),
            "strengths": np.array([0.0, 1.25, 2.5], np.float32),
            "leakage": np.array([[0.5, 0.375, 0.25], [0.375, 0.25, 0.25]], np.float32),
        },
    ),
    "ask_take_turn": Ask(
        *("a-15", "take_turn", {"step": 14, "after": 13, "base": 7, "cut": 2}, 60.0),
        {"layer1.0.bn1.running_mean": _floats(2)},
    ),
    "ask_noisy_forward": Ask(
        "a-16",
        "noisy_forward",
        {"after": 14, "batch": 1, "epoch": 1, "place": 1, "size": 64, "seed": 42, "rate": 0.125, "sigma": 1.5},
        60.0,
        {"gradient": _floats(2, 6)},
    ),
    "ask_sleep": Ask("a-17", "sleep", {"wake_s": 312.5}, 60.0),
    "features": Features(
        *("a-1", 0, 3, "train", _ids(2), _codes(2, 5, 4)),
        np.arange(8, dtype=np.uint16).reshape(2, 4),
        np.array([1, 0], np.uint16),
    ),
    "features_bare": Features("infer-1", 0, 1, "infer", _ids(1), _codes(1, 5, 4), None, None),
    "scores": Scores("infer-1", 0, _floats(1, 3)),
    "gradient": Gradient("a-2", 0.75, 1, 2, _floats(2, 3)),
    "checkpoints": Checkpoints("a-3", (0, 2, 4)),
    "settled": Settled("a-4", 500),
    "choice": Choice("a-14", 2),
    "activations": Activations("a-5", 0, 500, "train", _floats(2, 6), np.array([1, 0], np.uint16)),
    "activations_bare": Activations("infer-1", 1, 3, "infer", _floats(2, 6).astype(np.float16), None),
    "update": Update(
        *("a-9", 500, 128, 0.75, 100),
        {"layer1.0.conv1.weight": _floats(2, 1, 3, 3), "layer1.0.bn1.running_mean": _floats(2), "scale": _floats()},
    ),
    "patch_features": PatchFeatures(
        *("a-11", 500, 500, 0.75, 100),
        *(_codes(2, 3, 4), _floats(4), np.array([1, 0], np.uint16)),
    ),
    "patch_features_half": PatchFeatures(
        *("a-11", 500, 500, 0.75, 100),
        *(_floats(2, 3, 4).astype(np.float16), None, np.array([1, 0], np.uint16)),
    ),
    "patch_features_none": PatchFeatures("a-11", 0, 0, 0.0, 0, None, None, None),
    "prototypes": Prototypes("a-13", (0, 2), (12, 5), _floats(2, 4)),
    "prototypes_bare": Prototypes("a-13", (), (), None),
    "hello_update": Hello("pi-4", "0123456789abcdef", 1, 1, ("updates",), _DIGEST, 0, None, "update", None, 0),
    "offer": Offer(_DIGEST, 3, 24_000_000, False),
    "offer_none": Offer(None, 0, 0, True),
    "fetch": Fetch(_DIGEST, "front.onnx", 1 << 19),
    "piece": Piece(_DIGEST, "front.onnx", 3, 8, np.arange(5, dtype=np.uint8)),
    "verdict": Verdict(_DIGEST, "rolled-back", "slower"),
    "chunk": Chunk(_DIGEST, 0, 2, 9, np.arange(5, dtype=np.uint8)),
    "heartbeat": Heartbeat(12, True, "training, epoch 12 of 100", 3.5),
    "bye": Bye("collected", True),
}


def numbers(name: str) -> dict[str, int]:
    """Number and acknowledgement that the golden frame of a sample bears."""
    kind = MESSAGES[name].TYPE
    if kind in ("hello", "challenge", "proof", "welcome", "refuse"):
        return {"seq": 0, "ack": 0}
    return {"seq": 0 if kind in ("heartbeat", "bye") else SEQ, "ack": ACK}


MANIFEST = package.Manifest(
    format=package.FORMAT,
    name="front",
    version=3,
    model="vit_tiny_patch16_224",
    family="vit",
    cuts=(
        package.Cut(
            index=2,
            depth=12,
            onnx="front.onnx",
            input_name="images",
            output_name="tokens",
            input_shape=(3, 32, 32),
            macs=123456,
            tokens=TokenLayout(prefix=1, grid=(2, 2), dim=4),
            statistics=Statistics(
                sigma_prefix=(1.0, 0.5, 0.25, 0.125),
                sigma_patch=(0.1, 0.2, 0.3, 0.4),
                absmax_prefix=(4.0, 3.0, 2.0, 1.0),
                absmax_patch=(1e-07, 1e22, 0.0, 1.5),
            ),
            weights=(
                package.WeightRecord("blocks.0.attn.qkv", (4, 12), 1, 100, 148, None, 196),
                package.WeightRecord("blocks.0.mlp.fc2", (16, 4), 1, 244, 308, 324, 388),
            ),
        ),
    ),
    image=ImageRule(32, 32, "bicubic", 0.9, "center", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), "white", 64000000),
    quantization=package.Quantization("w8a8", ("smooth", "shift"), 0.98, ("head",), 31.5, 0.9997, False),
    engine=package.EngineNeeds(20, 10, "1.19"),
    transforms=package.TransformRules(0.1, 1.0, 2.0, True),
    label_modes=("permuted-label", "client-head"),
    classes=("apple", "äpfel"),
    files=(
        package.FileRecord("front.onnx", 1024, _DIGEST),
        package.FileRecord("golden.safetensors", 96, _DIGEST[::-1]),
    ),
    signer="0123456789abcdef",
    created="2026-11-28T00:00:00Z",
)


TRAINING = training.TrainingPlan(
    format=training.FORMAT,
    strategy="parallel_split",
    whole_model=True,
    class_count=10,
    cuts=(
        training.TrainingCut(
            index=2,
            depth=4,
            layer="layer1.0",
            forward="cut_2.forward.onnx",
            backward="cut_2.backward.onnx",
            evaluate="cut_2.evaluate.onnx",
            output_shape=(8, 4, 4),
            evaluated_shape=(8, 4, 4),
            kept=None,
            patches=None,
            trainable=("layer1.0.conv1.weight", "layer1.0.bn1.weight"),
            frozen=("conv1.weight",),
            buffers=("layer1.0.bn1.running_mean", "layer1.0.bn1.running_var"),
            saved=3,
            macs=123456,
            loss="none",
        ),
        training.TrainingCut(
            index=4,
            depth=4,
            layer="head",
            forward="cut_4.forward.onnx",
            backward="cut_4.backward.onnx",
            evaluate="cut_4.evaluate.onnx",
            output_shape=(10,),
            evaluated_shape=(10,),
            kept=None,
            patches=None,
            trainable=("layer1.0.conv1.weight", "layer1.0.bn1.weight", "head.weight"),
            frozen=(),
            buffers=("layer1.0.bn1.running_mean", "layer1.0.bn1.running_var"),
            saved=0,
            macs=234567,
            loss="cross-entropy",
        ),
    ),
    optimiser=training.OptimiserRule("adamw", 0.0, 0.05, 0.9, 0.999, 1e-08),
    augment=training.AugmentRule(4, True, 0.25),
    gradient="int8",
    activations="float16",
)


def _write_missing() -> None:
    FOLDER.mkdir(exist_ok=True)
    frames = {FOLDER / f"{name}.bin": encode(message, **numbers(name)) for name, message in MESSAGES.items()}
    documents = {MANIFEST_FILE: package.to_bytes(MANIFEST), TRAINING_FILE: training.to_bytes(TRAINING)}
    for path, data in {**frames, **documents}.items():
        if not path.exists():
            path.write_bytes(data)


if __name__ == "__main__":
    _write_missing()
