"""Cut a traced graph in two: a forward half that also gives what the backward half needs of it.

Kept is what is costly to make again; views and masks are made again from what is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from exporter.training_passes import VIEWS, is_size
from exporter.training_trace import Traced

aten = torch.ops.aten
_CHEAP = VIEWS | {
    aten.gt.Scalar, aten._to_copy.default, aten.full.default, aten.arange.start_step,
    aten.arange.default, aten.eq.Tensor, aten.flip.default, aten.scalar_tensor.default,
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A graph of its own with the names of its inputs and outputs, both in order."""

    module: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def divide(traced: Traced, recompute: bool) -> tuple[Piece, Piece]:
    """Forward and backward piece; with `recompute` the backward one repeats the forward pass, and nothing is kept."""
    graph = traced.module.graph
    made = dict(zip(traced.outputs, _results(graph), strict=True))
    gradients = {name: node for name, node in made.items() if name.startswith("grad:")}
    others = {name: node for name, node in made.items() if name not in gradients}
    given = dict(zip((node for node in graph.nodes if node.op == "placeholder"), traced.inputs, strict=True))
    forward = _ancestors(others.values())
    forward |= {node for node in graph.nodes if node.target is operator.getitem and node.args[0] in forward}
    kept = {} if recompute else {node: f"saved:{place}" for place, node in enumerate(_kept(graph, forward, gradients))}
    return (
        extract(traced.module, given, {**others, **{name: node for node, name in kept.items()}}),
        extract(traced.module, {**given, **kept}, gradients),
    )


def whole(traced: Traced) -> Piece:
    """The traced graph without the inputs that it does not need."""
    graph = traced.module.graph
    given = dict(zip((node for node in graph.nodes if node.op == "placeholder"), traced.inputs, strict=True))
    return extract(traced.module, given, dict(zip(traced.outputs, _results(graph), strict=True)))


def _results(graph: Graph) -> Sequence[Node]:
    return next(node for node in graph.nodes if node.op == "output").args[0]


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _kept(graph: Graph, forward: set[Node], gradients: dict[str, Node]) -> Iterator[Node]:
    """Forward tensors that the gradients are made of, in the order in which they appear."""
    wanted: set[Node] = set()
    seen: set[Node] = set()
    waiting = list(gradients.values())
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op != "placeholder" and node in forward and not _remade(node):
            wanted.add(node)
        else:
            waiting.extend(node.all_input_nodes)
    return (node for node in graph.nodes if node in wanted)


def _remade(node: Node) -> bool:
    """Views, masks, sizes, and whatever is made of weights alone."""
    if node.target is operator.getitem:
        return False
    return is_size(node) or node.target in _CHEAP or not _sees_batch(node)


def _sees_batch(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or any(isinstance(size, torch.SymInt) for size in value.shape)


def extract(module: GraphModule, given: dict[Node, str], wanted: dict[str, Node]) -> Piece:
    """The part of a graph between `given` and `wanted`; inputs that it does not need are left out."""
    nodes = list(module.graph.nodes)
    needed: set[Node] = set()
    waiting = list(wanted.values())
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend([] if node in given else node.all_input_nodes)
    graph, copies = Graph(), {}
    inputs = [node for node in given if node in needed]
    for node in inputs:
        copies[node] = graph.placeholder(f"input_{len(copies)}")
        copies[node].meta["val"] = node.meta["val"]
    for node in nodes:
        if node in needed and node not in given:
            copies[node] = graph.node_copy(node, lambda each: copies[each])
    graph.output([copies[node] for node in wanted.values()])
    graph.lint()
    return Piece(GraphModule(module, graph), tuple(given[node] for node in inputs), tuple(wanted))
