"""The device's conversation against a server in memory: collect, score, head, infer, resume, refuse."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.canonical import to_json
from contract.errors import AuthError, DataError, DeviceError, RefusedError, RemoteProtocolError
from contract.keyed_noise import class_list_hash, permutation
from contract.messages import Ask, Bye, Features, Heartbeat, Message, Offer, Refuse, Scores
from contract.tokens import SentRule, augment, dequantize, kept_patches, wire_steps
from edge_runtime import pipeline
from edge_runtime.conduct import Conduct, Offers
from edge_runtime.delivery import DeliveryLimits, is_outdated, is_quick, read_note
from edge_runtime.predictions import accuracy, predict
from tests.edge_runtime.fake_package import LAYOUT, Package, write_device, write_images, write_package
from tests.edge_runtime.line import Line
from tests.edge_runtime.memory_server import MemoryServer

COUNTS = {"apple": 5, "Zebra": 4, "äpfel": 3}


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write_package(tmp_path / "front")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images", COUNTS)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of a few images, so that a small folder makes many of them."""
    monkeypatch.setattr(pipeline, "BATCH_SAMPLES_MAX", 8)


def collecting(line: Line) -> Line:
    line.server.on_open = lambda server: server.ask_features()
    line.server.on_message = lambda server, message: server.say_bye_when_complete(message)
    return line


def test_a_device_uploads_everything_once_and_is_let_go(tmp_path: Path, package: Package, images: Path) -> None:
    line = collecting(Line(tmp_path, write_device(tmp_path, package, images), package))
    line.run()
    assert line.conduct.outcome is not None and line.conduct.outcome.reason == "collected"
    assert (line.server.images, line.server.copies) == (12, 0)
    batch = line.server.stored["run-1.features", 0]
    assert batch.codes.shape == (12, LAYOUT.count, LAYOUT.dim) and batch.sources is not None
    assert line.spool.pending_bytes == 0
    assert not list(line.equipment.state.features.iterdir())  # clean features are gone
    line.close()


def test_only_the_patches_that_the_package_names_leave_the_device(tmp_path: Path, images: Path) -> None:
    whole = write_package(tmp_path / "whole").manifest.cuts[0]
    package = write_package(tmp_path / "front", cuts=(replace(whole, sent=SentRule("checkerboard", 0.5)),))
    line = collecting(Line(tmp_path, write_device(tmp_path, package, images), package))
    line.run()
    batch = line.server.stored["run-1.features", 0]
    kept = kept_patches(LAYOUT.grid, "checkerboard")
    assert batch.codes.shape == (12, LAYOUT.prefix + len(kept), LAYOUT.dim)
    assert batch.sources is not None and batch.sources.shape == (12, len(kept))
    assert line.equipment.worker.counters.payload_bytes == 12 * (
        (LAYOUT.prefix + len(kept)) * LAYOUT.dim + 2 * len(kept)
    )
    line.close()


def test_the_servers_rebuild_equals_what_the_device_would_have_made(
    tmp_path: Path, package: Package, images: Path
) -> None:
    line = collecting(Line(tmp_path, write_device(tmp_path, package, images, alpha=0.0), package))
    line.run()
    batch = line.server.stored["run-1.features", 0]
    assert batch.sources is not None
    statistics = package.manifest.cuts[0].statistics
    noisy = dequantize(batch.codes, wire_steps(statistics, 1.0), LAYOUT.prefix)
    clean = np.stack(
        [line.equipment.worker._bench.frontend.tokens([sample])[0] for sample in line.equipment.dataset.samples]
    )
    sigma = np.array(statistics.sigma_patch)
    difference = (noisy - clean)[:, LAYOUT.prefix :] / sigma
    assert 0.5 < np.abs(difference).mean() < 2.0  # mean of |Laplace(b)| is b, here one sigma
    rows, positions = np.array([0, 3]), np.array([[0, 2], [1, 3]])
    copies = augment(batch.codes, batch.sources, rows, positions, LAYOUT.prefix)
    assert (copies[0, LAYOUT.prefix] == batch.codes[batch.sources[0, 0], LAYOUT.prefix]).all()
    line.close()


