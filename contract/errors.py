"""Every error this product raises, each with its cause, its cure and its exit code.

Printing them and leaving the program is `contract.console`'s part.

    CutlayerError                   1
        UsageError                  2   the command line is wrong
            ConfigError             2   a configuration file, variable or flag is wrong
        ExportError                 3   the model cannot be exported
            GateError               3   it was exported and did not pass a check
                LimitsError         9   no way to protect it is within the limits that were asked for
        PackageError                4   the package is damaged or incomplete
            SignatureError          4   its signature is missing, foreign or does not fit
            ManifestError           4   its manifest breaks the format
            RollbackError           4   it is older than the one installed
            KindError               4   it holds something else than the one installed
            WeakerError             4   it protects less than the one installed
            OtherNameError          4   it has another name than the one installed
        DeviceError                 5   this device cannot do the work
            DataError               5   an image or an image folder cannot be used
            EngineError             5   the engine cannot be built or gives wrong values
                TrialError          5   a package did not pass a check of its trial
        ProtocolError               6   the conversation went wrong
            LocalProtocolError      6   we broke the rules: a bug of this side
            RemoteProtocolError     6   they broke the rules: close the connection
            AuthError               6   the peer could not prove who it is
            RefusedError            6   the peer said no, and why
        TrainingError               7   training cannot go on
        UnreachableError            8   the peer does not answer
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

SUGGESTED_MOST, SUGGESTED_FEW = 40, 5  # names


class CutlayerError(Exception):
    """What went wrong (`cause`) and what the reader can do about it (`cure`); `str()` gives the cause."""

    exit_code: ClassVar[int] = 1

    def __init__(self, cause: str, cure: str) -> None:
        super().__init__(cause, cure)  # both, so that the error survives pickling out of a child process
        self.cause = cause
        self.cure = cure

    def __str__(self) -> str:
        return self.cause


class UsageError(CutlayerError):
    """The command line is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file, environment variable or flag has a wrong value, or none where one is needed."""


class ExportError(CutlayerError):
    """The model cannot be exported."""

    exit_code = 3


class GateError(ExportError):
    """The export was made and refused: a figure is outside the declared limit."""


class LimitsError(GateError):
    """A gated export measured every point it was to try, and none is within the limits."""

    exit_code = 9


class PackageError(CutlayerError):
    """The package is damaged, incomplete or not for this device."""

    exit_code = 4


class SignatureError(PackageError):
    """The signature is missing, from an unknown signer, or does not fit the bytes."""


class ManifestError(PackageError):
    """The manifest breaks the format or contradicts itself."""


class RollbackError(PackageError):
    """The package is older than the one already installed."""


class KindError(PackageError):
    """The package holds parts to be trained where a frontend is installed, or the other way round."""


class WeakerError(PackageError):
    """The package that was sent would protect the images less than the one installed."""


class OtherNameError(PackageError):
    """The package that was sent has another name than the one installed, and none that this device's settings list."""


class DeviceError(CutlayerError):
    """This device cannot do the work."""

    exit_code = 5


class DataError(DeviceError):
    """An image or an image folder cannot be used; the cause names it."""


class EngineError(DeviceError):
    """The engine cannot be built, cannot run, or gives values that are not finite."""


class TrialError(EngineError):
    """A package was tried and did not pass; `reason` is the name of the check (`contract.messages.Reason`)."""

    def __init__(self, cause: str, cure: str, reason: str = "engine") -> None:
        super().__init__(cause, cure)
        self.args = (cause, cure, reason)
        self.reason = reason


class ProtocolError(CutlayerError):
    """The conversation with the peer went wrong."""

    exit_code = 6


class LocalProtocolError(ProtocolError):
    """This side broke the rules of the protocol: a bug of ours, nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules of the protocol: the connection must be closed."""


class AuthError(ProtocolError):
    """The peer could not prove who it is."""


class RefusedError(ProtocolError):
    """The peer refused; `retry_after_s` None means that asking again is of no use."""

    def __init__(self, cause: str, cure: str, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(cause, cure)
        self.args = (cause, cure, code, retry_after_s)
        self.code = code
        self.retry_after_s = retry_after_s


class TrainingError(CutlayerError):
    """Training cannot go on."""

    exit_code = 7


class UnreachableError(CutlayerError):
    """The peer does not answer."""

    exit_code = 8


def why(error: BaseException, path: object = None) -> str:
    """What a foreign exception says, for the end of a cause: one line, without the number of an error, and without a
    file's name where that is `path`, which the cause has named."""
    if isinstance(error, OSError) and error.strerror:
        other = error.filename is not None and str(error.filename) != str(path)
        return f"{error.strerror} ({error.filename})" if other else error.strerror
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def suggest(name: str, known: Iterable[str]) -> str:
    """Text for the end of a cause: the known name nearest to a mistyped one, or all of them, or ''.

    Of more names than a person reads, the nearest few.
    """
    names = sorted(known)
    folded = {each.casefold(): each for each in names}
    nearest = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    if nearest:
        return f" (did you mean {folded[nearest[0]]!r}?)"
    if len(names) > SUGGESTED_MOST:
        few = difflib.get_close_matches(name.casefold(), folded, n=SUGGESTED_FEW, cutoff=0.0)
        return f" (the nearest of {len(names)}: {', '.join(folded[each] for each in few)})"
    return f" (known: {', '.join(names)})" if names else ""
