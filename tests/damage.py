"""Damage to files, as disks, editors and careless copies do it: bytes, headers of safetensors, lines and keys.

    for damage in damages(path, random.Random(7)):
        damage.apply()

Each kind that a file can suffer comes once, in an order of chance. The content of a damaged file differs from before.
"""

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEEP = 100_000  # brackets, far more than Python's parsers can follow
TYPES = {1: ("U8", "I8", "BOOL"), 2: ("F16", "BF16", "I16"), 4: ("F32", "I32"), 8: ("F64", "I64")}
OTHERS: tuple[Any, ...] = (None, -1, 10**400, "x", [], {}, [[]], True, 1.5)  # what does not belong in most places


@dataclass(frozen=True)
class Damage:
    kind: str
    contents: dict[Path, bytes | None]  # of the files that it changes; None: the file is gone

    def apply(self) -> None:
        for path, content in self.contents.items():
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)


def damages(path: Path, rng: random.Random) -> Iterator[Damage]:
    """Damaged versions of a file: one of each kind that is possible, as it is now."""
    content = path.read_bytes()
    kinds = [*ANY.items()]
    if path.suffix == ".safetensors":
        kinds += HEADER.items()
    elif path.suffix in (".json", ".jsonl"):
        kinds += [*LINES.items(), *JSON.items()]
    else:
        kinds += LINES.items()
    rng.shuffle(kinds)
    for kind, damage in kinds:
        if kind == "swapped":
            other = _neighbour(path, rng)
            if other is not None:
                yield Damage(kind, {path: other.read_bytes(), other: content})
        elif (damaged := damage(content, rng)) != content:
            yield Damage(kind, {path: damaged})


def _neighbour(path: Path, rng: random.Random) -> Path | None:
    """Another file of the same type and other content: in the same folder, else in one beside it."""
    content = path.read_bytes()
    for folder, pattern in ((path.parent, f"*{path.suffix}"), (path.parent.parent, f"*/*{path.suffix}")):
        others = [one for one in sorted(folder.glob(pattern)) if one.is_file() and one.read_bytes() != content]
        if others:
            return rng.choice(others)
    return None


# Any file. A function gives the damaged content, None if the file is gone, or the content itself: not possible.

Change = Callable[[bytes, random.Random], bytes | None]