def test_labels_cross_only_permuted_and_joined_by_id(tmp_path: Path, package: Package, images: Path) -> None:
    line = collecting(Line(tmp_path, write_device(tmp_path, package, images), package))
    line.run()
    batch = line.server.stored["run-1.features", 0]
    secret = (tmp_path / "state" / "identity" / "site_secret").read_bytes()
    table = permutation(secret, 3, "classes", package.digest)
    labels = {sample.sample_id: sample.label for sample in line.equipment.dataset.samples}
    assert batch.labels is not None
    assert [table[labels[row.tobytes()]] for row in batch.sample_ids] == batch.labels.tolist()
    line.close()


@pytest.mark.parametrize("mode", ["logit-gradient", "client-head"])
def test_labels_never_cross_in_other_modes(tmp_path: Path, package: Package, images: Path, mode: str) -> None:
    line = collecting(Line(tmp_path, write_device(tmp_path, package, images, label_mode=mode), package))
    line.run()
    assert all(batch.labels is None for batch in line.server.stored.values())
    line.close()


def test_upload_order_tells_nothing_of_classes(tmp_path: Path, package: Package, images: Path) -> None:
    line = Line(tmp_path, write_device(tmp_path, package, images), package)
    samples = line.equipment.dataset.samples
    assert [sample.sample_id for sample in samples] == sorted(sample.sample_id for sample in samples)
    labels = [sample.label for sample in samples]
    assert labels != sorted(labels)  # type: ignore[type-var]
    line.close()


def test_no_name_pixel_or_secret_is_in_any_frame(tmp_path: Path, package: Package, images: Path) -> None:
    line = collecting(Line(tmp_path, write_device(tmp_path, package, images), package))
    line.run()
    sent = b"".join(line.server.wire)
    forbidden = [name.encode() for name in COUNTS]
    forbidden += [path.name.encode() for path in images.rglob("*.png")]
    forbidden += [str(tmp_path).encode()]
    for name in ("device_secret", "site_secret"):
        secret = (tmp_path / "state" / "identity" / name).read_bytes()
        forbidden += [secret, secret.hex().encode()]
    for sample in line.equipment.dataset.samples:
        forbidden += [sample.pixel_digest, sample.pixel_digest.hex().encode(), sample.sample_id.hex().encode()]
    assert [text for text in forbidden if text in sent] == []
    line.close()


@pytest.mark.usefixtures("small_batches")
def test_wi_04_cut_after_every_frame_and_each_image_counts_once(tmp_path: Path, package: Package) -> None:
    images = write_images(tmp_path / "many", {"a": 30, "b": 30})
    line = collecting(Line(tmp_path, write_device(tmp_path, package, images), package, credit=2))
    while line.conduct.outcome is None:
        before = len(line.server.wire)
        line.run(lambda before=before: line.conduct.outcome is not None or len(line.server.wire) >= before + 4)
    assert (line.server.images, line.server.copies) == (60, 0)
    line.close()


@pytest.mark.usefixtures("small_batches")
def test_what_was_lost_on_the_way_goes_out_again_and_is_no_more_than_the_credit(
    tmp_path: Path, package: Package
) -> None:
    images = write_images(tmp_path / "many", {"a": 30, "b": 30})
    line = collecting(Line(tmp_path, write_device(tmp_path, package, images), package, credit=3))
    line.run(lambda: line.conduct.is_open and line.spool.next_seq > 6)
    while line.conduct.frames_to_send():
        pass  # written out, and lost with the connection
    line.run()
    assert 1 <= line.conduct.sent_again_most <= 3
    assert line.conduct.sent_again == line.conduct.sent_again_most
    assert (line.server.images, line.server.copies) == (60, 0)
    line.close()


