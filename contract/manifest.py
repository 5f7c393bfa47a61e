"""The manifest of a package: what a device must know about the files it was sent, as dataclasses and as exact bytes.

Verifying the signature comes first and is `contract.signature`'s part; comparing the listed digests with the files
on disk is the installer's.

Rules that `from_bytes` and `to_bytes` both keep, so that a published manifest is one that every device can read:

* The bytes are the canonical JSON of the value, byte for byte: one manifest, one digest.
* Unknown fields, missing fields and wrong types are errors, as are NaN and keys given twice.
* File names are plain names: no separators, no parent directories, no two that differ by case only.
* There are no cuts only where `training.json` is listed, which then says what the package is for.
* Every file that a cut names is listed; every byte range that a weight names lies inside that file; ranges that a
  device writes (codes, bias) overlap nothing.
* Shapes agree with each other: input with image rule, statistics with tokens.
* A cut that sends every token under full noise does not say so: the field `sent` is there only where that is not so.
* Likewise the field `preview`, which lists decoders for the owner's preview, is there only where there are some.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from contract.canonical import CanonicalError, decode, encode, from_json, to_json
from contract.errors import ManifestError
from contract.images import ALPHA_RULES, CROP_MODES, INTERPOLATIONS, ImageRule
from contract.preview import PSNR_MAX_DB, Decoder
from contract.tokens import KEPT, SentRule, Statistics, TokenLayout, sent_layout

FORMAT: Literal["cutlayer-package/1"] = "cutlayer-package/1"
MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "manifest.sig"
_TRAINING_NAME = "training.json"  # contract.training's, which imports this file

_PATCH_FAMILIES = ("vit",)  # a token stays that of one patch of the picture, whatever the layer

LabelMode = Literal["raw-label", "permuted-label", "logit-gradient", "client-head"]


@dataclass(frozen=True)
class ManifestLimits:
    """What a manifest may cost its reader."""

    size_bytes: int = 16 << 20
    files: int = 4096
    cuts: int = 256
    name_characters: int = 128
    text_characters: int = 1000


LIMITS = ManifestLimits()

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|[+-]\d\d:\d\d)", re.ASCII)
_VERSION = re.compile(r"\d{1,6}(?:\.\d{1,6}){1,3}", re.ASCII)
_CURE = "get the package again from its publisher; if it fails again, export it anew with this version of Cutlayer"


@dataclass(frozen=True)
class FileRecord:
    """One file of the package; `sha256` in lower-case hex."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class WeightRecord:
    """Where the parts of one quantized weight lie in its cut's ONNX file, as byte offsets of raw little-endian arrays.

    Codes int8 of `shape`; with C = shape[channel_axis] and K = the product of the other axes: scales (C,) float32,
    shift (K,) float32 folded into the input, bias (C,) float32. A shift needs a bias to be folded into.
    """

    name: str
    shape: tuple[int, ...]
    channel_axis: int
    codes_offset: int
    scales_offset: int
    shift_offset: int | None
    bias_offset: int | None


@dataclass(frozen=True)
class Cut:
    """One frontend: the first `index` of the model's `depth` blocks, as the ONNX file named `onnx`.

    Input `input_name` (B, *input_shape) float32 normalised, output `output_name` (B, tokens.count, tokens.dim) float32;
    `macs` for one image.
    """

    index: int
    depth: int
    onnx: str
    input_name: str
    output_name: str
    input_shape: tuple[int, int, int]
    macs: int
    tokens: TokenLayout
    statistics: Statistics
    weights: tuple[WeightRecord, ...]
    sent: SentRule = SentRule()


@dataclass(frozen=True)
class Quantization:
    """How the frontend was quantized and what that cost: SNR (None: equal) and cosine of its tokens against float32."""

    scheme: Literal["w8a8", "float32"]
    recipe: tuple[str, ...]
    int8_share: float
    float_weights: tuple[str, ...]
    snr_db: float | None
    cosine: float
    forced: bool


@dataclass(frozen=True)
class EngineNeeds:
    """What an engine must support to run the ONNX files."""

    opset: int
    ir_version: int
    onnxruntime_min: str


@dataclass(frozen=True)
class TransformRules:
    """Protection that the backend was trained for: weight noise alpha, feature noise kappa and its ceiling."""

    alpha: float
    kappa: float
    kappa_max: float
    weight_noise: bool


