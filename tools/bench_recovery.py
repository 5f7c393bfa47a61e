"""The demo's adaptation under kill -9: server and devices die at random moments, and the result must be the same.

Real commands over TLS, as in the demo. The deployment is made once in the output folder and used again. An undisturbed
adaptation comes first; then adaptations from fresh state are killed until the asked number of kills has been reached.
What is compared: adapted weights bit for bit, accuracy, samples stored once; what is measured: the time from a server's
kill to the first message that the new one took from every device that it still needs.

The file is long because the story, the killing and the reading of the store are one measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from contract.canonical import INT_MAX
from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import DeviceError, TrainingError, UsageError
from contract.image_folder import scan
from contract.output import open_output
from edge_runtime.spool import MESSAGE, SpoolLimits, scan_records
from server_runtime.admission import Terms
from server_runtime.report import Table, to_text
from tools import demo, demo_commands, demo_model
from tools.demo_data import DEVICES, DemoFolders

UPLOAD, TRAINING, AWAY = "upload", "training", "server away"  # phases
LABEL_MODES = ("permuted-label", "logit-gradient", "client-head")
POLL_S = 0.02
ROUND_LIMIT_S = 900.0
ROUNDS = 12  # adaptations, at most, until the kills are reached
ROUNDS_LEAST = 3  # the kills are spread over so many: each has its own upload
EARLY_SHARE = 0.5  # of an adaptation's kills may fall before training
AWAY_SHARE = 1 / 3  # of an adaptation's device kills may fall while the server is away
SERVER_LIFE_S = (0.3, 3.0)  # after it listens and the devices that it needs are back
HASTY_SHARE, HASTY_LIFE_S = 0.25, (0.0, 1.0)  # so often it dies before they are back: this long after it listens
DEVICE_LIFE_S = (0.5, 3.5)  # since its start; an upload of the demo is done in two to four
RETURN_S = (0.5, 3.0)  # a device that was let go is switched on again
TARGET_S = 10.0
KAPPA_MAX = 1.0  # that the demo's backend is tuned for


@dataclass(frozen=True)
class Bench:
    """What all adaptations share."""

    root: Path  # of the deployment
    folders: DemoFolders
    label_mode: str
    kappa: float
    seed: int


@dataclass(frozen=True)
class Kill:
    """One kill -9. `recovery_s` is a server's: None when it died again, or a device did, before all were back."""

    target: str  # "server" or "device"
    phase: str  # UPLOAD, TRAINING, or of a device AWAY
    recovery_s: float | None = None
    needed: int = 0  # devices whose messages the server still needed
    held: int = 0  # durable messages on the devices that the server did not have


@dataclass
class Adaptation:
    """What one adaptation ended with."""

    weights: dict[str, bytes]
    samples: dict[str, tuple[int, int]]  # device -> (rows stored, different samples among them)
    accuracy: float
    seconds: float  # until all devices were let go
    start_s: float  # until its first server listened, with nothing to take up
    repeated_epochs: int
    sent_again: list[tuple[int, int]]  # of each device that ended by itself: in all, and most after one reconnection
    kills: list[Kill] = field(default_factory=list)