@pytest.mark.usefixtures("small_batches")
def test_a_restarted_device_goes_on_behind_what_its_spool_holds(tmp_path: Path, package: Package) -> None:
    images = write_images(tmp_path / "many", {"a": 30, "b": 30})
    config = write_device(tmp_path, package, images)
    whole = collecting(Line(tmp_path, config, package))
    whole.run()
    expected = dict(whole.server.stored)
    whole.close()
    for leftover in (tmp_path / "state" / "spool" / "adapt").iterdir():
        leftover.unlink()

    first = collecting(Line(tmp_path, config, package, credit=1))
    first.run(lambda: first.server.images > 0 and first.spool.next_seq > 3)
    first.close()
    again = Line(tmp_path, config, package)
    again.server = first.server
    computed = []
    again.delivery.on_change = lambda: computed.append(again.spool.next_seq)
    again.run()
    assert (first.server.images, first.server.copies) == (60, 0)
    assert again.equipment.worker.counters.images < 60  # what was in the spool is not made again
    for key, batch in expected.items():
        assert (first.server.stored[key].codes == batch.codes).all()
        assert (first.server.stored[key].sources == batch.sources).all()
    again.close()


@pytest.mark.usefixtures("small_batches")
def test_a_changed_folder_in_the_middle_of_an_upload_is_said(tmp_path: Path, package: Package) -> None:
    images = write_images(tmp_path / "many", {"a": 30, "b": 30})
    config = write_device(tmp_path, package, images)
    first = collecting(Line(tmp_path, config, package, credit=1))
    first.run(lambda: first.server.images > 0)
    first.close()
    write_images(images, {"c": 1}, seed=5)
    again = Line(tmp_path, config, package, class_count=3)
    again.server.on_open = lambda server: server.ask_features()
    with pytest.raises(DataError, match="other images or settings"):
        again.run()
    again.close()


def test_a_server_that_lost_what_it_had_gets_it_again(tmp_path: Path, package: Package, images: Path) -> None:
    config = write_device(tmp_path, package, images)
    first = collecting(Line(tmp_path, config, package))
    first.run()
    first.close()
    again = collecting(Line(tmp_path, config, package))  # the same session, of which the server knows nothing
    again.run()
    assert again.server.images == 12
    again.close()


def score_ask(line: Line, logits: np.ndarray, ask: str = "run-1.step-1") -> Ask:
    ids = np.stack([np.frombuffer(sample.sample_id, np.uint8) for sample in line.equipment.dataset.samples])
    return Ask(ask, "score_batch", {"split": "train"}, 60.0, {"logits": logits, "sample_ids": ids})


def test_logits_come_back_as_gradients_of_the_true_classes(tmp_path: Path, package: Package, images: Path) -> None:
    line = Line(tmp_path, write_device(tmp_path, package, images, label_mode="logit-gradient"), package)
    logits = np.random.default_rng(3).normal(size=(12, 3)).astype(np.float32)
    line.server.on_open = lambda server: server.session.send(score_ask(line, logits))
    line.run(lambda: len(line.server.gradients) == 1)
    reply = line.server.gradients[0]
    labels = [sample.label for sample in line.equipment.dataset.samples]
    assert reply.gradient.argmin(axis=1).tolist() == labels  # the mode's price, as `head` says
    assert reply.count == 12 and reply.mean_loss > 0
    line.close()