@dataclass(frozen=True)
class Manifest:
    """Everything signed about one package; `signer` is the id of the key, `created` an ISO 8601 time with its zone.

    A package of parts that devices train has no cuts; its training.json has them (`contract.training`).
    """

    format: Literal["cutlayer-package/1"]
    name: str
    version: int
    model: str
    family: str
    cuts: tuple[Cut, ...]
    image: ImageRule
    quantization: Quantization
    engine: EngineNeeds
    transforms: TransformRules
    label_modes: tuple[LabelMode, ...]
    classes: tuple[str, ...] | None
    files: tuple[FileRecord, ...]
    signer: str
    created: str
    preview: tuple[Decoder, ...] = ()

    @property
    def retrieves_patches(self) -> bool:
        """Whether patch retrieval applies. In families with merged or convolved tokens it does not (SA 1.1, Swin)."""
        return self.family in _PATCH_FAMILIES

    def sent_bytes(self, cut: Cut) -> int:
        """Of one image's upload: one for each value of the tokens, two for where each patch was found again."""
        sent = sent_layout(cut.tokens, cut.sent.kept)
        return sent.count * sent.dim + (2 * sent.patches if self.retrieves_patches else 0)


def to_bytes(manifest: Manifest) -> bytes:
    """Canonical bytes of a manifest, to be signed.

    Raises: ManifestError if the manifest breaks a rule.
    """
    try:
        data = to_json(_without_plain_rules(encode(manifest)))
    except CanonicalError as error:
        raise ManifestError(f"manifest: {error}", "correct the manifest before it is published") from error
    if len(data) > LIMITS.size_bytes:
        raise _broken("size", f"at most {LIMITS.size_bytes} bytes", str(len(data)))
    check(manifest)
    return data


def from_bytes(data: bytes) -> Manifest:
    """Manifest from bytes whose signature was verified.

    Raises: ManifestError if the bytes break a rule.
    """
    try:
        manifest = decode(Manifest, _with_plain_rules(from_json(data, LIMITS.size_bytes)))
    except CanonicalError as error:
        raise ManifestError(f"manifest: {error}", _CURE) from error
    if to_bytes(manifest) != data:
        raise _broken("text", "canonical JSON (sorted keys, no spaces)", "the same values in another form")
    return manifest


def _without_plain_rules(document: Any) -> Any:
    """The document without `sent` and `preview` where they are the default."""
    if not document["preview"]:
        del document["preview"]
    for cut in document["cuts"]:
        if cut["sent"] == encode(SentRule()):
            del cut["sent"]
    return document


def _with_plain_rules(document: Any) -> Any:
    """The inverse, for a document of which nothing is known yet."""
    if isinstance(document, dict):
        document.setdefault("preview", [])
    cuts = document.get("cuts") if isinstance(document, dict) else None
    for cut in cuts if isinstance(cuts, list) else ():
        if isinstance(cut, dict):
            cut.setdefault("sent", encode(SentRule()))
    return document


def digest(data: bytes) -> bytes:
    """Package digest: SHA-256 (32 bytes) of the manifest's bytes, which name every file by its own digest."""
    return hashlib.sha256(data).digest()


def check(manifest: Manifest) -> None:
    """Refuse a manifest that contradicts itself, whoever wrote it.

    Raises: ManifestError.
    """
    _require(_FILE_NAME.fullmatch(manifest.name) is not None, "name", "letters, digits, '.', '_', '-'", manifest.name)
    _require(manifest.version >= 1, "version", "1 or more", manifest.version)
    for field in ("name", "model", "family"):
        text = getattr(manifest, field)
        _require(0 < len(text) <= LIMITS.name_characters and text.isprintable(), field, "a short printable text", text)
    _require(_KEY_ID.fullmatch(manifest.signer) is not None, "signer", "16 hex digits", manifest.signer)
    _require(_DATE.fullmatch(manifest.created) is not None, "created", "an ISO 8601 time with zone", manifest.created)
    _require(len(manifest.label_modes) > 0, "label_modes", "one or more", "none")
    _require_unique("label_modes", manifest.label_modes)
    _check_classes(manifest.classes)
    _check_figures(manifest)
    _check_image(manifest.image)
    sizes = _check_files(manifest.files)
    fewest = 0 if _TRAINING_NAME in sizes else 1
    _require(fewest <= len(manifest.cuts) <= LIMITS.cuts, "cuts", f"{fewest} to {LIMITS.cuts}", len(manifest.cuts))
    for place, cut in enumerate(manifest.cuts):
        _check_cut(f"cuts[{place}]", cut, manifest.image, sizes)
    _require_unique("cuts.index", [cut.index for cut in manifest.cuts])
    for place, decoder in enumerate(manifest.preview):
        _check_decoder(f"preview[{place}]", decoder, manifest, sizes)
    _require_unique("preview", [(decoder.cut, decoder.kappa) for decoder in manifest.preview])


