"""What the released frontend is worth to a thief who keeps it and never asks the server (SA, Table 3).

The thief is a client: it has the frontend, its own labelled shots, and no noise on them. It tries a linear probe on the
frontend's tokens, of the released INT8 file and, were it leaked, of the original float frontend; and a small backend
of its own, trained on labelled public images behind the released frontend and then tuned on the shots. Running the
frontends is left to `reproduce_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from server_runtime.strategies import linear_probe
from tools.reproduce_baselines import Budget, Images, run_baseline

POOLS = ("prefix", "patches", "both")
PUBLIC_IMAGES = 5000  # labelled, of the auxiliary backend
HEAD_CHANNELS = 64
BATCH = 64
LR = 5e-4


@dataclass(frozen=True)
class Probed:
    """A linear probe's accuracy on the test images and what its held-out shots chose."""

    accuracy: float
    lr: float
    l2: float
    held_out_accuracy: float | None
    pool: str = ""

    def chosen(self) -> dict[str, float | str | None]:
        found: dict[str, float | str | None] = {
            "lr": self.lr, "l2": self.l2, "held_out_accuracy": self.held_out_accuracy
        }  # fmt: skip
        return {**found, "pool": self.pool} if self.pool else found


def probe(train: Images, test: Images, classes: int, steps: int, pool: str = "") -> Probed:
    """A linear head on features (n, f), chosen and fitted as the strategy linear_probe does; `inputs` are features."""
    mean = train.inputs.mean(dim=0)
    scale = train.inputs.std(dim=0, correction=0).clamp_min(1e-6)
    inputs = (train.inputs - mean) / scale
    lr, l2, held_out = linear_probe.choose_setting(inputs, train.labels, classes, steps)
    everyone = torch.ones(1, len(train.labels))
    weight, bias = linear_probe.fit(inputs, train.labels, everyone, [(lr, l2)], classes, steps)
    right = (((test.inputs - mean) / scale) @ weight[0].T + bias[0]).argmax(dim=1) == test.labels
    return Probed(int(right.sum()) / len(right), lr, l2, held_out, pool)


def steal_by_probe(train: Images, test: Images, prefix: int, classes: int, steps: int) -> Probed:
    """The best of three poolings of tokens (n, T, d), by held-out shots; `inputs` are tokens."""
    found = [
        probe(pooled(train, prefix, pool), pooled(test, prefix, pool), classes, steps, pool)
        for pool in (POOLS if prefix else ("patches",))
    ]
    return max(found, key=lambda each: each.held_out_accuracy or 0.0)


def pooled(images: Images, prefix: int, pool: str) -> Images:
    """Features of tokens: the mean of the prefix tokens, of the patch tokens, or one beside the other."""
    parts = {"prefix": images.inputs[:, :prefix], "patches": images.inputs[:, prefix:]}
    names = ("prefix", "patches") if pool == "both" else (pool,)
    return Images(torch.cat([parts[name].float().mean(dim=1) for name in names], dim=1), images.labels)


class AuxiliaryBackend(nn.Module):
    """A small transformer of the thief's own behind a stolen frontend: tokens (B, T, d) -> features (B, d)."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.num_features = dim
        self.norm = nn.LayerNorm(dim)
        self.blocks = nn.Sequential(*(
            nn.TransformerEncoderLayer(
                dim, max(1, dim // HEAD_CHANNELS), 4 * dim, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(depth)
        ))  # fmt: skip
        self.last_norm = nn.LayerNorm(dim)

    def forward_features(self, tokens: Tensor) -> Tensor:
        """(B, T, d)"""
        seen: Tensor = self.last_norm(self.blocks(self.norm(tokens.float())))
        return seen

    def forward_head(self, tokens: Tensor, pre_logits: bool = True) -> Tensor:
        """(B, d)"""
        return tokens.mean(dim=1)


def train_auxiliary(public: Images, classes: int, dim: int, depth: int, epochs: int, seed: int) -> AuxiliaryBackend:
    """An auxiliary backend with a head for the public classes, which is then thrown away; `inputs` are tokens."""
    torch.manual_seed(seed)
    device = public.labels.device
    backend, head = AuxiliaryBackend(dim, depth).to(device), nn.Linear(dim, classes).to(device)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW([*backend.parameters(), *head.parameters()], lr=LR, weight_decay=0.05)
    total = epochs * -(-len(public.labels) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, total)
    for _ in range(epochs):
        for rows in torch.randperm(len(public.labels), generator=generator).to(device).split(BATCH):
            logits = head(backend.forward_head(backend.forward_features(public.inputs[rows])))
            loss = functional.cross_entropy(logits, public.labels[rows])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    return backend.eval()


def steal_by_backend(
    auxiliary: AuxiliaryBackend, train: Images, test: Images, classes: int, budget: Budget, seed: int
) -> dict[str, float | None]:
    """The auxiliary backend tuned on the shots by the recipe of the baselines in the clear; `inputs` are tokens."""
    found = run_baseline("fine_tuning", auxiliary, 0, train, test, classes, budget, seed)
    return {"accuracy": found.accuracy, "lr": found.lr, "held_out_accuracy": found.held_out_accuracy}