def test_asked_again_after_a_lost_connection_the_answer_is_the_same(
    tmp_path: Path, package: Package, images: Path
) -> None:
    line = Line(tmp_path, write_device(tmp_path, package, images, label_mode="client-head"), package)
    ids = np.stack([np.frombuffer(sample.sample_id, np.uint8) for sample in line.equipment.dataset.samples])
    features = np.random.default_rng(3).normal(size=(12, 5)).astype(np.float32)
    ask = Ask(
        "run-1.step-1", "head_step", {"step": 1, "after": 0, "base": 0}, 60.0, {"features": features, "sample_ids": ids}
    )
    line.server.on_open = lambda server: server.session.send(ask)
    line.run(lambda: len(line.server.gradients) == 1)
    line.run(lambda: len(line.server.gradients) == 2)
    line.close()
    again = Line(tmp_path, write_device(tmp_path, package, images, label_mode="client-head"), package)
    again.server.on_open = lambda server: server.session.send(ask)
    again.run(lambda: len(again.server.gradients) == 1)
    first, second, third = *line.server.gradients, again.server.gradients[0]
    assert (first.gradient == second.gradient).all() and (first.gradient == third.gradient).all()
    head = again.equipment.head_of("run-1")
    assert head is not None and head.step == 1  # taken in once
    again.close()


def test_only_quick_answers_are_made_where_the_ask_came_in(tmp_path: Path, package: Package, images: Path) -> None:
    line = collecting(Line(tmp_path, write_device(tmp_path, package, images, label_mode="logit-gradient"), package))
    line.run(lambda: line.server.images == 12 and not line.delivery.busy)
    ask, welcome = score_ask(line, np.zeros((12, 3), np.float32)), line.conduct.welcome
    assert welcome is not None and is_quick(ask, DeliveryLimits())
    assert not is_quick(ask, DeliveryLimits(quick_bytes=143))  # logits of 144 bytes
    assert not is_quick(Ask("run-1.features", "collect_features", {"kappa": 1.0, "seed": 0}, 60.0), DeliveryLimits())
    before = line.spool.next_seq
    line.delivery.take(ask, welcome)
    assert (line.spool.next_seq, line.delivery.busy) == (before + 1, False)
    unknown = Ask("run-1.step-2", "score_batch", {"split": "train"}, 60.0,
                  {"logits": ask.tensors["logits"], "sample_ids": np.zeros((12, 16), np.uint8)})  # fmt: skip
    line.delivery.take(unknown, welcome)  # raised where the socket's thread looks for it, not in its reader
    assert isinstance(line.delivery.failure, RemoteProtocolError)
    line.close()


def test_a_server_cannot_ask_for_scores_in_permuted_mode(tmp_path: Path, package: Package, images: Path) -> None:
    line = Line(tmp_path, write_device(tmp_path, package, images), package)
    line.server.on_open = lambda server: server.session.send(score_ask(line, np.zeros((12, 3), np.float32)))
    with pytest.raises(RefusedError, match="score_batch"):
        line.run()
    line.close()


def test_the_ask_itself_is_held_to_the_floor(tmp_path: Path, package: Package, images: Path) -> None:
    line = Line(tmp_path, write_device(tmp_path, package, images), package)
    line.server.on_open = lambda server: server.ask_features(kappa=0.25)
    with pytest.raises(RefusedError, match=r"at least 1\.0 .*there 0\.25"):
        line.run()
    assert not line.server.stored
    line.close()


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("kappa", 0.5, r"at least 1\.0 .*, there 0\.5"),
        ("kappa", 3.0, r"at most 2\.0 .*, there 3\.0"),
        ("label_mode", "logit-gradient", "here permuted-label, there logit-gradient"),
        ("package_digest", "ab" * 32, "package digest: here .*, there abababab"),
        ("class_count", 4, "here 3, there 4"),
        ("class_list_hash", "cd" * 32, "class list hash"),
    ],
)
def test_terms_that_do_not_fit_are_refused_with_both_values(
    tmp_path: Path, package: Package, images: Path, field: str, value: object, shown: str
) -> None:
    line = Line(tmp_path, write_device(tmp_path, package, images), package, **{field: value})
    with pytest.raises(RefusedError, match=shown) as refusal:
        line.run()
    assert refusal.value.exit_code == 6
    line.close()


