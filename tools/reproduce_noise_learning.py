"""What learns in the noise study: the backend on public tokens, the site's adaptation, and linear probes.

Which tokens it learns from is the release's part. On a GPU every step is one recorded graph: these models are small,
and a step would otherwise wait for Python.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from contract.adaptation import rate_share
from contract.console import say
from exporter.few_shot import Standard
from server_runtime.backend import zero_head
from server_runtime.strategies import linear_probe

WARM_UP = 3  # steps before a graph is recorded


class Stepper:
    """Steps of Adam with a learning rate that may change; `loss` sees tensors of the same shapes at every step."""

    def __init__(
        self, groups: Sequence[tuple[Sequence[nn.Parameter], float]], loss: Callable[..., Tensor], bf16: bool
    ) -> None:
        device = groups[0][0][0].device
        self._cuda = device.type == "cuda"
        self._rates = [torch.tensor(rate, device=device) for _, rate in groups]
        self._given = [rate for _, rate in groups]
        listed = [
            {"params": list(parameters), "lr": rate if self._cuda else float(rate)}
            for (parameters, _), rate in zip(groups, self._rates, strict=True)
        ]
        self._optimiser = torch.optim.Adam(listed, capturable=self._cuda, fused=self._cuda)
        self._loss, self._bf16, self._taken = loss, bf16 and self._cuda, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._value: Tensor | None = None

    def step(self, share: float, *inputs: Tensor) -> Tensor:
        """One step at `share` of the learning rates; the loss, which is read only when it is looked at."""
        for group, rate, given in zip(self._optimiser.param_groups, self._rates, self._given, strict=True):
            if self._cuda:
                rate.fill_(given * share)
            else:
                group["lr"] = given * share
        self._taken += 1
        if not self._cuda:
            return self._run(inputs)
        if self._taken <= WARM_UP:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                value = self._run(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return value
        if self._graph is None and self._inputs == []:
            self._record(inputs)
        if self._graph is None:
            return self._run(inputs)
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given)
        self._graph.replay()
        assert self._value is not None
        return self._value

    def _record(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = [each.clone() for each in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._value = self._run(self._inputs)
            self._graph = graph
        except RuntimeError as error:
            say(f"   a step could not be recorded, so every one waits for Python: {str(error).splitlines()[0]}")

    def _run(self, inputs: Sequence[Tensor]) -> Tensor:
        self._optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=self._bf16, cache_enabled=False):
            value = self._loss(*inputs)
        value.backward()
        self._optimiser.step()
        return value.detach()


def cosine_share(step: int, steps: int, warm: float = 0.05) -> float:
    """Share of the learning rate at a step: a linear rise, then half a cosine to zero."""
    rise = max(1, int(warm * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


@dataclass(frozen=True)
class TuneRule:
    """How a backend is tuned. `target`: ce (labels), features (the plain backend's on clean tokens)."""

    name: str
    target: str
    lr: float
    epochs: float
    mix: float = 0.0  # Beta parameter of the mixture of two frontends' tokens; 0: none
    noisy: bool = True  # tokens go through the wire
    cosine: bool = False
    batch: int = 64


TUNES = {
    "paper": TuneRule("paper", "ce", 1e-5, 1, mix=0.75, noisy=False, batch=32),
    "noise-aware": TuneRule("noise-aware", "ce", 1e-4, 3, mix=0.75),
    "distil": TuneRule("distil", "features", 5e-4, 20, mix=0.75, cosine=True, batch=128),
}


def tune_backend(
    backend: nn.Module, head: tuple[Tensor, Tensor], rule: TuneRule, frontends: Sequence[Tensor], labels: Tensor,
    clean: Tensor, through: Callable[[Tensor], Tensor], seed: int, epochs: float | None = None,
) -> nn.Module:  # fmt: skip
    """A tuned copy. `frontends` are tokens (n, T, d) of the same images from the plain and from noised frontends;
    `clean` (n, f) what the plain backend makes of the first; `through` sends tokens through wire and filter."""
    tuned = copy.deepcopy(backend).requires_grad_(True)
    device = labels.device
    layer = nn.Linear(head[0].shape[1], head[0].shape[0]).to(device)
    layer.load_state_dict({"weight": head[0].to(device), "bias": head[1].to(device)})
    spread = clean.float().std(dim=0).clamp_min(1e-6)

    def loss(tokens: Tensor, wanted: Tensor, goal: Tensor) -> Tensor:
        features = tuned(through(tokens) if rule.noisy else tokens.float())
        if rule.target == "ce":
            return functional.cross_entropy(layer(features).float(), wanted)
        return ((features.float() - goal) / spread).square().mean()

    learnt = list(tuned.parameters()) + (list(layer.parameters()) if rule.target == "ce" else [])
    stepper = Stepper([(learnt, rule.lr)], loss, bf16=True)
    generator = torch.Generator().manual_seed(seed)
    beta = torch.distributions.Beta(rule.mix, rule.mix) if rule.mix else None
    batch = min(rule.batch, len(labels))
    steps = max(1, round((rule.epochs if epochs is None else epochs) * len(labels) / batch))
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(len(labels), generator=generator)
        rows, order = order[:batch].to(device), order[batch:]
        other = int(torch.randint(len(frontends), (1,), generator=generator))
        tokens = frontends[0][rows]
        if other and beta is not None:
            share = beta.sample((batch, 1, 1)).to(device)
            tokens = torch.lerp(tokens.float(), frontends[other][rows].float(), share).half()
        share_of_rate = cosine_share(step, steps) if rule.cosine else 1.0
        stepper.step(share_of_rate, tokens, labels[rows], clean[rows].float())
    return tuned.requires_grad_(False)


@torch.no_grad()
def features_of(backend: nn.Module, tokens: Tensor, restore: Callable[[Tensor], Tensor], batch: int = 250) -> Tensor:
    """Features (n, f) of received tokens."""
    return torch.cat([backend(restore(part)).float() for part in tokens.split(batch)])


@dataclass(frozen=True)
class Rates:
    """Learning rates of an adaptation."""

    backend: float
    head: float


def adapt(
    backend: nn.Module, received: Tensor, labels: Tensor, sources: Tensor, prefix: int,
    restore: Callable[[Tensor], Tensor], classes: int, rates: Rates, epochs: int, seed: int,
) -> tuple[nn.Module, nn.Linear]:  # fmt: skip
    """Split adaptation's step 6 on received tokens (n, S, d): each epoch every image as it is, and once with a quarter
    of its patches from `sources` (n, S - prefix). As the server does: a head of zeros on standardised features, rates
    that fall by epoch. The model that is returned gives standardised features."""
    device = received.device
    standard = Standard(features_of(backend, received, restore))
    learnt = nn.Sequential(copy.deepcopy(backend).requires_grad_(True), standard)
    torch.manual_seed(seed)
    head = zero_head(len(standard.mean), classes, device)

    def loss(tokens: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(head(learnt(restore(tokens))).float(), wanted)

    stepper = Stepper(
        [(list(learnt.parameters()), rates.backend), (list(head.parameters()), rates.head)], loss, bf16=False
    )
    count, patches = received.shape[0], received.shape[1] - prefix
    batch = min(32, 2 * count)
    places = torch.arange(received.shape[1], device=device)
    for epoch in range(1, epochs + 1):
        order = torch.randperm(2 * count, device=device)
        for rows in order.split(batch):
            if len(rows) < batch:  # a recorded step has one size; another epoch brings the images that are left
                break
            image = rows % count
            origin = image[:, None].repeat(1, len(places))
            if patches:
                drawn = torch.rand(batch, patches, device=device).argsort(dim=1) < round(patches / 4)
                replaced = drawn & (rows >= count)[:, None]
                origin[:, prefix:] = torch.where(replaced, sources[image], origin[:, prefix:])
            stepper.step(rate_share(epoch, epochs), received[origin, places], labels[image])
    return learnt.requires_grad_(False), head.requires_grad_(False)


def nearest_others(tokens: Tensor) -> Tensor:
    """For each image and position of clean patch tokens (n, K, d) the other image that is most alike there (n, K)."""
    unit = functional.normalize(tokens.float(), dim=2).transpose(0, 1)  # (K, n, d)
    likeness = unit @ unit.transpose(1, 2)
    likeness.diagonal(dim1=1, dim2=2).fill_(-2.0)
    return likeness.argmax(dim=2).T.contiguous()


def probe(train: Tensor, labels: Tensor, test: Tensor, wanted: Tensor, classes: int) -> float:
    """Accuracy of a linear probe on features, its setting chosen on held-out shots as linear_probe does."""
    mean, scale = train.mean(dim=0), train.std(dim=0, correction=0).clamp_min(1e-6)
    inputs = (train - mean) / scale
    lr, l2, _ = linear_probe.choose_setting(inputs, labels, classes, 100)
    everyone = torch.ones(1, len(labels), device=labels.device)
    weight, bias = linear_probe.fit(inputs, labels, everyone, [(lr, l2)], classes, 100)
    right = (((test - mean) / scale) @ weight[0].T + bias[0]).argmax(dim=1) == wanted
    return float(right.float().mean())
