"""What is done to a traced training graph before it is cut: no writes in place, no aliases, plain sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Graph, GraphModule, Node

from contract.errors import ExportError

aten = torch.ops.aten

VIEWS = frozenset({
    aten.view.default, aten.reshape.default, aten.permute.default, aten.expand.default, aten.unsqueeze.default,
    aten.squeeze.dims, aten.squeeze.dim, aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.t.default,
    aten._unsafe_view.default, aten.split_with_sizes.default, aten.alias.default,
})  # fmt: skip


def tidy(module: GraphModule) -> None:
    """All passes in order. Raises ExportError for a write into part of a tensor."""
    passes: tuple[Callable[[Graph], None], ...] = (_write_nothing_in_place, _drop_aliases, _plain_sizes, _share)
    for each in passes:
        each(module.graph)
        module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


def _write_nothing_in_place(graph: Graph) -> None:
    """`x += y` becomes `z = x + y`, and whoever read x after it reads z."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if not node.target._schema.is_mutable:
            continue
        packet = node.target._schema.name.split("::")[1]
        changed = node.args[0]
        plain = getattr(getattr(aten, packet.rstrip("_"), None), node.target._overloadname, None)
        if plain is None or not isinstance(changed, Node) or _is_viewed(changed):
            raise ExportError(
                f"the part writes into a tensor that it also uses elsewhere ({node.target})",
                "write it without operations in place",
            )
        if packet == "copy_":
            plain = aten.copy.default
        node.target = plain
        later = _after(graph, node)
        changed.replace_all_uses_with(node, delete_user_cb=lambda user, later=later: user in later)


def _is_viewed(node: Node) -> bool:
    return node.op == "placeholder" or node.target in VIEWS or any(user.target in VIEWS for user in node.users)


def _after(graph: Graph, node: Node) -> set[Node]:
    nodes = list(graph.nodes)
    return set(nodes[nodes.index(node) + 1 :])


def _drop_aliases(graph: Graph) -> None:
    """Without these every kept activation would look like a tensor of its own."""
    for node in graph.nodes:
        same = node.target in (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
        if node.target in (aten.clone.default, aten._to_copy.default):
            same = node.meta["val"].dtype == node.args[0].meta["val"].dtype
        if node.target in (aten.view.default, aten.expand.default):
            same = tuple(node.meta["val"].shape) == tuple(node.args[0].meta["val"].shape)
        if same:
            node.replace_all_uses_with(node.args[0])


def _plain_sizes(graph: Graph) -> None:
    """One unknown size of a view is written -1: it then needs no arithmetic on the batch when the graph runs."""
    for node in graph.nodes:
        if node.target not in (aten.view.default, aten.expand.default, aten._unsafe_view.default):
            continue
        source, sizes = node.args
        unknown = [place for place, size in enumerate(sizes) if isinstance(size, Node)]
        if node.target is aten.expand.default:
            shape = source.meta["val"].shape
            offset = len(sizes) - len(shape)
            kept = [
                place for place in unknown if place >= offset and node.meta["val"].shape[place] == shape[place - offset]
            ]
        else:
            node.target = aten.reshape.default  # the copy that made a view possible is gone
            kept = unknown if len(unknown) == 1 else []
        node.args = (source, [-1 if place in kept else size for place, size in enumerate(sizes)])


def _share(graph: Graph) -> None:
    """Equal computations once: autograd repeats transposes and masks that the forward pass has made."""
    seen: dict[object, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = repr((node.target, node.args, node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def is_size(node: Node) -> bool:
    """Whether it computes a number of the shape rather than a tensor."""
    return not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)) and node.target is not operator.getitem
