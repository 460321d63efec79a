"""The page about runs, served while they go on: the browser asks for the data every few seconds and draws it anew."""

import json
import sys
from contextlib import suppress
from errno import EADDRNOTAVAIL
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from socket import gaierror
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from fedsieve.analysis.collection import Run, find_runs, read_run, run_folders
from fedsieve.analysis.report.overview import overview
from fedsieve.analysis.report.page import page
from fedsieve.errors import InputError

EVERY = 2000  # milliseconds between two questions of the browser
FILES = ("experiment.yaml", "metrics.jsonl", "result.json", "split.json")  # that the page depends on


class Watch:
    """What the page shows of the runs below a folder; of these only those are read again whose files have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()  # two browsers may ask at the same time
        self._seen: dict[Path, Any] = {}
        self._runs: list[Run] = []
        self._data: dict[str, Any] = {}

    def data(self) -> dict[str, Any]:
        with self._lock:
            seen = self._files()
            if seen != self._seen or not self._data:
                same = {run.path: run for run in self._runs if seen.get(run.path) == self._seen.get(run.path)}
                self._runs, problems = find_runs([self.folder], lambda path: same.get(path) or read_run(path))
                title = f"{self.folder.resolve().name}: runs under way"
                self._data = {**overview(self._runs, problems if seen else [], title), "live": EVERY}
                self._seen = seen
            return self._data

    def _files(self) -> dict[Path, list[tuple[str, int, int]]]:
        """Of each run, the size and the time of its files."""
        found: dict[Path, list[tuple[str, int, int]]] = {}
        for run in run_folders(self.folder):
            about = found.setdefault(run, [])
            for name in FILES:
                with suppress(OSError):  # not there, or not any more
                    file = (run / name).stat()
                    about.append((name, file.st_size, file.st_mtime_ns))
        return found


class Handler(BaseHTTPRequestHandler):
    """The page at /, its data at /data.json, and nothing else."""

    server: ThreadingHTTPServer

    def __init__(self, watch: Watch, host: str, *arguments: Any) -> None:
        self.watch, self.host = watch, host
        super().__init__(*arguments)

    def do_GET(self) -> None:
        if not self._is_for_us():
            self.send_error(403, "Served to this machine only", "Ask for localhost, or start it with --host")
            return
        place = self.path.partition("?")[0]
        if place not in ("/", "/data.json"):
            self.send_error(404)
            return
        data = self.watch.data()
        if place == "/":
            self._send(page(data["title"], "report", data), "text/html")
        else:
            self._send(json.dumps(data), "application/json")

    def _is_for_us(self) -> bool:
        """Whoever serves to this machine alone must not answer to other names: any site can let its own point here."""
        meant = name_in(self.headers.get("Host", ""))
        return meant == self.host or is_this_machine(meant) or not is_this_machine(self.server.socket.getsockname()[0])

    def _send(self, text: str, kind: str) -> None:
        body = text.encode(errors="backslashreplace")  # of names that are not UTF-8
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None: ...


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a browser that goes away is no news
            super().handle_error(request, client_address)


def name_in(place: str) -> str:
    """The name, or the address, in `name:port`."""
    try:
        return urlsplit(f"//{place}").hostname or ""
    except ValueError:
        return ""


def is_this_machine(name: str) -> bool:
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def serving(folder: Path, port: int, host: str = "127.0.0.1") -> Server:
    """A server of the page about the runs below `folder`, which listens and is yet to be told to serve."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder in which runs are or will be")
    if not host.strip():  # to Python that would be every address of this machine
        raise InputError("--host is empty; give 127.0.0.1, or 0.0.0.0 for everybody on the network")
    try:
        return Server((host, port), partial(Handler, Watch(folder), host))
    except (OSError, UnicodeError) as error:  # the latter of what cannot be a host's name
        if not isinstance(error, OSError) or isinstance(error, gaierror) or error.errno == EADDRNOTAVAIL:
            what, instead = f"--host {host}", "127.0.0.1, or 0.0.0.0 for everybody on the network"
        else:
            what, instead = f"--port {port}", "another, or 0 for any free one"
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} cannot be had ({reason}); give {instead}") from None
