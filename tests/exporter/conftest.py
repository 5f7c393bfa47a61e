"""One INT8 export that many tests look at, and one float graph; making either takes seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from contract.manifest import Manifest, from_bytes
from contract.signature import PrivateKey, generate
from exporter.build import Report
from exporter.models import family_of
from exporter.onnx_graph import export_float, inference_mode
from exporter.quantize import Quantizer
from exporter.quantize_folds import Folded
from exporter.quantize_frontend import prepare, quantized
from exporter.split import split_model
from tests.exporter import tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Exported:
    """A published package: read it, do not change it."""

    folder: Path
    key: PrivateKey
    report: Report

    @property
    def manifest(self) -> Manifest:
        return from_bytes((self.folder / "manifest.json").read_bytes())

    @property
    def backend(self) -> Path:
        return self.folder.with_name(self.folder.name + ".backend")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder, key = tmp_path_factory.mktemp("exported") / "front", generate()
    return Exported(folder, key, tiny.run(folder, key))


@dataclass(frozen=True)
class Graphs:
    """One frontend as torch module (folded), float graph and INT8 graph, with the tokens it had before the folds."""

    frontend: nn.Module
    folded: Folded
    inputs: np.ndarray  # (6, 3, 32, 32)
    tokens: np.ndarray  # (6, T, d)
    float_model: onnx.ModelProto
    int8_model: onnx.ModelProto


@pytest.fixture(scope="session")
def graphs() -> Graphs:
    model = tiny.tiny_model()
    frontend, _ = split_model(model, 2)
    inputs = tiny.images(6)
    with inference_mode(frontend):
        tokens = frontend(inputs).numpy()
        prepared = prepare(frontend, family_of(model)[1].fold_sites(frontend), Quantizer(), [tiny.images(16, seed=1)])
    float_model = export_float(frontend, tiny.SHAPE, 20)
    int8_model = quantized(float_model, prepared, prepared.min_max())
    return Graphs(frontend, prepared.folded, inputs.numpy(), tokens, float_model, int8_model)
