"""Noise allocated by what a strong attacker reads: per-channel scales learnt against a decoder that learns beside them.

The classifier's loss is the distance of the backend's features from the clean ones, the attacker's the error of its
picture; scales follow the first down and the second up. The budget, the mean square of the scales, stays that of
channel noise. Judging what comes out is left to a fresh attacker.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.reproduce_noise_attack import AttackRule, Decoder
from tools.reproduce_noise_learning import cosine_share
from tools.reproduce_noise_release import Known
from tools.reproduce_noise_world import Halves

TRADE = 1.0  # weight of the attacker's error, in units of the picture's variance, against the feature error


def learn_shape(
    halves: Halves, known: Known, public: list[Tensor], rows: Tensor, clean: Tensor, patches: Tensor, rule: AttackRule
) -> Tensor:
    """Factors (d,) on the patch channels' noise scale kappa sigma_c, with a mean square of 1; a quarter of the steps
    that an attack takes."""
    device, layout = halves.device, halves.layout
    sigma = torch.tensor(known.public.statistics.sigma_patch, device=device).clamp_min(1e-6)
    sigma_prefix = torch.tensor(known.public.statistics.sigma_prefix, device=device)
    torch.manual_seed(3)
    decoder = Decoder(layout.count, layout.prefix, layout.dim, patches.shape[2], rule).to(device)
    logs = torch.zeros(layout.dim, device=device, requires_grad=True)
    attack = torch.optim.Adam(decoder.parameters(), lr=rule.lr)
    shape = torch.optim.Adam([logs], lr=2e-2)
    spread, places = clean.std(dim=0).clamp_min(1e-6), torch.arange(layout.count, device=device)
    mean, variance = public[0][:500].float().mean((0, 1)), patches.var()
    rows = rows.to(device)
    steps = max(10, rule.steps // 4)
    for step in range(steps):
        chosen = rows[torch.randint(len(rows), (64,), device=device)]
        tokens = public[step % len(public)][chosen].float()
        factors = _normalised(logs)
        noise = torch.distributions.Laplace(0.0, 1.0).sample(tokens.shape).to(device)
        scales = torch.cat([0.5 * sigma_prefix.expand(layout.prefix, -1), (factors * sigma).expand(layout.patches, -1)])
        noisy = tokens + noise * scales
        standard = (noisy - mean) / (sigma * (1 + 2 * factors.detach().square()).sqrt())
        picture = decoder(standard, places, standard) + 0.5
        error = (picture - patches[chosen]).square().mean() / variance
        lost = ((halves.backend(noisy) - clean[chosen]) / spread).square().mean()
        attack.zero_grad()
        shape.zero_grad()
        error.backward(retain_graph=True)
        attack.step()
        logs.grad = None
        for parameter in decoder.parameters():
            parameter.requires_grad_(False)
        again = (decoder(standard, places, standard) + 0.5 - patches[chosen]).square().mean() / variance
        (lost - TRADE * again).backward()
        for parameter in decoder.parameters():
            parameter.requires_grad_(True)
        for group in attack.param_groups:
            group["lr"] = rule.lr * cosine_share(step, steps)
        if step > steps // 10:
            shape.step()
    return _normalised(logs.detach())


def _normalised(logs: Tensor) -> Tensor:
    """Factors with a mean square of 1, none further than a factor of 8 from another's bounds."""
    factors = logs.clamp(-2.0, 2.0).exp()
    return factors / factors.square().mean().sqrt()
