from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import manifest as package
from contract.canonical import to_json
from contract.errors import ManifestError
from contract.manifest import digest, from_bytes, to_bytes
from contract.tokens import SentRule
from tests.golden.samples import MANIFEST, MANIFEST_FILE

Document = dict[str, Any]


def document() -> Document:
    return json.loads(MANIFEST_FILE.read_bytes())


def canonical(value: Document) -> bytes:
    return to_json(value)


def change(path: str, value: object) -> Callable[[Document], Document]:
    """Sets the field that a path such as `cuts.0.depth` names."""

    def apply(whole: Document) -> Document:
        *parents, last = (int(part) if part.isdecimal() else part for part in path.split("."))
        place: Any = whole
        for part in parents:
            place = place[part]
        place[last] = value
        return whole

    return apply


def test_manifest_of_version_1_still_reads_and_writes_the_same_bytes() -> None:
    data = MANIFEST_FILE.read_bytes()
    assert from_bytes(data) == MANIFEST
    assert to_bytes(MANIFEST) == data


def test_a_cut_says_what_it_sends_only_where_that_is_not_everything() -> None:
    rule = {"kept": "checkerboard", "prefix_share": 0.5}
    there = from_bytes(canonical(change("cuts.0.sent", rule)(document())))
    assert there.cuts[0].sent == SentRule("checkerboard", 0.5)
    assert b'"sent":{"kept":"checkerboard","prefix_share":0.5}' in to_bytes(there)
    assert b'"sent"' not in to_bytes(MANIFEST) and MANIFEST.cuts[0].sent == SentRule()
    with pytest.raises(ManifestError, match="canonical"):  # one manifest, one digest
        from_bytes(canonical(change("cuts.0.sent", {"kept": "all", "prefix_share": 1.0})(document())))


@pytest.mark.parametrize(
    "rule", [{"kept": "half", "prefix_share": 1.0}, {"kept": "all", "prefix_share": -0.1},
             {"kept": "all", "prefix_share": 1.5}, {"kept": "all"}, "all"],
)  # fmt: skip
def test_a_rule_of_what_is_sent_that_no_device_has_is_refused(rule: object) -> None:
    with pytest.raises(ManifestError):
        from_bytes(canonical(change("cuts.0.sent", rule)(document())))


DECODER: Document = {
    "onnx": "decoder.onnx", "cut": 2, "kappa": 1.0, "alpha": 0.1, "steps": 100, "learnt_images": 200, "images": 50,
    "psnr_db": 16.5, "ssim": 0.5, "ridge_psnr_db": 16.0, "colour_psnr_db": 12.0, "colour_ssim": 0.25,
}  # fmt: skip


def with_decoders(*changes: Document) -> Callable[[Document], Document]:
    """A package with one decoder for each change of DECODER."""
    files = [*document()["files"], {"name": "decoder.onnx", "sha256": "0" * 64, "size_bytes": 10}]
    listed = change("files", files)
    return lambda whole: change("preview", [{**DECODER, **each} for each in changes])(listed(whole))


def test_decoders_for_the_owners_preview_are_listed_where_there_are_some() -> None:
    data = canonical(with_decoders({}, {"kappa": 2.0})(document()))
    there = from_bytes(data)
    assert to_bytes(there) == data and [each.kappa for each in there.preview] == [1.0, 2.0]
    assert b'"preview"' not in to_bytes(MANIFEST) and MANIFEST.preview == ()
    with pytest.raises(ManifestError, match="canonical"):  # one manifest, one digest
        from_bytes(canonical(change("preview", [])(document())))


@pytest.mark.parametrize("cuts", [None, 3, [3], [[]], {"0": {}}])
def test_cuts_that_are_no_list_of_objects_are_refused(cuts: object) -> None:
    with pytest.raises(ManifestError):
        from_bytes(canonical(change("cuts", cuts)(document())))


def test_digest_is_sha256_of_the_bytes() -> None:
    assert digest(b"abc") == hashlib.sha256(b"abc").digest()