def main() -> int:
    options = parse(sys.argv[1:])
    root = open_output(options.output)
    bench = Bench(root, deploy(root, options.seed), options.label_mode, options.kappa, options.seed)
    work = root / options.label_mode
    shutil.rmtree(work, ignore_errors=True)
    say("== undisturbed")
    calm = Trial(bench, work / "undisturbed", None).run(random.Random(0), 0, 0)
    rng = random.Random(options.seed)
    disturbed: list[Adaptation] = []
    left = Counter(device=options.device_kills, server=options.server_kills)
    share = {target: math.ceil(count / ROUNDS_LEAST) for target, count in left.items()}
    while (left["device"] > 0 or left["server"] > 0) and len(disturbed) < ROUNDS:
        say(f"== disturbed, {left['device']} device kills and {left['server']} server kills to go")
        trial = Trial(bench, work / f"disturbed-{len(disturbed) + 1}", work / "undisturbed")
        disturbed.append(trial.run(rng, *(min(left[target], share[target]) for target in ("device", "server"))))
        left.subtract(Counter(kill.target for kill in disturbed[-1].kills))
    document = summarise(bench, calm, disturbed)
    if options.format == "json":
        print_document("bench-recovery", document)
    else:
        print_tables(document)
    return 0 if document["equal"] else TrainingError.exit_code


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser("tools/bench_recovery", "Adapt under kill -9 and compare with an undisturbed adaptation.")
    parser.add_argument("--label-mode", choices=LABEL_MODES, default=LABEL_MODES[0], help="default: %(default)s")
    parser.add_argument("--device-kills", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--server-kills", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of data, training and moments (default: %(default)s)")
    parser.add_argument("--kappa", type=float, default=demo.DEFAULT_KAPPA, help="feature noise (default: %(default)s)")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    default = Path(tempfile.gettempdir()) / "cutlayer-bench-recovery"
    parser.add_argument("-o", "--output", type=Path, default=default, help="folder to work in (default: %(default)s)")
    options = parser.parse_args(argv)
    if min(options.device_kills, options.server_kills) < 0:
        raise UsageError("the number of kills must be 0 or more", "correct --device-kills or --server-kills")
    if not 0 <= options.seed <= INT_MAX:
        raise UsageError(f"--seed is {options.seed}, expected 0 to {INT_MAX}", "correct --seed")
    if not 0 <= options.kappa <= KAPPA_MAX:
        raise UsageError(f"--kappa is {options.kappa}, expected 0 to {KAPPA_MAX:g}", "correct --kappa")
    return options


def deploy(root: Path, seed: int) -> DemoFolders:
    """The demo's data, pre-trained model, keys and package; taken as they are when this seed made them before.

    Raises: ExportError; UsageError when the folder holds anything else, which is left as it is.
    """
    mark = root / "deployment.json"
    data = root / "data"
    made_by = seed_of(mark)
    if made_by == seed:
        say("== deployment of an earlier call")
        private = scan(data / DEVICES[0] / "test", None).classes
        train, test = (tuple(data / device / part for device in DEVICES) for part in ("train", "test"))
        return DemoFolders(data / "public", train, test, private, "")
    if made_by is not None:
        raise UsageError(
            f"{root} holds the deployment of seed {made_by}, not of {seed}",
            f"choose another folder with -o, or give --seed {made_by}",
        )
    if any(root.iterdir()):
        raise UsageError(f"{root} is not empty and holds no deployment", "choose another folder with -o")
    say("== deployment")
    options = demo.parse(["--seed", str(seed), "-o", str(root)])
    folders = demo.make_folders(options, data)
    weights = root / "pretrained.safetensors"
    arguments = {**demo.DIGITS_ARGS, "num_classes": len(scan(folders.public, None).classes)}
    torch.manual_seed(seed)
    model = demo.create(demo.DIGITS_MODEL, arguments)
    plan = demo_model.Pretraining(demo.PRETRAIN_STEPS, demo.PRETRAIN_LIMIT_S, seed)
    demo_model.make_weights(weights, model, folders.public, demo.rule_of(model), plan)
    devices = [word for device in DEVICES for word in ("--device", device)]
    demo_commands.command(sys.executable, "-m", "tools.make_keys", "-o", root / "keys", "--site", "demo", *devices)
    demo.export(demo.Story(options, root, folders), demo.DIGITS_MODEL, arguments, weights)
    (root / "classes.txt").write_text("\n".join(folders.classes) + "\n")
    mark.write_text(json.dumps({"seed": seed}) + "\n")
    return folders


