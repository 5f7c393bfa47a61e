"""The softmax head on the device: the loss and its gradient, and for client-head mode the head itself with its Adam.

Pure numpy; which samples a batch holds, and keeping the head on the disk, are left to `worker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

Floats: TypeAlias = NDArray[np.float32]
Labels: TypeAlias = NDArray[np.int64]

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Adam as published and as torch has it


@dataclass(frozen=True)
class BatchLoss:
    """Cross-entropy of a batch: its mean, how many were right, and d(mean)/d(input)."""

    mean_loss: float
    correct: int
    count: int
    gradient: Floats  # (B, C) for logits, (B, d) for features


def softmax(logits: Floats) -> Floats:
    """Probabilities (B, C) float32; finite for any finite logits."""
    powers: Floats = np.exp(logits - logits.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


def softmax_gradient(logits: Floats, labels: Labels) -> BatchLoss:
    """Mean cross-entropy of logits (B, C) against labels (B,), and its gradient (softmax - one-hot) / B.

    The only negative entry of a row is at its label: whoever reads the gradient reads the label (SA step 6).
    """
    count = len(labels)
    rows = np.arange(count)
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_total = np.log(np.exp(shifted).sum(axis=1))
    mean_loss = float(np.mean(log_total - shifted[rows, labels]))
    gradient = np.exp(shifted - log_total[:, None])
    gradient[rows, labels] -= 1.0
    correct = int(np.count_nonzero(logits.argmax(axis=1) == labels))
    return BatchLoss(mean_loss, correct, count, (gradient / count).astype(np.float32))


@dataclass(frozen=True)
class Head:
    """One linear layer and its Adam state."""

    weight: Floats  # (C, d)
    bias: Floats  # (C,)
    first_moment: Floats  # (C, d + 1), the bias in the last column
    second_moment: Floats
    step: int  # Adam's own count

    def logits(self, features: Floats) -> Floats:
        """(B, d) -> (B, C)"""
        logits: Floats = features @ self.weight.T + self.bias
        return logits


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head, its run, the server's step at which it stands and the one before, the ask that brought it there, and what
    was answered: asked again, it says the same."""

    head: Head
    run: str
    step: int
    after: int
    ask: str
    answer: BatchLoss


def new_head(class_count: int, dim: int, rng: np.random.Generator) -> Head:
    """Uniform in +-1/sqrt(d), as torch's Linear starts."""
    bound = 1.0 / np.sqrt(dim)
    drawn = rng.uniform(-bound, bound, (class_count, dim + 1)).astype(np.float32)
    empty = np.zeros((class_count, dim + 1), np.float32)
    return Head(drawn[:, :dim].copy(), drawn[:, dim].copy(), empty, empty, 0)


def zero_head(class_count: int, dim: int) -> Head:
    """All zeros, as split adaptation starts: a random head would send noise into the backend."""
    empty = np.zeros((class_count, dim + 1), np.float32)
    return Head(empty[:, :dim].copy(), empty[:, dim].copy(), empty, empty, 0)


def head_step(head: Head, features: Floats, labels: Labels, learning_rate: float) -> tuple[Head, BatchLoss]:
    """One Adam step on the head, and the batch's loss with d(mean loss)/d(features) (B, d).

    Both gradients are taken at the head before the step, as end-to-end training takes them.
    """
    loss = softmax_gradient(head.logits(features), labels)
    gradient = np.concatenate([loss.gradient.T @ features, loss.gradient.sum(axis=0)[:, None]], axis=1)  # (C, d + 1)
    step = head.step + 1
    first = (BETA_1 * head.first_moment + (1 - BETA_1) * gradient).astype(np.float32)
    second = (BETA_2 * head.second_moment + (1 - BETA_2) * gradient**2).astype(np.float32)
    direction = (first / (1 - BETA_1**step)) / (np.sqrt(second / (1 - BETA_2**step)) + EPSILON)
    change = (learning_rate * direction).astype(np.float32)
    moved = Head(head.weight - change[:, :-1], head.bias - change[:, -1], first, second, step)
    return moved, BatchLoss(loss.mean_loss, loss.correct, loss.count, loss.gradient @ head.weight)


def checkpoint_to_bytes(checkpoint: HeadCheckpoint) -> bytes:
    """Safetensors; run and ask id as bytes."""
    head, answer = checkpoint.head, checkpoint.answer
    return save(
        {
            "weight": head.weight,
            "bias": head.bias,
            "first_moment": head.first_moment,
            "second_moment": head.second_moment,
            "counts": np.array([head.step, checkpoint.step, checkpoint.after, answer.correct, answer.count], np.int64),
            "mean_loss": np.array([answer.mean_loss], np.float64),
            "gradient": answer.gradient,
            "run": np.frombuffer(checkpoint.run.encode(), np.uint8),
            "ask": np.frombuffer(checkpoint.ask.encode(), np.uint8),
        }
    )


def checkpoint_from_bytes(data: bytes) -> HeadCheckpoint:
    """Raises: ValueError when the tensors are not those of a checkpoint."""
    try:
        tensors = load(data)
        weight, bias = tensors["weight"], tensors["bias"]
        first, second = tensors["first_moment"], tensors["second_moment"]
        adam_step, step, after, correct, count = (int(number) for number in tensors["counts"])
        answer = BatchLoss(float(tensors["mean_loss"][0]), correct, count, tensors["gradient"])
        run, ask = (tensors[name].tobytes().decode() for name in ("run", "ask"))
    except (SafetensorError, KeyError, IndexError) as error:
        raise ValueError(f"not a head: {error}") from error
    moment = (weight.shape[0], weight.shape[-1] + 1)
    if weight.ndim != 2 or bias.shape != weight.shape[:1] or first.shape != moment or second.shape != moment:
        raise ValueError(f"not a head: weight {weight.shape}, bias {bias.shape}, moments {first.shape}")
    return HeadCheckpoint(Head(weight, bias, first, second, adam_step), run, step, after, ask, answer)
