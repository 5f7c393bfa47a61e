"""What tools/bench_client_cost's clients work on: each method's graphs and parameters, of random weights.

    python -m tools.bench_client_cost_parts FOLDER

FOLDER/task.json says which method, model and sizes; facts.json, three graphs and the parameters come to lie beside it.
Split adaptation's package is the exporter's, not made here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from contract.console import run_command
from contract.training import PARAMETERS_NAME
from exporter.architecture import create
from exporter.checkpoint import image_rule
from exporter.models import family_of
from exporter.split import default_cut, split_model
from exporter.training_graph import Loss, make_training_graphs
from tools.bench_backend import model_arguments
from tools.reproduce_baselines import ADAPTERS, emulated_blocks

Client = tuple[nn.Module, list[str]]  # what the client has, and the names that it trains


def _linear_probing(model: nn.Module, cut: int) -> Client:
    """Nothing is trained but a head, which is no part of the graph; the graph must be able to train something."""
    model.reset_classifier(0)
    return model, [name for name, _ in model.named_parameters()][-1:]


def _fine_tuning(model: nn.Module, cut: int) -> Client:
    return model, [name for name, _ in model.named_parameters()]


def _ln_tuning(model: nn.Module, cut: int) -> Client:
    norms = [path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    return model, _below(model, [*norms, "head"])


def _split_learning(model: nn.Module, cut: int) -> Client:
    frontend, _ = split_model(model, cut)
    return frontend, [name for name, _ in frontend.named_parameters()]


def _offsite_tuning(model: nn.Module, cut: int) -> Client:
    kept = emulated_blocks(len(model.blocks))
    model.blocks = nn.Sequential(*(model.blocks[place] for place in kept))
    ends = [*range(ADAPTERS), *range(len(kept) - ADAPTERS, len(kept))]
    return model, _below(model, [*(f"blocks.{place}" for place in ends), "head"])


def _below(model: nn.Module, paths: list[str]) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(f"{path}." for path in paths))]


CLIENTS: dict[str, Callable[[nn.Module, int], Client]] = {
    "lp": _linear_probing,
    "fine_tuning": _fine_tuning,
    "ln_tuning": _ln_tuning,
    "split_learning": _split_learning,
    "offsite_tuning": _offsite_tuning,
}
WITHOUT_LOSS = ("lp", "split_learning")  # the loss is not in the client's graph


def main() -> int:
    folder = Path(sys.argv[1])
    task: dict[str, Any] = json.loads((folder / "task.json").read_text())
    write(folder, task)
    return 0


def write(folder: Path, task: dict[str, Any]) -> None:
    """Raises: ExportError, UsageError, ConfigError for a model that cannot be used so."""
    torch.manual_seed(0)
    model = create(task["model"], False, model_arguments(task["model_args"]))
    facts = family_of(model)[1].facts(model)
    rule = image_rule(model, facts.input_shape)
    width = int(model.num_features)
    model.reset_classifier(task["classes"])
    client, trained = CLIENTS[task["method"]](model, task["split"] or default_cut(facts.depth))
    loss: Loss = "none" if task["method"] in WITHOUT_LOSS else "cross-entropy"
    classes = None if loss == "none" else task["classes"]
    graphs = make_training_graphs(client.train(), facts.input_shape, trainable=trained, loss=loss, class_count=classes)
    for role in ("forward", "backward", "evaluate"):
        (folder / f"{role}.onnx").write_bytes(getattr(graphs, role))
    names = {*graphs.trainable, *graphs.frozen, *graphs.buffers}
    state = client.state_dict()
    save_file({name: state[name].contiguous().clone() for name in sorted(names)}, folder / PARAMETERS_NAME)
    kept = ("output_shape", "evaluated_shape", "trainable", "frozen", "buffers", "saved", "macs")
    sizes = {name: sum(state[each].numel() for each in getattr(graphs, name)) for name in ("trainable", "frozen")}
    text = json.dumps(
        {
            **task, **{name: getattr(graphs, name) for name in kept}, "loss": loss, "width": width,
            "image": asdict(rule), "trained_values": sizes["trainable"], "frozen_values": sizes["frozen"],
        }
    )  # fmt: skip
    (folder / "facts.json").write_text(text)


if __name__ == "__main__":
    sys.exit(run_command(main))