@pytest.mark.parametrize(("code", "kind"), [("wrong-key", AuthError), ("full", RefusedError)])
def test_a_refusal_carries_the_servers_words(
    tmp_path: Path, package: Package, images: Path, code: str, kind: type[Exception]
) -> None:
    line = Line(tmp_path, write_device(tmp_path, package, images), package)

    def refuse(server: MemoryServer, message: Message) -> None:
        if message.TYPE == "hello":
            server.session.frames_to_send()
            server.session.send(Refuse(code, "no room", "come later", 5.0))

    line.server.on_message = refuse
    with pytest.raises(kind, match="no room"):
        line.run()
    line.close()


def test_predictions_are_named_on_the_device(tmp_path: Path, package: Package, images: Path) -> None:
    config = write_device(tmp_path, package, images)
    trained = collecting(Line(tmp_path, config, package))
    trained.run()
    trained.equipment.remember_site()
    trained.close()
    line = Line(tmp_path, config, package, "infer")
    table = line.equipment.wire_labels
    truth = {sample.sample_id: sample.label for sample in line.equipment.dataset.samples}

    def answer(server: MemoryServer, message: Message) -> None:
        if isinstance(message, Features):
            right = [table[truth[row.tobytes()]] for row in message.sample_ids]
            values = 5.0 * np.eye(3, dtype=np.float32)[right]
            server.session.send(Scores(message.ask, message.batch, values))

    line.server.on_message = answer
    line.run()
    assert line.conduct.outcome is not None and line.conduct.outcome.reason == "done" and line.window is not None
    predictions = predict(line.window.scores, line.equipment.dataset, table, None)
    assert accuracy(predictions, line.equipment.dataset) == 1.0
    assert [prediction.file for prediction in predictions] == sorted(prediction.file for prediction in predictions)
    adapted = trained.server.stored["run-1.features", 0]
    inferred = line.server.stored["infer-1", 0]
    assert (adapted.codes == inferred.codes).all()  # the same release: averaging gains nothing
    assert inferred.labels is None and inferred.sources is None
    line.close()


def test_unanswered_batches_go_out_again_on_a_new_connection(tmp_path: Path, package: Package, images: Path) -> None:
    config = write_device(tmp_path, package, images, classes=None)
    (tmp_path / "classes.txt").write_text("\n".join(sorted(COUNTS)))
    line = Line(tmp_path, write_device(tmp_path, package, images, classes=tmp_path / "classes.txt"), package, "infer")
    del config
    line.run(lambda: line.server.images == 12)  # stored, and no scores came
    line.server.on_message = lambda server, message: server.score(message, 3)
    line.run()
    assert line.window is not None and line.window.complete
    line.close()


def test_stopped_in_the_middle_of_the_work_ends_at_the_next_image(tmp_path: Path) -> None:
    package = write_package(tmp_path / "slow", delay_s=0.02)
    images = write_images(tmp_path / "images", {"a": 200})
    line = collecting(Line(tmp_path, write_device(tmp_path, package, images), package))
    line.run(lambda: line.delivery.busy)
    line.stop.set()
    deadline_s = time.monotonic() + 5
    while line.delivery.busy:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert line.delivery.failure is None
    assert not list((tmp_path / "state" / "features").glob("clean*"))
    line.close()


def test_a_goodbye_without_return_ends_the_run(tmp_path: Path, package: Package, images: Path) -> None:
    line = Line(tmp_path, write_device(tmp_path, package, images), package)
    line.server.on_open = lambda server: server.session.send(Bye("failed", False))
    line.run()
    assert line.conduct.outcome is not None and not line.conduct.outcome.may_return
    line.close()


