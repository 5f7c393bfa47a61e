"""Figures in Prometheus's text, and the least of HTTP."""

from __future__ import annotations

import pytest

from contract.exposition import Family, Sample, answer, single, to_text


def test_text_has_help_type_and_a_line_for_each_known_value() -> None:
    text = to_text(
        [
            single("up_seconds", "Since\nthe start.", "gauge", 1.5),
            single("energy_joules", "Of the run.", "counter", None),  # unknown is not 0
            Family("here", "Here.", "gauge", (Sample(True, {"device": 'a"b\\c'}), Sample(None, {"device": "d"}))),
        ]
    )
    assert text.splitlines() == [
        r"# HELP up_seconds Since\nthe start.",
        "# TYPE up_seconds gauge",
        "up_seconds 1.5",
        "# HELP here Here.",
        "# TYPE here gauge",
        'here{device="a\\"b\\\\c"} 1',
    ]


@pytest.mark.parametrize(
    ("head", "status", "body"),
    [
        (b"GET /metrics?x=1 HTTP/1.1\r\nHost: h", "200 OK", "figures"),
        (b"HEAD /metrics HTTP/1.0", "200 OK", ""),
        (b"POST /metrics HTTP/1.1", "405 Method Not Allowed", "only GET\n"),
        (b"GET /../etc/passwd HTTP/1.1", "404 Not Found", "there are /metrics\n"),
        (b"\x16\x03\x01 not http", "400 Bad Request", "expected a request of HTTP/1.1\n"),
        (b"", "400 Bad Request", "expected a request of HTTP/1.1\n"),
    ],
)
def test_requests_and_their_answers(head: bytes, status: str, body: str) -> None:
    response = answer(head, {"/metrics": lambda: ("text/plain", "figures")}).decode()
    first, _, rest = response.partition("\r\n")
    assert first == f"HTTP/1.1 {status}"
    assert rest.partition("\r\n\r\n")[2] == body
    assert "Connection: close" in rest
