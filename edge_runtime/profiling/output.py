"""What edge-profile gives: the answer on stdout, the document in its file, a table drawn.

What a document says is decided in `table` and `cap`, what a page or a picture shows in `page` and `plot`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path

from contract.console import print_document, say
from contract.errors import DeviceError, UsageError
from edge_runtime.profiling.page import to_html
from edge_runtime.profiling.plot import SUFFIXES, to_picture
from edge_runtime.profiling.table import KIND, Table, to_document
from edge_runtime.state import write_output


def keep(table: Table, output: Path | None) -> None:
    """A table that is not whole yet, into its file; where that fails, what was measured is printed at the end."""
    if output is None or (output.exists() and not output.is_file()):
        return
    try:
        write_output(output, as_json(KIND, to_document(table)))
    except DeviceError as error:
        say(f"warning: {error.cause}; {error.cure}")


def as_json(kind: str, fields: Mapping[str, object]) -> bytes:
    """The one document, as bytes."""
    text = io.StringIO()
    with redirect_stdout(text):
        print_document(kind, fields)
    return text.getvalue().encode()


def publish(output: Path | None, is_json: bool, kind: str, fields: Mapping[str, object], text: str) -> None:
    """The answer on stdout, and the document into its file, in this order: a full disk leaves the answer."""
    if is_json:
        print_document(kind, fields)
    else:
        print(text, end="", flush=True)
    if output is not None:
        write_output(output, as_json(kind, fields))


def draw(table: Table, output: Path | None) -> None:
    """A page of HTML or a picture, as the output's name says. Raises: UsageError."""
    form = "" if output is None else output.suffix.removeprefix(".").lower()
    if output is None or form not in ("html", *SUFFIXES):
        raise UsageError(
            "--plot needs a file to draw into, and -o is not given" if output is None else
            f"-o should name a file in .html, {', '.join('.' + each for each in SUFFIXES)} to draw into, "
            f"found {output.name!r}",
            "give -o plot.html or -o plot.png",
        )  # fmt: skip
    if not table.rows:
        raise UsageError("there is nothing to draw: no split point was measured", "measure again with -o")
    data = to_html(table).encode() if form == "html" else to_picture(table, form)
    write_output(output, data)