def seed_of(mark: Path) -> int | None:
    """The seed that made a deployment; None where there is no whole one."""
    try:
        seed = json.loads(mark.read_text())["seed"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seed if isinstance(seed, int) else None


class Command:
    """A command that runs, and what it has said; killed and started again under the same name."""

    def __init__(self, words: Sequence[object], log: Path) -> None:
        self.log, self.output = log, log.with_suffix(".out")
        self.started_s = time.monotonic()
        with log.open("a") as errors, self.output.open("w") as output:
            self.running = subprocess.Popen([str(word) for word in words], stdout=output, stderr=errors)

    def kill(self) -> None:
        self.running.send_signal(signal.SIGKILL)
        self.running.wait()

    def stop(self) -> None:
        if self.running.poll() is None:
            self.running.send_signal(signal.SIGTERM)
        self.running.wait(demo_commands.STOP_S)

    def said(self) -> str:
        return " ".join(self.log.read_text().strip().splitlines()[-4:])


class Trial:
    """One adaptation from fresh state, with its own run and states under `root`."""

    def __init__(self, bench: Bench, root: Path, secrets: Path | None) -> None:
        """`secrets` is an earlier trial's root: noise is keyed by each device's secret, equal runs need equal ones."""
        self._bench, self._root = bench, root
        self._port = 0
        self._server: Command
        self._devices: dict[str, Command]
        self._kills: list[Kill] = []
        self._sent_again: list[tuple[int, int]] = []
        root.mkdir(parents=True)
        for device in DEVICES if secrets else ():
            identity = root / "state" / device / "identity"
            identity.mkdir(parents=True, mode=0o700)
            shutil.copy2(secrets / "state" / device / "identity" / "device_secret", identity / "device_secret")

    def run(self, rng: random.Random, device_kills: int, server_kills: int) -> Adaptation:
        """Adapt to the end under that many kills, at most; then predict undisturbed.

        Raises: TrainingError or DeviceError when a command ended that was not killed.
        """
        started_s = time.monotonic()
        self._server = self._start_server()
        start_s = time.monotonic() - started_s
        self._devices = {device: self._start_device(device) for device in DEVICES}
        try:
            self._adapt(Moments(rng, device_kills, server_kills))
            seconds = time.monotonic() - started_s
            accuracy = self._predict()
        finally:
            for command in (self._server, *self._devices.values()):
                command.stop()
        epochs = [line["epoch"] for line in self._metrics() if "epoch" in line]
        weights = {path.name: path.read_bytes() for path in self._root.glob("runs/*/models/*/*.safetensors")}
        repeated = len(epochs) - len(set(epochs))
        return Adaptation(weights, self._samples(), accuracy, seconds, start_s, repeated, self._sent_again, self._kills)

    # -- the loop

    def _adapt(self, moments: Moments) -> None:
        deadline_s = time.monotonic() + ROUND_LIMIT_S
        outage: Outage | None = None
        listens = True
        while True:
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise TrainingError(f"no end after {ROUND_LIMIT_S:g} s", f"see the logs in {self._root}")
            if not listens and self._listens():
                listens = True
                moments.server_is_back(now_s)
            if outage is not None and listens and outage.is_over(self._received()):
                self._note(outage, now_s)
                outage = None
                moments.devices_are_back(now_s)
            ended = any(line.get("ended") for line in self._metrics())
            phase = TRAINING if ended or self._trains() else UPLOAD
            if not ended and listens and moments.server_dies(now_s, phase):
                if outage is not None:
                    self._note(outage, None)
                self._server.kill()
                outage = Outage(phase, now_s, self._received(), self._needed(), self._held())
                self._server, listens = self._start_server(), False
            for device, command in self._devices.items():
                code = command.running.poll()
                if code:
                    raise DeviceError(f"{device} ended with exit code {code}: {command.said()}", f"see {command.log}")
                if ended:
                    continue
                if code == 0:
                    if moments.device_returns(device, now_s):
                        self._note_report(device)
                        self._restart(device, moments)
                elif moments.device_dies(device, now_s, phase if listens else AWAY):
                    command.kill()
                    self._kills.append(Kill("device", phase if listens else AWAY, held=self._held()))
                    if outage is not None and device in outage.needed:
                        outage.spoiled = True
                    self._restart(device, moments)
            if self._server.running.poll() is not None:
                raise TrainingError(f"the server ended: {self._server.said()}", f"see {self._server.log}")
            if ended and listens and all(each.running.poll() == 0 for each in self._devices.values()):
                if outage is not None:
                    self._note(outage, None)
                for device in DEVICES:
                    self._note_report(device)
                return
            time.sleep(POLL_S)

    def _restart(self, device: str, moments: Moments) -> None:
        self._devices[device] = self._start_device(device)
        moments.device_starts(device, time.monotonic())

    def _note_report(self, device: str) -> None:
        report = json.loads(self._devices[device].output.read_text())
        self._sent_again.append((report["messages_sent_again"], report["sent_again_most"]))

    def _note(self, outage: Outage, now_s: float | None) -> None:
        recovery_s = None if now_s is None or outage.spoiled else now_s - outage.began_s
        self._kills.append(Kill("server", outage.phase, recovery_s, len(outage.needed), outage.held))

    # -- the commands

    def _start_server(self) -> Command:
        bench, keys = self._bench, self._bench.root / "keys"
        command = Command(
            (
                demo_commands.BIN / "server-run", "--strategy", "split_adaptation",
                "--backend", bench.root / "front.backend", "--listen", f"localhost:{self._port}",
                "--roster", keys / "roster", "--certificate", keys / "server.pem",
                "--certificate-key", keys / "server.key", "--runs", self._root / "runs", "--run", "bench",
                "--label-mode", bench.label_mode, "--kappa", bench.kappa, "--seed", bench.seed,
            ),
            self._root / "server.log",
        )  # fmt: skip
        if not self._port:  # a restarted server takes the port that its devices know
            while not (line := command.output.read_text()).endswith("\n"):
                if command.running.poll() is not None:
                    raise TrainingError(f"the server did not start: {command.said()}", f"see {command.log}")
                time.sleep(POLL_S)
            self._port = int(line.rsplit(":", 1)[1])
        return command

    def _start_device(self, device: str, *extra: str) -> Command:
        bench, keys = self._bench, self._bench.root / "keys" / "devices" / device
        folders = bench.folders.test if extra else bench.folders.train
        words = (
            demo_commands.BIN / "edge-run", "--engine", bench.root / "front",
            "--data", folders[DEVICES.index(device)], "--server", f"wss://localhost:{self._port}",
            "--trust", keys / "publisher.pub", "--ca", keys / "ca.pem", "--key", keys / "device.key", "--name", device,
            "--state", self._root / "state" / device, "--site-secret", keys / "site.secret",
            "--classes", bench.root / "classes.txt", "--kappa-floor", bench.kappa, "--threads", 1,
            "--label-mode", bench.label_mode, "--format", "json", *extra,
        )  # fmt: skip
        return Command(words, self._root / f"{device}.log")

    def _predict(self) -> float:
        self._devices = {device: self._start_device(device, "--infer") for device in DEVICES}
        right = images = 0.0
        for device, command in self._devices.items():
            if command.running.wait(ROUND_LIMIT_S):
                raise DeviceError(f"{device} could not predict: {command.said()}", f"see {command.log}")
            report = json.loads(command.output.read_text())
            right += report["accuracy"] * report["images"]
            images += report["images"]
        return right / images

    # -- what can be seen from outside

    def _listens(self) -> bool:
        return self._server.output.read_text().endswith("\n")

    def _metrics(self) -> list[dict[str, Any]]:
        path = self._root / "runs" / "bench" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _query(self, text: str) -> list[tuple[Any, ...]]:
        path = self._root / "runs" / "bench" / "state.sqlite"
        if not path.exists():
            return []
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as ledger:
            try:
                return ledger.execute(text).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):  # killed while it was being made
                    return []
                raise

    def _uploaded(self) -> set[str]:
        """Devices whose whole upload is stored."""
        query = "SELECT device FROM uploads WHERE split = 'train' GROUP BY device HAVING SUM(rows) = MAX(total)"
        return {device for (device,) in self._query(query)}

    def _trains(self) -> bool:
        return self._uploaded() == set(DEVICES)

    def _received(self) -> dict[str, object]:
        """Device -> something that changes with every message that the server takes from it."""
        rows = self._query("SELECT device, session, received_seq FROM sessions ORDER BY device, session")
        return {device: [row[1:] for row in rows if row[0] == device and row[2]] for device in DEVICES}

    def _needed(self) -> frozenset[str]:
        """Devices without which the server cannot go on."""
        missing = frozenset(DEVICES) - self._uploaded()
        return missing if self._bench.label_mode == "permuted-label" or missing else frozenset(DEVICES)

    def _held(self) -> int:
        """Durable messages in the devices' spools that the server has no record of: no more can be sent again."""
        seqs = dict(self._query("SELECT session, received_seq FROM sessions"))
        held = 0
        for path in self._root.glob("state/*/spool/adapt/*.segment"):
            try:
                data = path.read_bytes()
            except FileNotFoundError:  # acknowledged meanwhile
                continue
            records, _ = scan_records(memoryview(data), SpoolLimits().record_bytes)
            head = json.loads(data[records[0].offset : records[0].offset + records[0].size]) if records else {}
            known = seqs.get(head.get("session"), 0)
            held += sum(record.kind == MESSAGE and record.seq > known for record in records)
        return held

    def _samples(self) -> dict[str, tuple[int, int]]:
        """Device -> (rows of its stored batches, different wire ids among them)."""
        found: dict[str, tuple[int, int]] = {}
        for device in DEVICES:
            ids: list[bytes] = []
            for (file,) in self._query(f"SELECT file FROM uploads WHERE split = 'train' AND device = '{device}'"):  # noqa: S608
                with safe_open(self._root / "runs" / "bench" / file, framework="numpy") as stream:
                    ids += [row.tobytes() for row in stream.get_tensor("sample_ids")]
            found[device] = (len(ids), len(set(ids)))
        return found


