"""Training one client part on the device: its forward, backward and evaluate graphs, its tensors and its optimiser.

Which samples, when, and what the server says is left to the caller; the graphs are written by
`exporter.training_graph`, and `contract.training` says what goes in and comes out of them.

Nothing is copied that need not be: the sessions read the very arrays that the optimiser moves, activations go from
forward to backward inside onnxruntime, and gradients are seen where backward left them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from contract.errors import DeviceError, PackageError, RemoteProtocolError, TrainingError, why
from contract.training import PARAMETERS_NAME, OptimiserRule, TrainingCut
from edge_runtime.optimiser import Optimiser, squared_norm
from edge_runtime.training_session import FETCH_AGAIN, Graph, Values, check_graph, fits

Floats: TypeAlias = NDArray[np.float32]

LOWER_RATE = "lower the learning rate; if it happens in the first step, look for damaged images or weights"
NEW_RUN = "start a new run on the server"


@dataclass(frozen=True)
class TrainerSettings:
    """What running a client part may use."""

    threads: int = 1
    evaluate_batch: int = 32  # images at a time where no gradient is needed


@dataclass(frozen=True)
class Forward:
    """What a batch gives at the cut, (B, *output_shape), and its mean loss where the loss is in the graph.

    Of a part with a projection head also the embedding (B, d), and its distance (B,) from the anchors."""

    z: Floats
    loss: float | None
    embedding: Floats | None = None
    distance: Floats | None = None


@dataclass(frozen=True)
class StepFacts:
    """What a step did: the Euclidean norm over all gradients, and the optimiser's own count."""

    gradient_norm: float
    steps: int


def open_trainer(
    folder: Path, cut: TrainingCut, rule: OptimiserRule, settings: TrainerSettings | None = None
) -> Trainer:
    """A trainer on the files of a verified package; of the parameter file only this cut's tensors are read.

    Raises: PackageError when the file is not readable or lacks a tensor.
    """
    path = folder / PARAMETERS_NAME
    try:
        with safe_open(str(path), framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in cut.tensors}
    except (OSError, SafetensorError) as error:
        raise PackageError(f"{path} has not the tensors of cut {cut.index}: {why(error, path)}", FETCH_AGAIN) from error
    return Trainer(folder, cut, rule, tensors, settings)


