"""One HTML file with everything in it: works from disk, asks nothing of any network.

The parts lie in web/: page.html is the frame, style.css the looks, some scripts draw, and those of each kind of page
say what. They are put together here, with the data as JSON between them.
"""

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedsieve.errors import InputError
from fedsieve.files.atomic import write_text

DRAWING = ("numbers.js", "elements.js", "overlaps.js", "lines.js", "bars.js", "maps.js")
PAGES = {"report": ("report_tables.js", "report_curves.js", "report_maps.js", "report.js"), "explore": ("explore.js",)}


def page(title: str, kind: str, data: dict[str, Any]) -> str:
    """The page, one of PAGES, that shows `data`."""
    parts = {
        "title": escape(title),
        "style": _web("style.css"),
        "data": embedded(data),
        "scripts": "\n".join(map(_web, DRAWING + PAGES[kind])),
    }
    before, *rest = _web("page.html").split("{{")  # not str.replace: what is filled in may hold braces itself
    return before + "".join(parts[name] + after for name, after in (part.split("}}", 1) for part in rest))


def embedded(data: dict[str, Any]) -> str:
    """JSON that a script element can hold, whatever the text in it: without `<`, nothing in it ends or opens one."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def write_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); give another file name") from None


def _web(name: str) -> str:
    return (files("fedsieve.analysis.report") / "web" / name).read_text(encoding="utf-8")