@dataclass
class Outage:
    """From a server's kill to the first message that the new one took from each device it needs."""

    phase: str
    began_s: float
    received: dict[str, object]
    needed: frozenset[str]
    held: int
    spoiled: bool = False  # a needed device was killed meanwhile: its own start would be counted

    def is_over(self, received: dict[str, object]) -> bool:
        """`received` as Trial._received gives it, of a server that listens."""
        return all(received[device] != self.received[device] for device in self.needed)


class Moments:
    """Draws when to kill, and counts what is left to kill."""

    def __init__(self, rng: random.Random, device_kills: int, server_kills: int) -> None:
        self._rng = rng
        self._left = Counter(device=device_kills, server=server_kills)
        # (target, phase) -> kills left in it, where there is a bound
        self._bounds = Counter({(target, UPLOAD): math.ceil(EARLY_SHARE * n) for target, n in self._left.items()})
        self._bounds["device", AWAY] = math.ceil(AWAY_SHARE * device_kills)
        self._server_at_s: float | None = time.monotonic() + rng.uniform(*SERVER_LIFE_S)
        self._device_at_s = {device: time.monotonic() + rng.uniform(*DEVICE_LIFE_S) for device in DEVICES}
        self._return_at_s: dict[str, float] = {}

    def server_is_back(self, now_s: float) -> None:
        hasty = self._rng.random() < HASTY_SHARE
        self._server_at_s = now_s + self._rng.uniform(*HASTY_LIFE_S) if hasty else None

    def devices_are_back(self, now_s: float) -> None:
        if self._server_at_s is None:
            self._server_at_s = now_s + self._rng.uniform(*SERVER_LIFE_S)

    def server_dies(self, now_s: float, phase: str) -> bool:
        return self._server_at_s is not None and now_s >= self._server_at_s and self._take("server", phase)

    def device_starts(self, device: str, now_s: float) -> None:
        self._return_at_s.pop(device, None)
        self._device_at_s[device] = now_s + self._rng.uniform(*DEVICE_LIFE_S)

    def device_dies(self, device: str, now_s: float, phase: str) -> bool:
        if now_s < self._device_at_s[device]:
            return False
        dies = self._take("device", phase)
        if not dies:
            self._device_at_s[device] = now_s + self._rng.uniform(*DEVICE_LIFE_S)
        return dies

    def device_returns(self, device: str, now_s: float) -> bool:
        """Whether a device that was let go is switched on again: only while there is a kill left for it."""
        if self._left["device"] <= 0:
            return False
        at_s = self._return_at_s.setdefault(device, now_s + self._rng.uniform(*RETURN_S))
        return now_s >= at_s

    def _take(self, target: str, phase: str) -> bool:
        bounded = (target, phase) in self._bounds
        if self._left[target] <= 0 or (bounded and self._bounds[target, phase] <= 0):
            return False
        self._left[target] -= 1
        if bounded:
            self._bounds[target, phase] -= 1
        return True


