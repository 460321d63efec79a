"""A run of fedsieve in a process of its own, and the memory that it takes meanwhile (Linux)."""

import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEGABYTE = 1e6


def in_a_process(
    settings: dict[str, Any], folder: Path, overrides: str, look_every: float | None = None, **options: int
) -> dict[str, Any]:
    """What the contender `fedsieve` says of a run, and under "memory" the most megabytes of each kind (`held`).

    They are looked at every so many seconds, which takes time of its own; without, nobody looks.
    """
    work = folder / "work"
    work.with_suffix(".json").write_text(json.dumps(settings))
    given = {"cache": folder / "cache", "overrides": overrides, **options}
    arguments = ["fedsieve", work, folder / "weights", *(f"{key}={value}" for key, value in given.items())]
    process = subprocess.Popen([sys.executable, HERE / "contenders.py", *arguments], stdout=subprocess.PIPE, text=True)
    highest: Counter[str] = Counter()
    while look_every is not None and process.poll() is None:
        highest |= held(process.pid)
        time.sleep(look_every)
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"fedsieve failed with {settings}")
    return {**json.loads(said.splitlines()[-1]), "memory": {kind: one / MEGABYTE for kind, one in highest.items()}}


def held(process: int) -> Counter[str]:
    """Bytes of a process and all below it, where what several share is counted in shares.

    "driver" is the first of them, "all" are all of them, "shared" is their shared memory (messages to workers, or Ray's
    object store), and "private" is what is neither shared nor a file's.
    """
    found: Counter[str] = Counter()
    for number, one in enumerate(with_children(process)):
        pages = pages_of(one)
        if not number:
            found["driver"] = pages["Pss"]
        found += Counter({"all": pages["Pss"], "shared": pages["Pss_Shmem"], "private": pages["Pss_Anon"]})
    return found


def with_children(process: int) -> list[int]:
    found = [process]
    for one in found:  # grows while it is gone through
        for children in Path(f"/proc/{one}/task").glob("*/children"):  # any thread may have started a process
            with suppress(OSError):  # it has ended
                found += [int(child) for child in children.read_text().split()]
    return found


def pages_of(process: int) -> Counter[str]:
    """Bytes of a process by kind: the lines of /proc/PID/smaps_rollup."""
    try:
        lines = [line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]]
    except OSError:
        return Counter()
    return Counter({line[0].removesuffix(":"): 1024 * int(line[1]) for line in lines})
