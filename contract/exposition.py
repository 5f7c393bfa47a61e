"""Figures as Prometheus reads them, and the few words of HTTP that hand them out; no sockets.

Which figures there are, and listening, is left to each side. Text format 0.0.4; an unknown figure has no line, as it is
not 0. Names carry their unit: `_seconds`, `_bytes`, `_joules`, and `_total` where they only rise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

REQUEST_BYTES = 8192  # of a request's head; the rest of it is not looked at
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Sample:
    """One value; None is unknown and left out."""

    value: float | int | bool | None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """All values under one name."""

    name: str
    help: str
    kind: Literal["gauge", "counter"]
    samples: tuple[Sample, ...]


def single(name: str, help_text: str, kind: Literal["gauge", "counter"], value: float | int | bool | None) -> Family:
    """A family of one value without labels."""
    return Family(name, help_text, kind, (Sample(value),))


def to_text(families: Iterable[Family]) -> str:
    """What /metrics answers."""
    lines: list[str] = []
    for family in families:
        known = [sample for sample in family.samples if sample.value is not None]
        if known:
            lines += [f"# HELP {family.name} {_escape(family.help)}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{_labels(sample.labels)} {_number(sample.value)}" for sample in known]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value, quotes=True)}"' for name, value in labels.items()) + "}"


def _escape(text: str, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float | int | bool | None) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if isinstance(value, float) else str(int(value or 0))


Pages = Mapping[str, Callable[[], "tuple[str, str]"]]  # path -> (content type, text), made when it is asked for


def answer(head: bytes, pages: Pages) -> bytes:
    """The whole HTTP response to a request that begins with `head`; the connection is closed after it."""
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return _response("400 Bad Request", "text/plain", "expected a request of HTTP/1.1\n")
    method, path = words[0], words[1].split("?", 1)[0]
    if method not in ("GET", "HEAD"):
        return _response("405 Method Not Allowed", "text/plain", "only GET\n")
    page = pages.get(path)
    if page is None:
        return _response("404 Not Found", "text/plain", f"there are {', '.join(sorted(pages))}\n")
    content_type, text = page()
    return _response("200 OK", content_type, text, with_body=method == "GET")


def _response(status: str, content_type: str, text: str, with_body: bool = True) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
        "Content-Security-Policy: default-src 'self' 'unsafe-inline'; frame-ancestors 'none'\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")