def summarise(bench: Bench, calm: Adaptation, disturbed: list[Adaptation]) -> dict[str, Any]:
    """The document of the run."""
    kills = [kill for each in disturbed for kill in each.kills]
    images = {
        device: sum(1 for path in folder.rglob("*") if path.is_file())
        for device, folder in zip(DEVICES, bench.folders.train, strict=True)
    }
    counted_once = all(each.samples == {d: (n, n) for d, n in images.items()} for each in (calm, *disturbed))
    same_weights = bool(calm.weights) and all(each.weights == calm.weights for each in disturbed)
    same_accuracy = all(each.accuracy == calm.accuracy for each in disturbed)
    again = [each for adaptation in disturbed for each in adaptation.sent_again]
    servers = [kill for kill in kills if kill.target == "server"]
    return {
        "label_mode": bench.label_mode,
        "seed": bench.seed,
        "kappa": bench.kappa,
        "cpus": len(os.sched_getaffinity(0)),
        "kills": {
            target: dict(Counter(kill.phase for kill in kills if kill.target == target))
            for target in ("device", "server")
        },
        "adaptations": len(disturbed),
        "equal": same_weights and same_accuracy and counted_once,
        "weights_equal": same_weights,
        "accuracy": calm.accuracy,
        "accuracy_equal": same_accuracy,
        "samples_counted_once": counted_once,
        "recovery_s": recovery([kill for kill in servers if kill.needed]),
        "recovery_without_devices_s": recovery([kill for kill in servers if not kill.needed]),
        "recovery_target_s": TARGET_S,
        "first_start_s": round(statistics.median(each.start_s for each in (calm, *disturbed)), 2),
        "durable_messages_held_max": max((kill.held for kill in kills), default=None),
        "messages_sent_again": sum(total for total, _ in again),
        "sent_again_most": max((most for _, most in again), default=None),
        "credit": Terms.credit,
        "repeated_epochs": [each.repeated_epochs for each in disturbed],
        "undisturbed_seconds": round(calm.seconds, 1),
        "disturbed_seconds": [round(each.seconds, 1) for each in disturbed],
    }