def _check_classes(classes: tuple[str, ...] | None) -> None:
    if classes is None:
        return
    _require(len(classes) > 0, "classes", "null or one name and more", "none")
    for name in classes:
        _require(0 < len(name) <= LIMITS.text_characters and name.isprintable(), "classes", "printable names", name)
    _require_unique("classes", classes)


def _check_figures(manifest: Manifest) -> None:
    quantization, engine, rules = manifest.quantization, manifest.engine, manifest.transforms
    _require(0 <= quantization.int8_share <= 1, "quantization.int8_share", "0 to 1", quantization.int8_share)
    _require(-1.001 <= quantization.cosine <= 1.001, "quantization.cosine", "-1 to 1", quantization.cosine)
    _require(engine.opset >= 1, "engine.opset", "1 or more", engine.opset)
    _require(engine.ir_version >= 1, "engine.ir_version", "1 or more", engine.ir_version)
    numbered = _VERSION.fullmatch(engine.onnxruntime_min) is not None
    _require(numbered, "engine.onnxruntime_min", "a version such as 1.19", engine.onnxruntime_min)
    _require(rules.alpha >= 0, "transforms.alpha", "0 or more", rules.alpha)
    ceiling = rules.kappa_max
    _require(0 <= rules.kappa <= ceiling, "transforms.kappa", f"0 to kappa_max ({ceiling})", rules.kappa)


def _check_image(image: ImageRule) -> None:
    _require(image.height >= 1, "image.height", "1 or more", image.height)
    _require(image.width >= 1, "image.width", "1 or more", image.width)
    for field, known in (("interpolation", INTERPOLATIONS), ("crop_mode", CROP_MODES), ("alpha", ALPHA_RULES)):
        name = getattr(image, field)
        _require(name in known, f"image.{field}", f"one of {', '.join(known)}", name)
    _require(0 < image.crop_fraction <= 1, "image.crop_fraction", "more than 0, at most 1", image.crop_fraction)
    _require(min(image.std) > 0, "image.std", "positive", image.std)
    _require(image.max_pixels >= 1, "image.max_pixels", "1 or more", image.max_pixels)


def _check_files(files: tuple[FileRecord, ...]) -> dict[str, int]:
    """Size by name of every listed file."""
    _require(len(files) <= LIMITS.files, "files", f"at most {LIMITS.files}", len(files))
    for place, file in enumerate(files):
        where = f"files[{place}]"
        plain = _FILE_NAME.fullmatch(file.name) is not None and len(file.name) <= LIMITS.name_characters
        _require(plain, f"{where}.name", "a plain file name without separators", file.name)
        reserved = file.name.casefold() in (MANIFEST_NAME, SIGNATURE_NAME)
        _require(not reserved, f"{where}.name", "a file that the manifest can list", file.name)
        _require(file.size_bytes >= 0, f"{where}.size_bytes", "0 or more", file.size_bytes)
        _require(_DIGEST.fullmatch(file.sha256) is not None, f"{where}.sha256", "64 hex digits", file.sha256)
    _require_unique("files", [file.name.casefold() for file in files])  # some file systems fold case
    return {file.name: file.size_bytes for file in files}


def _check_cut(where: str, cut: Cut, image: ImageRule, sizes: dict[str, int]) -> None:
    _require(1 <= cut.index <= cut.depth, f"{where}.index", f"1 to depth ({cut.depth})", cut.index)
    _require(cut.onnx in sizes, f"{where}.onnx", "a listed file", cut.onnx)
    _require(cut.macs >= 0, f"{where}.macs", "0 or more", cut.macs)
    for field in ("input_name", "output_name"):
        name = getattr(cut, field)
        _require(0 < len(name) <= LIMITS.name_characters, f"{where}.{field}", "a name", name)
    expected = (3, image.height, image.width)
    _require(cut.input_shape == expected, f"{where}.input_shape", f"{expected} as the image rule", cut.input_shape)
    tokens = cut.tokens
    possible = min(tokens.grid) >= 1 and tokens.prefix >= 0 and tokens.dim >= 1
    _require(possible, f"{where}.tokens", "prefix of 0 or more, grid and dim of 1 or more", tokens)
    for field, values in vars(cut.statistics).items():
        _require(len(values) == tokens.dim, f"{where}.statistics.{field}", f"{tokens.dim} values", len(values))
        _require(min(values) >= 0, f"{where}.statistics.{field}", "values of 0 or more", min(values))
    _require(cut.sent.kept in KEPT, f"{where}.sent.kept", f"one of {', '.join(KEPT)}", cut.sent.kept)
    share = cut.sent.prefix_share
    _require(0 <= share <= 1, f"{where}.sent.prefix_share", "0 to 1", share)
    _require_unique(f"{where}.weights", [weight.name for weight in cut.weights])
    _check_ranges(where, cut, sizes[cut.onnx])


