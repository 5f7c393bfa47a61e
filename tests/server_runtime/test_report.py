"""The page and the terminal table of results."""

from __future__ import annotations

from html.parser import HTMLParser

from server_runtime.report import Picture, Results, Table, to_html, to_text

TABLE = Table(
    "Accuracy", ("method", "accuracy", "bytes"), (("ours <b>", 0.5, 1138), ("theirs", None, None)), ("accuracy",)
)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attributes if name in {"src", "href"}]


def test_the_page_is_whole_escaped_and_loads_nothing() -> None:
    tags = Tags()
    tags.feed(page := to_html(Results("A & B", (("model", "<script>"),), (TABLE,), ("note",))))
    assert tags.links == []
    assert "script" not in tags.seen and "b" not in tags.seen
    assert tags.seen.count("td") == 6
    assert "A &amp; B" in page and "width:50.0%" in page


def test_pictures_are_in_the_page_itself() -> None:
    tags = Tags()
    pictures = (Picture('a "<b>" picture', b"\x89PNG", ("one < two",)),)
    tags.feed(page := to_html(Results("A", (), (), pictures=pictures)))
    assert tags.links == ["data:image/png;base64,iVBORw=="] and "b" not in tags.seen
    assert "one &lt; two" in page


def test_unknown_is_not_zero() -> None:
    assert "unknown" in to_text(TABLE)
    assert " 0" not in to_text(TABLE)


def test_columns_line_up() -> None:
    _, *lines = to_text(TABLE).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "1,138" in lines[1] and "50.0 %" in lines[1]