def recovery(kills: list[Kill]) -> dict[str, Any]:
    """Figures of the recoveries that were seen to their end."""
    times_s = sorted(kill.recovery_s for kill in kills if kill.recovery_s is not None)
    return {
        "kills": len(kills),
        "measured": len(times_s),
        "p50": round(statistics.median(times_s), 2) if times_s else None,
        "max": round(times_s[-1], 2) if times_s else None,
        "within_target": sum(each <= TARGET_S for each in times_s) if times_s else None,
    }


def print_tables(document: dict[str, Any]) -> None:
    """For a person on a terminal."""
    equal = Table(
        f"Undisturbed against killed ({document['label_mode']}, {document['adaptations']} adaptations)",
        ("what", "equal"),
        (
            ("adapted weights, bit for bit", str(document["weights_equal"])),
            (f"accuracy {document['accuracy']:.4f}", str(document["accuracy_equal"])),
            ("every sample stored once", str(document["samples_counted_once"])),
        ),
    )
    rows = [(target, phase, count) for target, phases in document["kills"].items() for phase, count in phases.items()]
    kills = Table("Kills that fell before the end", ("target", "phase", "kills"), tuple(rows))
    recovered = Table(
        f"Seconds from a server's kill (target {TARGET_S:g})",
        ("until", "kills", "measured", "p50", "max", "within target"),
        tuple(
            (what, *document[key].values())
            for what, key in (
                ("a message from every device needed", "recovery_s"),
                ("it listens, no device needed", "recovery_without_devices_s"),
            )
        ),
        note="Not measured: the server died again, or a needed device was killed, before all were back.",
    )
    print("\n\n".join(map(to_text, (equal, kills, recovered))))
    for name in (
        "first_start_s",
        "messages_sent_again",
        "sent_again_most",
        "credit",
        "durable_messages_held_max",
        "repeated_epochs",
        "undisturbed_seconds",
        "disturbed_seconds",
    ):
        print(f"{name.replace('_', ' ')}: {document[name]}")


if __name__ == "__main__":
    sys.exit(run_command(partial(main)))
