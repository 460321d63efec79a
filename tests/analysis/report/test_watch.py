"""The page served while runs go on."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from fedsieve.analysis.collection import read_run
from fedsieve.analysis.report.watch import Server, Watch
from fedsieve.config.experiment_file import load_experiment


def begun(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(load_experiment("digits-iid", []).resolved().to_yaml())
    return folder


def add_round(folder: Path, place: int) -> None:
    line = {"phase": "head", "round": place, "val_accuracy": place / 100, "val_loss": 1.0, "train_loss": 1.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line | {"bytes_up": 1, "bytes_down": 1, "seconds": 0.1, "drift_mean": 0.0}) + "\n")


def asked(address: str) -> Any:
    with urlopen(address) as answer:
        return json.loads(answer.read())


def test_new_runs_and_new_rounds_are_in_the_data(served: Callable, tmp_path: Path) -> None:
    with served(tmp_path / "runs") as address:
        assert asked(address + "data.json")["groups"] == []  # nothing there yet, and nothing wrong
        folder = begun(tmp_path / "runs/a")
        assert asked(address + "data.json")["groups"][0]["state"].startswith("unfinished: round 0 of")
        add_round(folder, 1), add_round(folder, 2)
        (group,) = asked(address + "data.json")["groups"]
        assert group["curves"]["val_accuracy"]["y"] == [0.01, 0.02]
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"phase": "he')  # a round that is being written
        assert asked(address + "data.json")["groups"][0]["state"].startswith("unfinished: round 2 of")
        (begun(tmp_path / "runs/b") / "metrics.jsonl").write_text("null\n")
        data = asked(address + "data.json")
        assert [group["name"] for group in data["groups"]] == ["a"] and "runs/b/metrics.jsonl" in data["warnings"][0]


def test_what_is_not_there_is_not_served(served: Callable, tmp_path: Path) -> None:
    begun(tmp_path / "a")
    with served(tmp_path) as address:
        for place in ("a/experiment.yaml", "../etc/passwd", "favicon.ico"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(address + place)


def test_only_runs_that_changed_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(
        "fedsieve.analysis.report.watch.read_run", lambda path: read.append(path.name) or read_run(path)
    )
    folder, other, watch = begun(tmp_path / "a"), begun(tmp_path / "b"), Watch(tmp_path)
    first = watch.data()
    assert watch.data() is first and read == ["a", "b"]
    add_round(folder, 1)
    assert watch.data() is not first and read == ["a", "b", "a"]
    (other / "experiment.yaml").unlink()
    assert [group["name"] for group in watch.data()["groups"]] == ["a"] and read == ["a", "b", "a"]


def test_a_port_in_use_is_said_in_one_line(fedsieve: Callable, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, _, error = fedsieve("watch", str(tmp_path), "--port", str(port))
    assert code == 2 and f"--port {port}" in error and error.count("\n") == 1


@pytest.mark.parametrize("host", ["", " "])
def test_no_host_is_not_every_host(
    host: str, fedsieve: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "serve_forever", lambda *_: None)
    code, said, error = fedsieve("watch", str(tmp_path), "--port", "0", "--host", host)
    assert (code, said, error) == (
        2,
        "",
        "error: --host is empty; give 127.0.0.1, or 0.0.0.0 for everybody on the network\n",
    )


@pytest.mark.parametrize("host", ["203.0.113.7", "a..b", "::1"])
def test_a_host_that_cannot_be_had_is_named(host: str, fedsieve: Callable, tmp_path: Path) -> None:
    code, _, error = fedsieve("watch", str(tmp_path), "--port", "0", "--host", host)
    assert code == 2 and f"--host {host} cannot be had (" in error and "Unknown" not in error and "--port" not in error


@pytest.mark.parametrize(
    ("host", "code"), [("127.0.0.1", 200), ("localhost:8000", 200), ("[::1]:80", 200), ("evil.org", 403), ("[", 403)]
)
def test_other_names_of_this_machine_are_not_answered_to(
    host: str, code: int, served: Callable, tmp_path: Path
) -> None:
    """Else any site could read the page in a visitor's browser, by letting its own name point to 127.0.0.1."""
    begun(tmp_path / "a")
    with served(tmp_path) as address:
        connection = HTTPConnection(address.split("/")[2])
        connection.request("GET", "/data.json", headers={"Host": host})
        assert connection.getresponse().status == code
        connection.close()


def test_a_browser_that_goes_away_is_no_news(
    served: Callable, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Event()
    whole = Server.handle_error
    monkeypatch.setattr(Server, "handle_error", lambda *arguments: (whole(*arguments), gone.set()))
    with served(tmp_path) as address:
        name, _, port = address.split("/")[2].partition(":")
        with socket.create_connection((name, int(port))) as browser:
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing is a reset
            browser.sendall(b"GET / HT")
        assert gone.wait(60) and capfd.readouterr().err == ""


def test_a_file_is_no_folder_to_watch(fedsieve: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, error = fedsieve("watch", str(tmp_path / "file"), "--port", "0")
    assert code == 2 and "is a file" in error


def test_the_command_tells_its_address_and_control_c_ends_it_quietly(tmp_path: Path) -> None:
    begun(tmp_path / "a")
    command = [sys.executable, "-m", "fedsieve", "watch", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().split(" at ")[1].split()[0]
    assert asked(address + "data.json")["groups"][0]["name"] == "a"
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and error == ""
