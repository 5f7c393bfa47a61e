"""SGD and AdamW as torch has them, in numpy and in place: parameters and moments move, nothing else is allocated.

Pure. Where gradients come from, and what is done about those that are not finite, is left to `trainer`.

A tensor is worked through in blocks that stay in the cache together with their moments and the scratch block, since
numpy makes one pass over memory for each operation. Blocks and tensor order do not change a bit of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from contract.training import OptimiserRule

Floats: TypeAlias = NDArray[np.float32]

BLOCK = 1 << 16  # AdamW on 14.9 M parameters: 48 ms; blocks of 16 Ki 64 ms (calls), the whole tensor 108 ms (memory)
DOT_BLOCK = 1 << 13  # below the length at which OpenBLAS would share a dot product out to threads
MOMENTS = {"sgd": ("momentum",), "adamw": ("first", "second")}


class Optimiser:
    """The moments of named parameters, and how many steps they have seen."""

    def __init__(self, rule: OptimiserRule, parameters: Mapping[str, Floats]) -> None:
        """`parameters` gives names and shapes; the arrays come with each step."""
        self.rule = rule
        self.steps = 0
        kinds = MOMENTS[rule.kind] if rule.kind != "sgd" or rule.momentum else ()
        self.moments: dict[str, Floats] = {  # "first:<name>"
            f"{kind}:{name}": np.zeros_like(array, order="C") for kind in kinds for name, array in parameters.items()
        }
        self._scratch = np.empty(BLOCK, np.float32)

    def reset(self) -> None:
        """Forget all steps, as for parameters that came from elsewhere."""
        self.steps = 0
        for moment in self.moments.values():
            moment.fill(0)

    def step(self, parameters: Mapping[str, Floats], gradients: Mapping[str, Floats], learning_rate: float) -> None:
        """Move every parameter that has a gradient; all arrays float32 and C-contiguous, gradients stay as they are."""
        self.steps += 1
        move = self._sgd if self.rule.kind == "sgd" else self._adamw
        for name, gradient in gradients.items():
            move(name, parameters[name].reshape(-1), gradient.reshape(-1), learning_rate)

    def _sgd(self, name: str, parameter: Floats, gradient: Floats, learning_rate: float) -> None:
        """v = m v + (g + wd p), p -= lr v; from v = 0 the first step gives v = g + wd p, as in torch."""
        momentum, decay, rate = map(np.float32, (self.rule.momentum, self.rule.weight_decay, learning_rate))
        velocity = self.moments[f"momentum:{name}"].reshape(-1) if momentum else None
        for piece in _blocks(parameter.size, BLOCK):
            p, g = parameter[piece], gradient[piece]
            change = self._scratch[: p.size]
            np.multiply(p, decay, out=change)
            np.add(change, g, out=change)
            if velocity is not None:
                v = velocity[piece]
                np.multiply(v, momentum, out=v)
                np.add(v, change, out=v)
                np.multiply(v, rate, out=change)
            else:
                np.multiply(change, rate, out=change)
            np.subtract(p, change, out=p)

    def _adamw(self, name: str, parameter: Floats, gradient: Floats, learning_rate: float) -> None:
        """p *= 1 - lr wd, then p -= lr (m / c1) / (sqrt(v / c2) + eps) with c = 1 - beta^t; sqrt(c2) is moved into the
        factor and into eps, which saves a pass."""
        rule = self.rule
        root = math.sqrt(1 - rule.beta_2**self.steps)
        rate = np.float32(learning_rate * root / (1 - rule.beta_1**self.steps))
        epsilon, kept = np.float32(rule.epsilon * root), np.float32(1 - learning_rate * rule.weight_decay)
        beta_2, new_1, new_2 = map(np.float32, (rule.beta_2, 1 - rule.beta_1, 1 - rule.beta_2))
        first, second = self.moments[f"first:{name}"].reshape(-1), self.moments[f"second:{name}"].reshape(-1)
        for piece in _blocks(parameter.size, BLOCK):
            p, g, m, v = parameter[piece], gradient[piece], first[piece], second[piece]
            scratch = self._scratch[: p.size]
            np.subtract(g, m, out=scratch)
            np.multiply(scratch, new_1, out=scratch)
            np.add(m, scratch, out=m)  # m += (1 - beta_1) (g - m)
            np.multiply(v, beta_2, out=v)
            np.multiply(g, g, out=scratch)
            np.multiply(scratch, new_2, out=scratch)
            np.add(v, scratch, out=v)
            np.sqrt(v, out=scratch)
            np.add(scratch, epsilon, out=scratch)
            np.divide(m, scratch, out=scratch)
            np.multiply(scratch, rate, out=scratch)
            np.multiply(p, kept, out=p)
            np.subtract(p, scratch, out=p)


def squared_norm(gradients: Mapping[str, Floats]) -> float:
    """Sum of squares over all gradients: NaN or infinite where any value is, or where one is beyond about 1e19."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for gradient in gradients.values():
            flat = gradient.reshape(-1)
            for piece in _blocks(flat.size, DOT_BLOCK):
                total += float(np.dot(flat[piece], flat[piece]))
    return total


def _blocks(size: int, block: int) -> Iterator[slice]:
    for start in range(0, size, block):
        yield slice(start, min(start + block, size))
