"""What every command says alike: errors, progress, the JSON document and the exit code.

What there is to say, and when to stop on a signal, is left to the commands.

stdout carries the result alone; everything said to a person goes to stderr. Exit codes: 0 done, 1 internal error, 2 to
9 see `contract.errors`, 130 interrupted (Ctrl-C), 141 the reader of stdout went away.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, TextIO, TypeVar

from contract.errors import CutlayerError, UsageError, suggest
from contract.extras import lacks

DEBUG = "CUTLAYER_DEBUG"
LOG = "CUTLAYER_LOG"  # "json": every line on stderr is one JSON object
LINE_INTERVAL_S = 10.0
_DISK_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
WORD_LETTERS_MOST = 400  # of a wrong value, as it is shown; a path may be long

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def run_command(main: Callable[[], int]) -> int:
    """Run a command and turn whatever it raises into words on stderr and an exit code.

    With CUTLAYER_DEBUG=1 the traceback comes first. SystemExit (from --help) passes.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the command
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the program runs
    try:
        return _answer(main)
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)


def run_module(name: str) -> int:
    """Load a command's module and run its `main`: a stop while Python still imports is as quiet as a later one."""
    return run_command(lambda: int(importlib.import_module(name).main()))


def _answer(main: Callable[[], int]) -> int:
    try:
        code = main()
        sys.stdout.flush()
        return code
    except CutlayerError as error:
        _complain(f"error: {error.cause}", error.cure)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard(sys.stdout)
        return 141
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (lacking := lacks(error.name or "")) is not None:
            _complain(f"error: {lacking.cause}", lacking.cure)
            return lacking.exit_code
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            _complain(f"error: the name {error.filename} is too long for a file", "correct the path")
            return UsageError.exit_code
        if isinstance(error, OSError) and error.errno in _DISK_REFUSES:
            elsewhere = "" if error.filename else ", or send what the command prints somewhere else"
            _complain(
                f"error: {error.filename or 'stdout'} cannot be written: {error.strerror}",
                f"make room on the disk{elsewhere}",
            )
            if not error.filename or _is_refused(sys.stdout):  # else what was printed before still gets out
                _discard(sys.stdout)
            return UsageError.exit_code
        _complain(
            f"internal error: {type(error).__name__}: {error}", f"run again with {DEBUG}=1 and report the traceback"
        )
        return 1


def _complain(cause: str, cure: str) -> None:
    if os.environ.get(DEBUG) == "1":
        with contextlib.suppress(OSError):  # the disk that stderr goes to may be full
            traceback.print_exc()
    text = f"{cause}\n  cure: {cure}"
    say(re.sub(rf"\S{{{WORD_LETTERS_MOST},}}", lambda word: f"{word[0][:60]}...", text), level="error")


def _is_refused(stream: TextIO) -> bool:
    """Whether what is left to be written cannot be: a write that failed leaves it there."""
    try:
        stream.flush()
    except OSError:
        return True
    return False


def _discard(stream: TextIO) -> None:
    """Let the interpreter's last flush succeed, which would else print an error of its own, or exit with 120."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:  # no file below a replaced stdout
        os.dup2(nowhere.fileno(), stream.fileno())


class ArgumentParser(argparse.ArgumentParser):
    """argparse that raises `UsageError`, names near misses, and takes no abbreviated flags (a new flag breaks them)."""

    def __init__(self, prog: str | None = None, description: str | None = None, epilog: str | None = None) -> None:
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see {self.prog} --help")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type is Path and not arg_string:  # as a path it would be the folder that the command runs in
            raise argparse.ArgumentError(action, "should be a path, found ''")
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:  # in argparse's words it is an "invalid int value"
            kind = {int: "a whole number", float: "a number"}.get(action.type)  # type: ignore[call-overload]
            if kind is None:
                raise
            raise argparse.ArgumentError(action, f"should be {kind}, found {arg_string!r}") from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"unknown {value!r}{suggest(str(value), map(str, action.choices))}")


def print_document(kind: str, data: Mapping[str, object]) -> None:
    """Print the one JSON document of `--format json` on stdout: {"schema_version": 1, "kind": kind, ...data}.

    Raises:
        ValueError: a number is NaN or infinite; an unknown figure is None.
    """
    document = {"schema_version": 1, "kind": kind, **data}
    print(json.dumps(document, allow_nan=False, indent=2))


def say(text: str, level: str = "info") -> None:
    """Print a line for a person on stderr, above any progress bar; with CUTLAYER_LOG=json it is a JSON object.

    Where it cannot be written, the work goes on. A moment is told by the clock that runs since the machine was started,
    as the other may be set, or never was.
    """
    with contextlib.suppress(OSError):
        if os.environ.get(LOG) != "json":
            if "tqdm" in sys.modules:  # then a bar may stand on the terminal
                from tqdm import tqdm

                tqdm.write(text, file=sys.stderr)
            else:
                sys.stderr.write(f"{text}\n")
            return
        level = "warning" if text.startswith("warning: ") else level
        line = {"level": level, "message": text, "monotonic_s": round(time.monotonic(), 3), "pid": os.getpid()}
        print(json.dumps(line, ensure_ascii=False), file=sys.stderr, flush=True)


class Progress(Protocol[T_co]):
    """A bar or lines: iterate it, or enter it and call `update(n)`."""

    def __iter__(self) -> Iterator[T_co]: ...
    def __enter__(self) -> Progress[T_co]: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, n: int = 1) -> object: ...


def progress(iterable: Iterable[T] | None = None, *, total: int | None, description: str, unit: str) -> Progress[T]:
    """A bar where stderr is a terminal; elsewhere a plain line every 10 s and one at the end.

    Args:
        iterable: what to iterate; None to enter the result and call `update`.
        total: how many units there are; None when unknown.
        unit: plural, as in "images".
    """
    if sys.stderr.isatty():
        from tqdm import tqdm  # only now: most devices have no terminal

        bar: Progress[T] = tqdm(iterable, total=total, desc=description, unit=f" {unit}", file=sys.stderr)
        return bar
    return LineProgress(iterable, total, description, unit)


class LineProgress(Iterable[T]):
    """Progress in plain lines, for logs; the same interface as a tqdm bar as far as `Progress` goes."""

    def __init__(
        self,
        iterable: Iterable[T] | None,
        total: int | None,
        description: str,
        unit: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        out: TextIO | None = None,
    ) -> None:
        self._iterable = iterable
        self._of_total = f"/{total}" if total is not None else ""
        self._description = description
        self._unit = unit
        self._clock = clock
        self._out = out
        self._done = 0
        self._started_s = self._said_s = clock()

    def __iter__(self) -> Iterator[T]:
        if self._iterable is None:
            raise TypeError("progress without an iterable cannot be iterated: enter it and call update")
        with self:
            for each in self._iterable:
                yield each
                self.update()

    def __enter__(self) -> LineProgress[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._say()

    def update(self, n: int = 1) -> None:
        self._done += n
        if self._clock() - self._said_s >= LINE_INTERVAL_S:
            self._say()

    def _say(self) -> None:
        self._said_s = self._clock()
        elapsed_s = self._said_s - self._started_s
        rate = f", {self._done / elapsed_s:.1f} {self._unit}/s" if elapsed_s > 0 else ""
        line = f"{self._description}: {self._done}{self._of_total} {self._unit}, {elapsed_s:.0f} s{rate}"
        if self._out is None:
            say(line)
            return
        with contextlib.suppress(OSError):  # as `say`
            print(line, file=self._out, flush=True)