def test_two_devices_with_one_site_secret_number_their_classes_alike(tmp_path: Path, package: Package) -> None:
    secret = tmp_path / "site"
    secret.write_bytes(bytes(range(32)))
    names = tmp_path / "classes.txt"
    names.write_text("cat\ndog\nowl\n")
    tables, hashes = [], []
    for device, classes in (("one", {"cat": 2, "dog": 1, "owl": 1}), ("two", {"owl": 2})):
        images = write_images(tmp_path / device / "images", classes)
        config = write_device(tmp_path / device, package, images, site_secret=secret, classes=names)
        line = Line(tmp_path / device, config, package)
        tables.append(line.equipment.wire_labels.tolist())
        hashes.append(line.equipment.terms.class_list_hash)
        line.close()
    assert tables[0] == tables[1] and hashes[0] == hashes[1]
    assert hashes[0] == class_list_hash(secret.read_bytes(), ("cat", "dog", "owl")).hex()


def test_settings_are_not_on_the_wire(tmp_path: Path, package: Package, images: Path) -> None:
    line = collecting(Line(tmp_path, write_device(tmp_path, package, images, alpha=0.125), package))
    line.run()
    headers = b"".join(frame[:4096] for frame in line.server.wire)
    for word in (b"alpha", b"energy", b"watt", b"0.125", to_json(0.125)):
        assert word not in headers
    line.close()


def test_images_added_after_the_upload_are_told_from_those_in_it(
    tmp_path: Path, package: Package, images: Path
) -> None:
    config = write_device(tmp_path, package, images)
    first = collecting(Line(tmp_path, config, package))
    first.run()
    assert not is_outdated(first.server.welcome, first.equipment.worker, first.spool)
    first.close()
    write_images(images, {"apple": 1}, seed=8)
    again = Line(tmp_path, config, package)
    assert is_outdated(again.server.welcome, again.equipment.worker, again.spool)
    again.close()


@pytest.mark.usefixtures("small_batches")
def test_fresh_noise_is_one_draw_per_upload_over_a_restart_too(tmp_path: Path, package: Package) -> None:
    images = write_images(tmp_path / "many", {"a": 15, "b": 15})
    config = write_device(tmp_path, package, images, noise="fresh")
    first = collecting(Line(tmp_path, config, package, credit=1))
    first.run(lambda: first.server.images > 0)
    first.close()
    note = read_note(first.spool)
    again = Line(tmp_path, config, package)
    again.server = first.server
    again.run()
    assert first.server.images == 30 and read_note(again.spool) == note and note is not None and note.fresh
    again.close()
    other = collecting(Line(tmp_path, config, package, session="s2", run="run-2"))
    with pytest.raises(DataError, match="30 of 30 images would be released 2 times"):
        other.run()
    other.close()


def test_another_scale_is_another_release_and_is_refused(tmp_path: Path, package: Package, images: Path) -> None:
    config = write_device(tmp_path, package, images, kappa_floor=0.5)
    first = collecting(Line(tmp_path, config, package))
    first.run()
    first.close()
    other = Line(tmp_path, config, package, session="s2", run="run-2")
    other.server.on_open = lambda server: server.ask_features(kappa=0.5)
    with pytest.raises(DataError, match=r"12 of 12 .*kappa=1\.0 .*asked now: .*kappa=0\.5"):
        other.run()
    other.close()
    same = collecting(Line(tmp_path, config, package, session="s3", run="run-3"))
    same.run()
    assert same.server.images == 12
    same.close()


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda data: b"",
    "halved": lambda data: data[: len(data) // 2],
    "noise behind": lambda data: data + b"\x00\xffnoise",
}