VALID = {
    "no_classes": change("classes", None),
    "no_snr_because_nothing_differs": change("quantization.snr_db", None),
    "float_scheme_without_weights": lambda whole: change("quantization.scheme", "float32")(
        change("cuts.0.weights", [])(whole)
    ),
    "no_prefix_tokens": change("cuts.0.tokens.prefix", 0),
    "whole_model_in_front": change("cuts.0.index", 12),
    "created_with_offset_and_fraction": change("created", "2026-11-28T01:02:03.456789+02:00"),
    "scales_right_after_the_last_bias": change("cuts.0.weights.1.scales_offset", 388 + 16),
    "weights_that_read_the_same_scales_and_shift": change(
        "cuts.0.weights.0",
        {**document()["cuts"][0]["weights"][1], "name": "b", "codes_offset": 500, "bias_offset": 700},
    ),
    "array_that_ends_with_the_file": change("cuts.0.weights.1.bias_offset", 1024 - 16),
    "weight_without_bias": change("cuts.0.weights.0.bias_offset", None),
    "no_cut_but_parts_to_train": lambda whole: change("files.1.name", "training.json")(change("cuts", [])(whole)),
    "a_cut_and_parts_to_train": change("files.1.name", "training.json"),
    "several_cuts": lambda whole: change("cuts", [whole["cuts"][0], {**whole["cuts"][0], "index": 4}])(whole),
}


@pytest.mark.parametrize("case", VALID)
def test_valid(case: str) -> None:
    data = canonical(VALID[case](document()))
    assert to_bytes(from_bytes(data)) == data


