"""Where each setting of a command comes from: flag, then environment, then file, then default.

What the settings mean, and whether they fit together, is left to the commands.

`cutlayer.toml` has one section per command. The environment variable of `[device] server` is CUTLAYER_DEVICE_SERVER; an
empty one counts as not set. Paths in a file are relative to the file, others to the working directory.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from contract.errors import ConfigError, suggest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECTIONS = ("export", "device", "server")
FILE_BYTES_MAX = 1 << 20

_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_KINDS: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    Path: "a path",
    tuple: "a list of strings",
    dict: "a table",
}


class _Required:
    """The type of REQUIRED."""


REQUIRED: Final = _Required()


@dataclass(frozen=True)
class Field:
    """One setting: its key in the section, type, default or REQUIRED, help text, and whether it must not be shown.

    `type` is str, int, float, bool, Path, tuple (strings) or dict (a table). A default of None means "not set". `reads`
    is "file" or "folder" where it names one that has to be there already.
    """

    name: str
    type: type
    default: object
    help: str
    secret: bool = False
    reads: str = ""

    @property
    def described(self) -> str:
        """Its help with its default, where it has one, for --help."""
        default = ",".join(self.default) if isinstance(self.default, tuple) else self.default
        if default is None or default is REQUIRED or self.type is bool or default in ("", {}):
            return self.help
        return f"{self.help} (default: {default})"


@dataclass(frozen=True)
class Resolved:
    """The settings of one section, each with the place it came from."""

    section: str
    values: dict[str, Any]
    origin: dict[str, str]
    secret: frozenset[str]
    missing: frozenset[str] = frozenset()  # what must be set and is not, where this was asked to pass

    def show(self) -> str:
        """The text of --show-config: TOML, with the origin of each value as a comment."""
        lines = [f"[{self.section}]"]
        for name, value in self.values.items():
            if name in self.missing:
                lines.append(f"# {name} is not set, and must be")
            elif value is None:
                lines.append(f"# {name} is not set")
            else:
                text = '"(hidden)"' if name in self.secret else _toml(value)
                lines.append(f"{name} = {text}  # {self.origin[name]}")
        return "\n".join(lines)


def find_file(given: Path | None, directory: Path, names: Sequence[str] = ("cutlayer.toml",)) -> Path | None:
    """The configuration file: the one given, else the first of `names` in the directory, else None.

    Raises:
        ConfigError: the file given does not exist.
    """
    if given is not None:
        if given.is_dir():
            known = next((given / name for name in names if (given / name).is_file()), given / names[0])
            raise ConfigError(f"--config should name a file, {given} is a folder", f"give a file, such as {known}")
        if not given.is_file():
            raise ConfigError(f"there is no configuration file {given}", "check the path after --config")
        return given
    return next((directory / name for name in names if (directory / name).is_file()), None)


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file of at most 1 MiB.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} must have at most {FILE_BYTES_MAX} bytes", "give a configuration file")
    try:
        document: dict[str, Any] = tomllib.loads(data.decode("utf-8-sig"))  # some editors put a mark in front
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, an integer too long to read, too deep a list
        raise ConfigError(f"{path} is not valid TOML: {error}", "correct the file") from error
    return document


def resolve(
    section: str,
    fields: Sequence[Field],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None,
    partial: bool = False,
) -> Resolved:
    """Settle every field of a section: flag over environment over file over default.

    Args:
        flags: values by field name, None where the flag was not given; texts are converted to the field's type.
        environ: the whole environment; only CUTLAYER_<SECTION>_* is looked at.
        file: a TOML file, or None.
        partial: required values that are missing are `missing`, and None; to be shown, not used.

    Raises:
        ConfigError: a required value is missing, a value has the wrong type, or a key of the file or the environment
            is not a field.
    """
    names = [field.name for field in fields]
    table = _section_table(section, names, file)
    variables = _variables(section, names, environ)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for field in fields:
        asked = replace(field, default=None) if partial and field.default is REQUIRED else field
        values[field.name], origin[field.name] = _settle(section, asked, flags, variables, table, file)
    missing = frozenset(field.name for field in fields if field.default is REQUIRED and values[field.name] is None)
    return Resolved(section, values, origin, frozenset(field.name for field in fields if field.secret), missing)


def check_inputs(fields: Sequence[Field], resolved: Resolved, names: Collection[str] | None = None) -> None:
    """Whether files and folders are there that settings name (all, or those of `names`): told before anything is done.

    Raises:
        ConfigError: one is not there, or is of the other kind, or may not be read.
    """
    for field in fields:
        path = resolved.values[field.name]
        if not field.reads or path is None or (names is not None and field.name not in names):
            continue
        if not os.path.exists(path):
            fault = f"there is no {field.reads} {path}"
        elif os.path.isdir(path) != (field.reads == "folder"):
            fault = f"{path} is a {'file' if field.reads == 'folder' else 'folder'}, expected a {field.reads}"
        elif not os.access(path, os.R_OK):
            fault = f"the {field.reads} {path} may not be read by this user"
        else:
            continue
        raise ConfigError(f"{fault} ({field.name})", f"correct {resolved.origin[field.name]}")


def _settle(
    section: str,
    field: Field,
    flags: Mapping[str, Any],
    variables: Mapping[str, str],
    table: Mapping[str, Any],
    file: Path | None,
) -> tuple[Any, str]:
    """The value of one field and where it came from."""
    flag, variable, key = _flag(field.name), _variable(section, field.name), f"[{section}] {field.name}"
    if flags.get(field.name) is not None:
        return _convert(flags[field.name], field, flag, Path(), from_text=True), flag
    if field.name in variables:
        return _convert(variables[field.name], field, variable, Path(), from_text=True), variable
    if file is not None and field.name in table:
        return _convert(table[field.name], field, f"{key} in {file}", file.parent, from_text=False), f"{key} in {file}"
    if field.default is REQUIRED:
        raise ConfigError(
            f"{field.name} is not set ({field.help})",
            f"give {flag}, set {variable}, or put {field.name} under [{section}] in {file or 'cutlayer.toml'}",
        )
    return field.default, "default"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(section: str, name: str) -> str:
    return f"CUTLAYER_{section}_{name}".upper()


def _section_table(section: str, names: list[str], file: Path | None) -> dict[str, Any]:
    """The section of the file, every key of which is a field."""
    if file is None:
        return {}
    document = load_toml(file)
    for found in document:
        if found not in SECTIONS:
            raise ConfigError(
                f"{file} has an unknown section or a key outside of sections: {found}{suggest(found, SECTIONS)}",
                "correct or remove it",
            )
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} in {file} must be a section, found {_found(table)}", f"write [{section}]")
    for key in table:
        if key not in names:
            raise ConfigError(f"[{section}] in {file} has an unknown key {key}{suggest(key, names)}", "correct it")
    return table


def _variables(section: str, names: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Values of the section's environment variables by field name; a misspelt one must not pass unnoticed."""
    known = {_variable(section, name): name for name in names}
    found = {}
    for variable, text in environ.items():
        if variable.startswith(_variable(section, "")):
            if variable not in known:
                raise ConfigError(f"unknown environment variable {variable}{suggest(variable, known)}", "unset it")
            if text:
                found[known[variable]] = text
    return found