@pytest.mark.parametrize("harm", sorted(HARMS))
def test_de_04_whatever_file_is_spoiled_the_device_comes_up_or_names_the_secret(
    tmp_path: Path, package: Package, images: Path, harm: str
) -> None:
    config = write_device(tmp_path, package, images)
    whole = collecting(Line(tmp_path, config, package))
    whole.run()
    whole.equipment.remember_site()
    whole.close()
    files = [path.relative_to(config.state) for path in config.state.rglob("*") if path.is_file()]
    assert len([path for path in files if path.parts[0] != "packages"]) >= 7  # secrets, engine, spool, ledger, site
    for number, file in enumerate(sorted(files)):
        state = tmp_path / f"state-{number}"
        shutil.copytree(config.state, state, symlinks=True)
        (state / file).write_bytes(HARMS[harm]((state / file).read_bytes()))
        spoiled = replace(config, state=state)
        if file.parts[0] == "identity":
            with pytest.raises(DeviceError, match=file.name):
                Line(tmp_path, spoiled, package)
            continue
        again = collecting(Line(tmp_path, spoiled, package, session=f"s{number}", run="run-1"))
        again.run()
        assert again.server.images == 12, file
        assert all(
            (again.server.stored[key].codes == batch.codes).all() for key, batch in whole.server.stored.items()
        ), file
        again.close()


def test_scores_of_two_runs_are_never_mixed(tmp_path: Path, package: Package, images: Path) -> None:
    (tmp_path / "classes.txt").write_text("\n".join(sorted(COUNTS)))
    line = Line(tmp_path, write_device(tmp_path, package, images, classes=tmp_path / "classes.txt"), package, "infer")
    line.run(lambda: line.server.images == 12)
    line.server.welcome = replace(line.server.welcome, run="run-2")
    with pytest.raises(RefusedError, match="run: here run-1, there run-2"):
        line.run()
    line.close()


@pytest.mark.parametrize("mode", ["permuted-label", "logit-gradient", "client-head"])
def test_a_server_may_ask_nothing_of_a_device_that_only_predicts(
    tmp_path: Path, package: Package, images: Path, mode: str
) -> None:
    names = tmp_path / "classes.txt"
    names.write_text("\n".join(sorted(COUNTS)) + "\n")
    config = write_device(tmp_path, package, images, label_mode=mode, classes=names)
    line = collecting(Line(tmp_path, config, package, "infer"))
    with pytest.raises(RefusedError, match="none while predicting"):
        line.run()
    line.close()
    assert all(batch.labels is None and batch.sources is None for batch in line.server.stored.values())


def test_a_server_that_lost_what_it_acknowledged_gets_it_again(tmp_path: Path, package: Package, images: Path) -> None:
    config = write_device(tmp_path, package, images)
    first = collecting(Line(tmp_path, config, package))
    first.run()
    first.close()
    held = dict(first.server.stored)
    again = Line(tmp_path, config, package)
    again.server = first.server  # it knows the session and its last number, and has lost the batches
    first.server.stored.clear()
    again.run()
    assert again.server.stored.keys() == held.keys()
    for key, batch in again.server.stored.items():
        assert (batch.codes == held[key].codes).all()
    again.close()


def test_an_offer_is_taken_when_there_is_nothing_to_do_and_not_before(
    tmp_path: Path, package: Package, images: Path
) -> None:
    """What a device leaves for it goes on afterwards, as after a restart."""
    line = Line(tmp_path, write_device(tmp_path, package, images), package)
    offers = Offers()
    line.conduct = Conduct(line.identity, line.equipment.terms, "adapt", line.spool, None, offers)
    line.server.on_open = lambda server: (
        server.session.send(Offer("ab" * 32, 2, 1000, False)), server.ask_features()
    )  # fmt: skip
    answered, spool = line.delivery.answered, line.spool
    line.run(
        lambda: line.server.images == 12 and spool.acknowledged + 1 == spool.next_seq
        and not line.delivery.busy and answered.empty()
    )  # fmt: skip
    assert line.server.hello is not None and line.server.hello.features == ("updates",) and offers.heard
    idle, busy = Heartbeat(1, False, "an ask", 9.0), Heartbeat(1, True, "", 0.0)
    line.conduct.tick(20.0, busy)
    line.conduct.tick(24.0, idle)
    assert line.conduct.outcome is None
    line.conduct.tick(25.5, idle)
    assert line.conduct.outcome is not None and line.conduct.outcome.reason == "update"
    line.close()