# Name of the attack or slip -> what makes it, and the words that must be in the error's cause.
INVALID: dict[str, tuple[Callable[[Document], Document], str]] = {
    "unknown_field": (change("comment", "x"), "no other fields of Manifest, found 'comment'"),
    "unknown_field_deep_inside": (change("cuts.0.tokens.extra", 1), "cuts[0].tokens: expected no other fields"),
    "missing_field": (lambda whole: {k: v for k, v in whole.items() if k != "files"}, "the field 'files'"),
    "wrong_type": (change("version", "3"), "version: expected int, found str '3'"),
    "bool_for_int": (change("version", True), "version: expected int, found bool True"),
    "int_for_float": (change("transforms.kappa", 1), "transforms.kappa: expected a finite float, found int 1"),
    "not_an_object": (lambda whole: [whole], "expected an object (Manifest)"),  # type: ignore[list-item,return-value]
    "foreign_format": (change("format", "cutlayer-package/2"), "format: expected one of cutlayer-package/1"),
    "version_zero": (change("version", 0), "version: expected 1 or more"),
    "version_beyond_64_bits": (change("version", 2**63), "version: expected an int of 64 bits"),
    "package_name_with_separator": (change("name", "a/b"), "name: expected letters"),
    "package_name_hidden": (change("name", ".front"), "name: expected letters"),
    "empty_model": (change("model", ""), "model: expected a short printable text"),
    "model_with_control_characters": (change("model", "vit\x1b[2J"), "model: expected a short printable text"),
    "no_label_mode": (change("label_modes", []), "label_modes: expected one or more"),
    "unknown_label_mode": (change("label_modes", ["raw"]), "label_modes[0]: expected one of raw-label"),
    "label_mode_twice": (change("label_modes", ["raw-label", "raw-label"]), "label_modes: expected each one once"),
    "no_class": (change("classes", []), "classes: expected null or one name"),
    "class_twice": (change("classes", ["a", "a"]), "classes: expected each one once"),
    "class_without_name": (change("classes", [""]), "classes: expected printable names"),
    "signer_in_upper_case": (change("signer", "0123456789ABCDEF"), "signer: expected 16 hex digits"),
    "created_without_zone": (change("created", "2026-11-28T00:00:00"), "created: expected an ISO 8601 time"),
    "created_in_words": (change("created", "yesterday"), "created: expected an ISO 8601 time"),
    "file_name_with_separator": (change("files.0.name", "cuts/front.onnx"), "files[0].name: expected a plain file"),
    "file_name_with_backslash": (change("files.0.name", "cuts\\front.onnx"), "files[0].name: expected a plain file"),
    "file_name_parent": (change("files.0.name", ".."), "files[0].name: expected a plain file name"),
    "file_name_absolute": (change("files.0.name", "/etc/passwd"), "files[0].name: expected a plain file name"),
    "file_name_empty": (change("files.0.name", ""), "files[0].name: expected a plain file name"),
    "file_name_with_nul": (change("files.0.name", "a\x00b"), "files[0].name: expected a plain file name"),
    "file_name_with_newline": (change("files.0.name", "front.onnx\n"), "files[0].name: expected a plain file name"),
    "file_name_too_long": (change("files.0.name", "a" * 129), "files[0].name: expected a plain file name"),
    "file_lists_the_manifest": (change("files.1.name", "Manifest.json"), "a file that the manifest can list"),
    "file_lists_the_signature": (change("files.1.name", "manifest.sig"), "a file that the manifest can list"),
    "file_twice": (change("files.1.name", "front.onnx"), "files: expected each one once"),
    "file_twice_but_for_case": (change("files.1.name", "FRONT.onnx"), "files: expected each one once"),
    "file_size_negative": (change("files.0.size_bytes", -1), "files[0].size_bytes: expected 0 or more"),
    "file_digest_short": (change("files.0.sha256", "00"), "files[0].sha256: expected 64 hex digits"),
    "no_cut": (change("cuts", []), "cuts: expected 1 to"),
    "no_cut_and_a_file_of_nearly_that_name": (
        lambda whole: change("files.1.name", "Training.json")(change("cuts", [])(whole)),
        "cuts: expected 1 to",
    ),
    "cut_twice": (lambda whole: change("cuts", whole["cuts"] * 2)(whole), "cuts.index: expected each one once"),
    "cut_of_no_block": (change("cuts.0.index", 0), "cuts[0].index: expected 1 to depth (12)"),
    "cut_beyond_depth": (change("cuts.0.index", 13), "cuts[0].index: expected 1 to depth (12)"),
    "cut_file_not_listed": (change("cuts.0.onnx", "other.onnx"), "cuts[0].onnx: expected a listed file"),
    "input_shape_not_the_image_rule": (change("cuts.0.input_shape", [3, 32, 33]), "cuts[0].input_shape: expected"),
    "input_shape_of_two": (change("cuts.0.input_shape", [3, 32]), "cuts[0].input_shape: expected 3 values"),
    "input_without_name": (change("cuts.0.input_name", ""), "cuts[0].input_name: expected a name"),
    "macs_negative": (change("cuts.0.macs", -5), "cuts[0].macs: expected 0 or more"),
    "grid_empty": (change("cuts.0.tokens.grid", [0, 2]), "cuts[0].tokens: expected prefix of 0 or more"),
    "prefix_negative": (change("cuts.0.tokens.prefix", -1), "cuts[0].tokens: expected prefix of 0 or more"),
    "sigma_shorter_than_d": (change("cuts.0.statistics.sigma_patch", [0.1]), "sigma_patch: expected 4 values"),
    "sigma_longer_than_d": (change("cuts.0.statistics.sigma_prefix", [0.1] * 5), "sigma_prefix: expected 4 values"),
    "sigma_negative": (change("cuts.0.statistics.sigma_patch", [0.1, -0.1, 1.0, 1.0]), "values of 0 or more"),
    "weight_twice": (change("cuts.0.weights.1.name", "blocks.0.attn.qkv"), "cuts[0].weights: expected each one once"),
    "weight_shape_of_one": (change("cuts.0.weights.0.shape", [48]), "shape: expected 2 to 8 sizes"),
    "weight_shape_with_zero": (change("cuts.0.weights.0.shape", [0, 12]), "shape: expected 2 to 8 sizes"),
    "weight_axis_outside": (change("cuts.0.weights.0.channel_axis", 2), "channel_axis: expected 0 to 1, found '2'"),
    "weight_axis_negative": (change("cuts.0.weights.0.channel_axis", -1), "channel_axis: expected 0 to 1"),
    "weight_codes_outside_the_file": (change("cuts.0.weights.0.codes_offset", 1000), "offsets inside front.onnx (1024"),
    "weight_bias_outside_the_file": (change("cuts.0.weights.1.bias_offset", 1024 - 15), "offsets inside front.onnx"),
    "weight_offset_negative": (change("cuts.0.weights.0.codes_offset", -1), "offsets inside front.onnx"),
    "weight_larger_than_the_file": (change("cuts.0.weights.0.shape", [2**40, 2**40]), "offsets inside front.onnx"),
    "weight_codes_overlap_scales": (change("cuts.0.weights.0.scales_offset", 147), "arrays that do not overlap"),
    "weight_codes_overlap_other_codes": (change("cuts.0.weights.1.codes_offset", 120), "arrays that do not overlap"),
    "weights_write_one_bias": (
        change("cuts.0.weights.1", {**document()["cuts"][0]["weights"][0], "name": "b", "codes_offset": 500}),
        "bytes of its own",
    ),
    "shift_without_bias": (change("cuts.0.weights.1.bias_offset", None), "a bias, as there is a shift"),
    "interpolation_unknown": (change("image.interpolation", "magic"), "image.interpolation: expected one of nearest"),
    "crop_mode_unknown": (change("image.crop_mode", "magic"), "image.crop_mode: expected one of center"),
    "alpha_rule_unknown": (change("image.alpha", "black"), "image.alpha: expected one of white"),
    "crop_fraction_zero": (change("image.crop_fraction", 0.0), "image.crop_fraction: expected more than 0"),
    "image_of_no_height": (change("image.height", 0), "image.height: expected 1 or more"),
    "image_std_zero": (change("image.std", [0.0, 1.0, 1.0]), "image.std: expected positive"),
    "image_without_pixels": (change("image.max_pixels", 0), "image.max_pixels: expected 1 or more"),
    "int8_share_above_one": (change("quantization.int8_share", 1.5), "int8_share: expected 0 to 1"),
    "scheme_unknown": (change("quantization.scheme", "w4a4"), "quantization.scheme: expected one of w8a8, float32"),
    "cosine_above_one": (change("quantization.cosine", 2.0), "cosine: expected -1 to 1"),
    "opset_zero": (change("engine.opset", 0), "engine.opset: expected 1 or more"),
    "onnxruntime_in_words": (change("engine.onnxruntime_min", "new"), "expected a version such as 1.19"),
    "kappa_above_its_ceiling": (change("transforms.kappa", 3.0), "transforms.kappa: expected 0 to kappa_max (2.0)"),
    "kappa_negative": (change("transforms.kappa", -1.0), "transforms.kappa: expected 0 to kappa_max"),
    "alpha_negative": (change("transforms.alpha", -0.1), "transforms.alpha: expected 0 or more"),
    "preview_null": (change("preview", None), "preview: expected"),
    "decoder_not_listed": (with_decoders({"onnx": "other.onnx"}), "preview[0].onnx: expected a listed file"),
    "decoder_of_no_cut": (with_decoders({"cut": 3}), "preview[0].cut: expected one of the cuts [2]"),
    "decoder_twice": (with_decoders({}, {}), "preview: expected each one once"),
    "decoder_above_the_ceiling": (with_decoders({"kappa": 3.0}), "preview[0].kappa: expected 0 to kappa_max"),
    "decoder_that_was_measured_on_nothing": (with_decoders({"images": 0}), "preview[0].images: expected 1 or more"),
    "decoder_too_good": (with_decoders({"psnr_db": 1e3}), "preview[0].psnr_db: expected at most 100"),
    "decoder_ssim_above_one": (with_decoders({"ssim": 1.5}), "preview[0].ssim: expected -1 to 1"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid(case: str) -> None:
    spoil, text = INVALID[case]
    with pytest.raises(ManifestError) as raised:
        from_bytes(canonical(spoil(document())))
    assert text in raised.value.cause and len(raised.value.cause) < 400
    assert raised.value.cure


# Bytes that hold the right values in a wrong form.
WRONG_TEXT: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "spaces": (lambda data: data.replace(b":3}", b": 3}"), "canonical JSON"),
    "newline_at_the_end": (lambda data: data + b"\n", "canonical JSON"),
    "keys_not_sorted": (lambda data: data.replace(b'"grid":[2,2],"prefix":1', b'"prefix":1,"grid":[2,2]'), "canonical"),
    "escaped_letter": (lambda data: data.replace("ä".encode(), b"\\u00e4"), "canonical JSON"),
    "float_in_another_form": (lambda data: data.replace(b"0.125]", b"1.25e-1]"), "canonical JSON"),
    "key_twice": (lambda data: data.replace(b'{"classes"', b'{"version":9,"classes"'), "'version' more than once"),
    "nan_statistics": (lambda data: data.replace(b"0.125]", b"NaN]"), "finite number, found NaN"),
    "infinite_statistics": (lambda data: data.replace(b"0.125]", b"1e999]"), "finite number, found 1e999"),
    "not_utf8": (lambda data: data.replace("ä".encode(), b"\xff"), "JSON text"),
    "half_a_surrogate_pair": (lambda data: data.replace("ä".encode(), b"\\ud800"), "surrogates not allowed"),
    "nested_a_million_deep": (lambda data: b"[" * 10**6, "JSON text"),
    "oversized": (lambda data: data + b" " * (16 << 20), "at most 16777216 bytes"),
    "truncated": (lambda data: data[:-1], "JSON text"),
    "empty": (lambda data: b"", "JSON text"),
}


@pytest.mark.parametrize("case", WRONG_TEXT)
def test_wrong_text(case: str) -> None:
    spoil, text = WRONG_TEXT[case]
    data = MANIFEST_FILE.read_bytes()
    assert spoil(data) != data
    with pytest.raises(ManifestError) as raised:
        from_bytes(spoil(data))
    assert text in raised.value.cause and len(raised.value.cause) < 400


def test_publisher_cannot_write_what_a_device_would_refuse() -> None:
    with pytest.raises(ManifestError, match="version: expected 1 or more"):
        to_bytes(dataclasses.replace(MANIFEST, version=0))
    with pytest.raises(ManifestError, match="expected a value|expected a finite float"):
        transforms = dataclasses.replace(MANIFEST.transforms, kappa=float("nan"))
        to_bytes(dataclasses.replace(MANIFEST, transforms=transforms))


def test_manifest_above_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "LIMITS", package.ManifestLimits(size_bytes=100))
    with pytest.raises(ManifestError, match="size: expected at most 100 bytes"):
        to_bytes(MANIFEST)


def test_large_manifest_reads_in_time_that_grows_with_its_size() -> None:
    # Ten cuts of a ViT-L: statistics of 1024 channels, 64 weights each.
    statistics = package.Statistics(*((0.123456789,) * 1024,) * 4)
    weights = tuple(package.WeightRecord(f"w{i}", (8, 4), 1, 100 * i, 100 * i + 40, None, None) for i in range(64))
    cut = dataclasses.replace(
        MANIFEST.cuts[0], statistics=statistics, tokens=package.TokenLayout(1, (14, 14), 1024), weights=weights
    )
    cuts = tuple(dataclasses.replace(cut, index=index) for index in range(1, 11))
    files = (package.FileRecord("front.onnx", 10**6, "0" * 64),)
    large = dataclasses.replace(MANIFEST, cuts=cuts, files=files)
    assert from_bytes(to_bytes(large)) == large


@given(st.text(max_size=20))
def test_no_accepted_file_name_leaves_its_directory(name: str) -> None:
    data = canonical(change("files.1.name", name)(document()))
    try:
        accepted = from_bytes(data).files[1].name
    except ManifestError:
        return
    assert not set(accepted) & set("/\\:\0\n") and not accepted.startswith(".")