def _convert(value: object, field: Field, where: str, directory: Path, *, from_text: bool) -> Any:
    """The value as the field's type; texts of flags and variables are read first."""
    if from_text and isinstance(value, str) and field.type not in (str, Path):
        value = _parse(value, field, where)
    if field.type is Path and isinstance(value, str | Path) and str(value):
        return directory / value
    if field.type is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _mistyped(value, field, where) from None
    if field.type is tuple and isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(value)
    if isinstance(value, float) and not math.isfinite(value):  # NaN would slip through every later comparison
        raise _mistyped(value, field, where)
    if type(value) is field.type and value != "" and field.type is not tuple:
        return value
    raise _mistyped(value, field, where)


def _parse(text: str, field: Field, where: str) -> object:
    if field.type is bool:
        if text.casefold() not in _BOOLS:
            raise _mistyped(text, field, where)
        return _BOOLS[text.casefold()]
    if field.type is tuple:
        return [each.strip() for each in text.split(",")]
    try:
        if field.type is dict:
            return tomllib.loads(f"value = {text}")["value"]  # { key = value }, as in the file
        return field.type(text)
    except ValueError:  # tomllib.TOMLDecodeError is one
        raise _mistyped(text, field, where) from None


def _mistyped(value: object, field: Field, where: str) -> ConfigError:
    found = "another value" if field.secret else _found(value)
    return ConfigError(f"{where} must be {_KINDS[field.type]}, found {found}", f"correct it ({field.help})")


def _found(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # as a number it is of the right kind
    kind = _KINDS.get(type(value), type(value).__name__)
    return f"{value!r}" if isinstance(value, str) else f"{value!r}, {kind}"


def _toml(value: object) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    escaped = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in str(value).replace("\\", "\\\\"))
    return '"' + escaped.replace('"', '\\"') + '"'