class Trainer:
    """A client part in training: `forward`, `backward`, `step`, in this order, for each batch.

    Until `step` nothing of the state has moved; `discard` drops a batch that was begun.
    """

    def __init__(
        self,
        folder: Path,
        cut: TrainingCut,
        rule: OptimiserRule,
        tensors: Mapping[str, NDArray[Any]],
        settings: TrainerSettings | None = None,
    ) -> None:
        """`folder` holds the cut's graphs, opened when they are first needed; `tensors` are copied.

        Raises: PackageError when a tensor of the cut is missing or not float32.
        """
        self.cut = cut
        self._folder, self._settings = folder, settings or TrainerSettings()
        _check_names("the parameter file", cut.tensors, tensors)
        for name in cut.tensors:
            if tensors[name].dtype != np.float32:
                raise PackageError(f"tensor {name} should be float32, found {tensors[name].dtype}", FETCH_AGAIN)
        self._tensors = {name: np.array(tensors[name], order="C") for name in cut.tensors}
        # These share the arrays' memory: what the optimiser writes, the next run reads.
        self._values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(each) for name, each in self._tensors.items()}
        self._optimiser = Optimiser(rule, {name: self._tensors[name] for name in cut.trainable})
        self._graphs: dict[str, Graph] = {}
        self._saved: Values = {}  # what backward will ask for
        self._buffers: dict[str, Floats] = {}  # BatchNorm statistics that the step will commit
        self._gradients: dict[str, Floats] = {}

    def forward(
        self, x: Floats, targets: Floats | None = None, keep: NDArray[np.int64] | None = None,
        anchors: Floats | None = None,
    ) -> Forward:  # fmt: skip
        """Run images (B, 3, h, w) in train mode; a batch that was begun before is dropped.

        `targets` (B, C) one-hot where the loss is in the graph; `keep` (B, K) patch positions where it takes them;
        `anchors` (B, d) where the part has a projection head.
        Raises: TrainingError when the loss or a new statistic is not finite; PackageError when the graphs do not fit
        the cut; EngineError when onnxruntime fails.
        """
        self.discard()
        backward, graph = self._graph("backward"), self._graph("forward")
        data = _data_values(x=x, targets=targets, keep=keep, anchors=anchors)
        wanted = [name for name in graph.outputs if not name.startswith("saved:") or name in backward.inputs]
        found = graph.run(wanted, self._values | data)
        z = found["z"].numpy()
        loss = float(found["loss"].numpy()) if "loss" in found else None
        if loss is not None and not math.isfinite(loss):
            raise TrainingError("the loss of a batch is not finite; nothing was changed", LOWER_RATE)
        moved = {name.removeprefix("new:"): found[name].numpy() for name in wanted if name.startswith("new:")}
        for name, array in moved.items():
            if not np.isfinite(array).all():
                raise TrainingError(
                    f"the new {name} of a batch of {len(x)} is not finite; nothing was changed",
                    "use batches of two or more, as one value has no variance; else lower the learning rate",
                )
        self._buffers = moved
        self._saved = {name: value for name, value in (found | data).items() if name in backward.inputs}
        embedding, distance = (found[name].numpy() if name in found else None for name in ("embedding", "distance"))
        return Forward(z, loss, embedding, distance)

    def backward(
        self, grad_z: Floats | None = None, pull: Floats | None = None, only: Collection[str] | None = None
    ) -> dict[str, Floats]:
        """Gradients by name; `grad_z` (B, *output_shape) is d loss / d z, absent where the loss is in the graph.

        `pull` (B,) is d loss / d distance, where the part has a projection head. With `only`, the gradients are of some
        trainable tensors: the others do not move in the step, and cost nothing.

        They may be changed in place before `step`. The activations of `forward` are freed.
        Raises: RemoteProtocolError when grad_z has another shape; EngineError when onnxruntime fails.
        """
        graph = self._graph("backward")
        if not self._saved:
            raise ValueError("backward without a forward")
        wants_gradient = "grad_z" in graph.inputs
        if wants_gradient != (grad_z is not None):
            raise ValueError(f"cut {self.cut.index}: grad_z is {'needed' if wants_gradient else 'not used'}")
        feeds = self._values | self._saved
        if grad_z is not None:
            if not fits(grad_z.shape[1:], self.cut.output_shape):
                raise RemoteProtocolError(
                    f"expected a gradient of {self.cut.output_shape} for each image, found {grad_z.shape[1:]}", NEW_RUN
                )
            feeds |= _data_values(grad_z=grad_z, pull=pull)
        names = [name for name in self.cut.trainable if only is None or name in only]
        found = graph.run([f"grad:{name}" for name in names], feeds)
        self._saved = {}
        self._gradients = {name: found[f"grad:{name}"].numpy() for name in names}
        return self._gradients

    def step(self, learning_rate: float) -> StepFacts:
        """Move the trainable tensors by the batch's gradients and commit its BatchNorm statistics.

        Raises: TrainingError when a gradient is not finite: then the batch is dropped and nothing has moved.
        """
        if not self._gradients:
            raise ValueError("a step without gradients")
        gradients, buffers = self._gradients, self._buffers
        self.discard()
        squared = squared_norm(gradients)
        if not math.isfinite(squared):
            spoiled = next(name for name, each in gradients.items() if not math.isfinite(squared_norm({name: each})))
            raise TrainingError(f"the gradient of {spoiled} is not finite; nothing was changed", LOWER_RATE)
        self._optimiser.step(self._tensors, gradients, learning_rate)
        for name, array in buffers.items():
            self._tensors[name][...] = array
        return StepFacts(math.sqrt(squared), self._optimiser.steps)

    def discard(self) -> None:
        """Drop a batch that was begun, and the memory of its activations."""
        self._saved, self._buffers, self._gradients = {}, {}, {}

    def evaluate(self, x: Floats) -> Floats:
        """z (n, *evaluated_shape) of images (n, 3, h, w) in evaluation mode, a few at a time.

        Raises: PackageError when the graph does not fit the cut; EngineError when onnxruntime fails.
        """
        graph, size = self._graph("evaluate"), self._settings.evaluate_batch
        z: Floats | None = None
        for start in range(0, len(x), size):
            feeds = self._values | _data_values(x=x[start : start + size])
            part = graph.run(["z"], feeds)["z"].numpy()
            if z is None:
                z = np.empty((len(x), *part.shape[1:]), np.float32)
            z[start : start + size] = part
        return np.empty((0, *self.cut.evaluated_shape), np.float32) if z is None else z

    def features(self, x: Floats, keep: NDArray[np.int64] | None = None) -> Floats:
        """z (n, *output_shape) of images (n, 3, h, w) as in training, of the patches in `keep` (n, K), without a batch
        being begun. Raises: as `evaluate`."""
        feeds = self._values | _data_values(x=x, keep=keep)
        z: Floats = self._graph("forward").run(["z"], feeds)["z"].numpy()
        return z

    def parameters(self) -> dict[str, Floats]:
        """What training moves, for an upload: trainable tensors and buffers; read-only views that steps move."""
        return {name: _read_only(self._tensors[name]) for name in (*self.cut.trainable, *self.cut.buffers)}

    def load_parameters(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `parameters` of another device or the server's average gave; the optimiser starts anew.

        Raises: RemoteProtocolError when names, shapes, dtypes or values are not right: then nothing has changed.
        """
        self._take(tensors, self.parameters(), "trained")
        self._optimiser.reset()

    def load_frozen(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Take over the tensors that are not trained here; the optimiser goes on.

        Raises: RemoteProtocolError when names, shapes, dtypes or values are not right: then nothing has changed.
        """
        self._take(tensors, {name: self._tensors[name] for name in self.cut.frozen}, "frozen")

    def _take(self, tensors: Mapping[str, NDArray[Any]], held: Mapping[str, Floats], which: str) -> None:
        if tensors.keys() != held.keys():
            wrong = sorted(tensors.keys() ^ held.keys())
            raise RemoteProtocolError(
                f"expected the {len(held)} {which} tensors of cut {self.cut.index}, found {len(tensors)} "
                f"(first that differs: {wrong[0]})",
                NEW_RUN,
            )
        for name, array in tensors.items():
            if array.shape != held[name].shape or array.dtype != np.float32:
                raise RemoteProtocolError(
                    f"tensor {name}: expected float32 {held[name].shape}, found {array.dtype} {array.shape}", NEW_RUN
                )
            if not np.isfinite(array).all():
                raise RemoteProtocolError(f"tensor {name}: expected finite values", NEW_RUN)
        self.discard()
        for name, array in tensors.items():
            self._tensors[name][...] = array

    def state(self) -> dict[str, NDArray[Any]]:
        """All that training has moved: "tensor:<name>", moments, and "steps". Read-only, as `parameters`."""
        moved = {f"tensor:{name}": array for name, array in self.parameters().items()}
        moments = {name: _read_only(array) for name, array in self._optimiser.moments.items()}
        return {**moved, **moments, "steps": np.array([self._optimiser.steps], np.int64)}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from where `state` was taken, bit for bit; a batch that was begun is dropped.

        Raises: DeviceError when it is the state of another cut or optimiser: then nothing has changed.
        """
        held = self.state()
        fits = state.keys() == held.keys() and all(
            (array.shape, array.dtype) == (held[name].shape, held[name].dtype) for name, array in state.items()
        )
        if not fits:
            raise DeviceError(
                f"the saved training state has not the tensors of cut {self.cut.index} and its optimiser", NEW_RUN
            )
        self.discard()
        for name in held:
            if name.startswith("tensor:"):
                self._tensors[name.removeprefix("tensor:")][...] = state[name]
            elif name != "steps":
                self._optimiser.moments[name][...] = state[name]
        self._optimiser.steps = int(state["steps"][0])

    def _graph(self, role: str) -> Graph:
        if role not in self._graphs:
            name = {"forward": self.cut.forward, "backward": self.cut.backward, "evaluate": self.cut.evaluate}[role]
            graph = Graph(self._folder / name, self._settings.threads)
            check_graph(graph, role, self.cut, self._tensors)
            self._graphs[role] = graph
        return self._graphs[role]


def _check_names(where: str, expected: Iterable[str], found: Mapping[str, object]) -> None:
    missing = sorted(set(expected) - found.keys())
    if missing:
        raise PackageError(f"{where} should hold {missing[0]}, which is not there", FETCH_AGAIN)


def _data_values(**arrays: NDArray[Any] | None) -> Values:
    """Inputs in onnxruntime's hands, sharing memory with the arrays that are contiguous and of the right type."""
    return {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(
            np.ascontiguousarray(array, np.int64 if name == "keep" else np.float32)
        )
        for name, array in arrays.items()
        if array is not None
    }


def _read_only(array: Floats) -> Floats:
    view: Floats = array.view()
    view.flags.writeable = False
    return view
