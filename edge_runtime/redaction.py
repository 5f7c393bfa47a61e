"""Texts that may be shown to a stranger: without names of files, folders, hosts, devices and classes. Pure.

It errs towards hiding: whatever is quoted, looks like a path, an address or a picture's name goes, and so does every
word that the caller knows to be private.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

HIDDEN = "<hidden>"
_PRIVATE = re.compile(
    r"""(?<=skipped ).*?(?=: )|'(?:\\.|[^'\\])*'|"[^"]*\""""
    r"""|wss?://\S+|\S*/\S*|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-fA-F:]+\](?::\d+)?"""
    r"""|\S+\.(?:png|jpe?g|bmp|gif|tiff?|webp|pem|key|pub|secret|toml|txt|local|lan|example|com|org|net|io)\b(?::\d+)?""",
    re.IGNORECASE,
)


def redact(text: str, private: Iterable[str]) -> str:
    """The text without what is private."""
    for word in sorted({word for word in private if word}, key=len, reverse=True):
        text = text.replace(word, HIDDEN)
    return _PRIVATE.sub(HIDDEN, text)


def redact_all(value: Any, private: Iterable[str]) -> Any:
    """The same for every text in lists and objects; numbers and names of fields stay."""
    words = tuple(private)
    if isinstance(value, str):
        return redact(value, words)
    if isinstance(value, dict):
        return {name: redact_all(each, words) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [redact_all(each, words) for each in value]
    return value
