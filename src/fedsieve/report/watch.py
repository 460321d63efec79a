"""The page about runs, served while they go on: the browser asks for the data every few seconds and draws it anew."""

import json
import os
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from fedsieve.errors import InputError
from fedsieve.report.overview import overview
from fedsieve.report.page import page
from fedsieve.runs.collection import find_runs

EVERY = 2000  # milliseconds between two questions of the browser
FILES = ("experiment.yaml", "metrics.jsonl", "result.json", "split.json")  # that the page depends on


class Watch:
    """What the page shows of the runs below a folder; read again only when their files have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()  # two browsers may ask at the same time
        self._seen: Any = None
        self._data: dict[str, Any] = {}

    def data(self) -> dict[str, Any]:
        with self._lock:
            seen = self._files()
            if seen != self._seen or not self._data:
                runs, problems = find_runs([self.folder])
                title = f"{self.folder.resolve().name}: runs under way"
                self._data = {**overview(runs, problems if seen else [], title), "live": EVERY}
                self._seen = seen
            return self._data

    def _files(self) -> list[tuple[str, int, int]]:
        found = []
        for experiment in sorted(self.folder.rglob("experiment.yaml")):
            for path in (experiment.with_name(name) for name in FILES):
                try:
                    about = path.stat()
                except OSError:  # not there, or not any more
                    continue
                found.append((str(path), about.st_size, about.st_mtime_ns))
        return found


class Handler(BaseHTTPRequestHandler):
    """The page at /, its data at /data.json, and nothing else."""

    def __init__(self, watch: Watch, *arguments: Any) -> None:
        self.watch = watch
        super().__init__(*arguments)

    def do_GET(self) -> None:
        place = self.path.partition("?")[0]
        if place not in ("/", "/data.json"):
            self.send_error(404)
            return
        data = self.watch.data()
        if place == "/":
            self._send(page(data["title"], "report", data), "text/html")
        else:
            self._send(json.dumps(data), "application/json")

    def _send(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None: ...


def serving(folder: Path, port: int, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    """A server of the page about the runs below `folder`, which listens and is yet to be told to serve."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder in which runs are or will be")
    try:
        return ThreadingHTTPServer((host, port), partial(Handler, Watch(folder)))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InputError(f"--port {port} cannot be had ({reason}); give another, or 0 for any free one") from None