def _check_decoder(where: str, decoder: Decoder, manifest: Manifest, sizes: dict[str, int]) -> None:
    _require(decoder.onnx in sizes, f"{where}.onnx", "a listed file", decoder.onnx)
    cuts = [cut.index for cut in manifest.cuts]
    _require(decoder.cut in cuts, f"{where}.cut", f"one of the cuts {cuts}", decoder.cut)
    ceiling = manifest.transforms.kappa_max
    _require(0 <= decoder.kappa <= ceiling, f"{where}.kappa", f"0 to kappa_max ({ceiling})", decoder.kappa)
    _require(decoder.alpha >= 0, f"{where}.alpha", "0 or more", decoder.alpha)
    for field, least in (("steps", 0), ("learnt_images", 1), ("images", 1)):
        count = getattr(decoder, field)
        _require(count >= least, f"{where}.{field}", f"{least} or more", count)
    for field in ("psnr_db", "ridge_psnr_db", "colour_psnr_db"):
        figure = getattr(decoder, field)
        _require(-PSNR_MAX_DB <= figure <= PSNR_MAX_DB, f"{where}.{field}", f"at most {PSNR_MAX_DB}", figure)
    for field in ("ssim", "colour_ssim"):
        figure = getattr(decoder, field)
        _require(-1 <= figure <= 1, f"{where}.{field}", "-1 to 1", figure)


class _Range(NamedTuple):
    """Bytes start to stop (exclusive) of a file, and whether a device writes them."""

    start: int
    stop: int
    written: bool


def _check_ranges(cut_name: str, cut: Cut, size_bytes: int) -> None:
    ranges: set[_Range] = set()  # a set: two weights may read the very same scales or shift
    for weight in cut.weights:
        where = f"{cut_name}.weights {weight.name!r}"
        for found in _ranges(where, weight):
            span = f"{found.start} to {found.stop}"
            inside = found.start >= 0 and found.stop <= size_bytes
            _require(inside, where, f"offsets inside {cut.onnx} ({size_bytes} bytes)", span)
            _require(not (found.written and found in ranges), where, "bytes of its own", span)
            ranges.add(found)
    reached = 0
    for found in sorted(ranges):
        apart = found.start >= reached
        _require(apart, f"{cut_name}.weights", "arrays that do not overlap", f"an overlap at {found.start}")
        reached = found.stop


def _ranges(where: str, weight: WeightRecord) -> Iterator[_Range]:
    shape, axis = weight.shape, weight.channel_axis
    _require(2 <= len(shape) <= 8 and min(shape) >= 1, f"{where}.shape", "2 to 8 sizes of 1 or more", shape)
    _require(0 <= axis < len(shape), f"{where}.channel_axis", f"0 to {len(shape) - 1}", axis)
    has_bias = weight.shift_offset is None or weight.bias_offset is not None
    _require(has_bias, f"{where}.bias_offset", "a bias, as there is a shift to fold into it", "null")
    codes, channels = math.prod(shape), shape[axis]
    yield _Range(weight.codes_offset, weight.codes_offset + codes, True)
    yield _Range(weight.scales_offset, weight.scales_offset + 4 * channels, False)
    if weight.shift_offset is not None:
        yield _Range(weight.shift_offset, weight.shift_offset + 4 * (codes // channels), False)
    if weight.bias_offset is not None:
        yield _Range(weight.bias_offset, weight.bias_offset + 4 * channels, True)


def _require_unique(where: str, values: Iterable[object]) -> None:
    seen: set[object] = set()
    for value in values:
        _require(value not in seen, where, "each one once", value)
        seen.add(value)


def _require(holds: bool, where: str, expected: str, found: object) -> None:
    if not holds:
        raise _broken(where, expected, str(found)[:100])


def _broken(where: str, expected: str, found: str) -> ManifestError:
    return ManifestError(f"manifest: {where}: expected {expected}, found {found!r}", _CURE)