def _bit(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    altered = bytearray(content)
    altered[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(altered)


def _bytes(content: bytes, rng: random.Random) -> bytes:
    altered = bytearray(content)
    for _ in range(min(8, len(content))):
        altered[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(altered)


def _zeroed(content: bytes, rng: random.Random) -> bytes:
    """A block of zeros, as after a power cut."""
    first = rng.randrange(len(content) + 1)
    last = min(len(content), first + rng.choice((1, 16, 512, 4096)))
    return content[:first] + bytes(last - first) + content[last:]


ANY: dict[str, Change] = {
    "bit flipped": _bit,
    "bytes flipped": _bytes,
    "zeroed": _zeroed,
    "cut": lambda content, rng: content[: rng.randrange(len(content))] if content else content,
    "last byte cut": lambda content, rng: content[:-1],
    "first byte cut": lambda content, rng: content[1:],
    "longer": lambda content, rng: content + rng.randbytes(rng.choice((1, 8, 100))),
    "doubled": lambda content, rng: content + content,
    "empty": lambda content, rng: b"",
    "gone": lambda content, rng: None,
    "noise": lambda content, rng: rng.randbytes(max(1, len(content))),
    "swapped": lambda content, rng: content,  # with another file: see `damages`
}


# Safetensors: the length of the header, the header as JSON, the data.


def _header(change: Callable[[dict[str, Any], list[str], random.Random], None]) -> Change:
    """A change of the header; the data stays. Files that are no safetensors stay as they are."""

    def changed(content: bytes, rng: random.Random) -> bytes:
        try:
            (length,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8 : 8 + length])
        except (struct.error, ValueError):
            return content
        before = json.dumps(header)
        change(header, [name for name in header if name != "__metadata__"], rng)
        if json.dumps(header) == before:
            return content
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return changed


def _type(header: dict[str, Any], names: list[str], rng: random.Random) -> None:
    if names:
        tensor = header[rng.choice(names)]
        for same_size in TYPES.values():
            if tensor["dtype"] in same_size:
                tensor["dtype"] = rng.choice([one for one in same_size if one != tensor["dtype"]])
                return


def _shape(header: dict[str, Any], names: list[str], rng: random.Random) -> None:
    if names:
        tensor = header[rng.choice(names)]
        shape = tensor["shape"]
        if shape and shape[0] % 2 == 0 and rng.random() < 0.5:
            tensor["shape"] = [shape[0] // 2, 2, *shape[1:]]
        else:
            tensor["shape"] = [1, *shape]


def _places(header: dict[str, Any], names: list[str], rng: random.Random) -> None:
    """Two tensors in each other's places."""
    if len(names) > 1:
        one, other = rng.sample(names, 2)
        header[one], header[other] = header[other], header[one]


def _renamed(header: dict[str, Any], names: list[str], rng: random.Random) -> None:
    if names:
        header["x"] = header.pop(rng.choice(names))


def _tensor_gone(header: dict[str, Any], names: list[str], rng: random.Random) -> None:
    """The last one in the data, so that the rest is as it was; its data stays behind."""
    if names:
        del header[max(names, key=lambda name: header[name]["data_offsets"])]


def _metadata_gone(header: dict[str, Any], names: list[str], rng: random.Random) -> None:
    header.pop("__metadata__", None)


def _metadata_key_gone(header: dict[str, Any], names: list[str], rng: random.Random) -> None:
    if metadata := header.get("__metadata__"):
        del metadata[rng.choice(sorted(metadata))]


def _metadata_changed(header: dict[str, Any], names: list[str], rng: random.Random) -> None:
    if metadata := header.get("__metadata__"):
        key = rng.choice(sorted(metadata))
        metadata[key] = rng.choice(("", "x", "{}", "[]", "null", "1e999", "[" * DEEP, metadata[key] + " "))


def _metadata_digit(header: dict[str, Any], names: list[str], rng: random.Random) -> None:
    """One digit of a number in it is another one."""
    metadata = header.get("__metadata__") or {}
    places = [(key, place) for key, text in metadata.items() for place, sign in enumerate(text) if sign.isdigit()]
    if places:
        key, place = rng.choice(places)
        text = metadata[key]
        metadata[key] = text[:place] + str((int(text[place]) + rng.randrange(1, 10)) % 10) + text[place + 1 :]


def _metadata_value(header: dict[str, Any], names: list[str], rng: random.Random) -> None:
    """A key less, or a value of another type, in JSON that is kept as metadata."""
    metadata = header.get("__metadata__") or {}
    for key in rng.sample(sorted(metadata), len(metadata)):
        changed = rng.choice((_key_gone, _value))(metadata[key].encode(), rng)
        if changed != metadata[key].encode():
            metadata[key] = changed.decode()
            return


HEADER: dict[str, Change] = {
    "tensor of another type": _header(_type),
    "tensor of another shape": _header(_shape),
    "tensors changed places": _header(_places),
    "tensor renamed": _header(_renamed),
    "tensor gone": _header(_tensor_gone),
    "metadata gone": _header(_metadata_gone),
    "metadata's key gone": _header(_metadata_key_gone),
    "metadata changed": _header(_metadata_changed),
    "metadata's digit changed": _header(_metadata_digit),
    "metadata's value changed": _header(_metadata_value),
}


# Text: lines, and JSON with its keys.


def _lines(change: Callable[[list[bytes], random.Random], None]) -> Change:
    def changed(content: bytes, rng: random.Random) -> bytes:
        lines = content.splitlines(keepends=True)
        if lines:
            change(lines, rng)
        return b"".join(lines)

    return changed


def _digit(content: bytes, rng: random.Random) -> bytes:
    places = [place for place, sign in enumerate(content) if chr(sign).isdigit()]
    if not places:
        return content
    altered, place = bytearray(content), rng.choice(places)
    altered[place] = ord("0") + (altered[place] - ord("0") + rng.randrange(1, 10)) % 10
    return bytes(altered)


def _deep(content: bytes, rng: random.Random) -> bytes:
    """JSON or YAML that no parser can follow, after some lines as they were."""
    lines = content.splitlines(keepends=True)
    return b"".join(lines[: rng.randrange(len(lines) + 1)]) + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"\n"


LINES: dict[str, Change] = {
    "line gone": _lines(lambda lines, rng: lines.pop(rng.randrange(len(lines))) and None),
    "line doubled": _lines(lambda lines, rng: lines.insert(0, rng.choice(lines))),
    "lines changed places": _lines(lambda lines, rng: rng.shuffle(lines)),
    "digit changed": _digit,
    "nested deep": _deep,
    "no text": lambda content, rng: b"\xff\xfe" + content,
    "closed with carriage returns": lambda content, rng: content.replace(b"\n", b"\r\n"),
}


def _json(change: Callable[[Any, random.Random], Any]) -> Change:
    """A change of a JSON file, or of one line of a JSONL file."""

    def changed(content: bytes, rng: random.Random) -> bytes:
        try:
            return _written(change(json.loads(content), rng), content)
        except ValueError:
            pass
        lines = content.splitlines(keepends=True)
        if not lines:
            return content
        place = rng.randrange(len(lines))
        try:
            lines[place] = _written(change(json.loads(lines[place]), rng), lines[place])
        except ValueError:
            return content
        return b"".join(lines)

    return changed


def _written(value: Any, before: bytes) -> bytes:
    same = value == json.loads(before) and json.dumps(value) == json.dumps(json.loads(before))
    return before if same else json.dumps(value).encode() + b"\n"


def _places_in(value: Any) -> list[tuple[Any, Any]]:
    """All pairs of a dict or list and a key or index of it."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [(value, key) for key in keys] + [place for key in keys for place in _places_in(value[key])]


def _remove_key(value: Any, rng: random.Random) -> Any:
    places = [(holder, key) for holder, key in _places_in(value) if isinstance(holder, dict)]
    if places:
        holder, key = rng.choice(places)
        del holder[key]
    return value


def _change_value(value: Any, rng: random.Random) -> Any:
    places = _places_in(value)
    if not places:
        return rng.choice(OTHERS)
    holder, key = rng.choice(places)
    holder[key] = rng.choice(OTHERS)
    return value


_key_gone, _value = _json(_remove_key), _json(_change_value)

JSON: dict[str, Change] = {
    "key gone": _key_gone,
    "value changed": _value,
    "other JSON": lambda content, rng: json.dumps(rng.choice(OTHERS)).encode() + b"\n",
    "not a number": _json(lambda value, rng: _change_value(value, _Only(float("nan"), rng))),
    "infinite": _json(lambda value, rng: _change_value(value, _Only(float("inf"), rng))),
    "in a list": _json(lambda value, rng: [value]),
}


class _Only(random.Random):
    """Chooses places by chance, and one value always."""

    def __init__(self, value: Any, rng: random.Random) -> None:
        super().__init__(rng.random())
        self.value = value

    def choice(self, seq: Any) -> Any:
        return self.value if seq is OTHERS else super().choice(seq)
