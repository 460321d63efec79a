"""The page as a file: whole, and safe whatever the text in it. What it looks like is tested in a browser."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.analysis.report.page import embedded, page, write_file
from fedsieve.errors import InputError

HOSTILE = "</script><script>alert(1)</script><!-- {{data}} & \"quoted\" 'too' \u2028 ü"


class Elements(HTMLParser):
    """The names of elements, and the text of the element with id `data`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.data, self.title, self._in = "", "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.names.append(tag)
        self._in = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        self.data += data if self._in == "data" else ""
        self.title += data if self._in == "title" else ""


def test_hostile_text_stays_text() -> None:
    found = Elements(page(HOSTILE, "report", {"name": HOSTILE}))
    assert found.title == HOSTILE and json.loads(found.data) == {"name": HOSTILE}
    assert found.names.count("script") == 2  # the data and the program


@given(st.text())
def test_any_text_can_be_embedded(text: str) -> None:
    written = embedded({"text": text})
    assert "<" not in written and json.loads(written) == {"text": text}


@pytest.mark.parametrize("kind", ["report", "explore"])
def test_nothing_in_a_page_points_elsewhere(kind: str) -> None:
    text = page("t", kind, {})
    links = re.findall(r"""(?:src|href)=["']?([^"'\s>]+)""", text) + re.findall(r"url\(([^)]*)\)", text)
    assert all(link.startswith(("data:", "#", "${")) or link in ("`#$", "#${clip") for link in links), links
    addresses = set(re.findall(r"https?://[\w./]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "{{" not in text


def test_where_a_page_cannot_be_written_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_file(tmp_path / "file" / "report.html", "text")


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "real/page.html")
    for text in ("first", "second"):  # to where nothing is yet, and to a file
        write_file(tmp_path / "link.html", text)
        assert (tmp_path / "link.html").is_symlink() and (tmp_path / "real/page.html").read_text() == text
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", "text")
    assert os.read(reader, 100) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "pipe", "real"]
