"""Plugins: users' own Python files, whose parts experiments can name while a run uses them.

Reading an experiment executes no plugin: names of parts that are unknown then are kept as they are
(`registry.unknown_parts_accepted`). Only commands that run something load plugins, and only those that the user's own
file or command line names. A worker process gets their text from the main process.
"""

import hashlib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fedsieve.config.decorators import KINDS, Part, collected
from fedsieve.errors import InputError, RunError


@dataclass(frozen=True)
class Plugin:
    """A plugin as it was when it was loaded; its file may have changed since."""

    path: str  # absolute
    text: str
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


_active: dict[str, Plugin] = {}  # by path
_users: dict[str, int] = {}  # how many runs, one within another, use each


def are_active(paths: Iterable[str]) -> bool:
    return all(path in _active for path in paths)


def active(paths: Iterable[str]) -> list[Plugin]:
    """Those of these plugins that are loaded."""
    return [_active[path] for path in paths if path in _active]


@contextmanager
def used(paths: Sequence[str]) -> Iterator[None]:
    """Within this context, the parts of these plugins (absolute paths) can be named.

    A plugin that is active already is not loaded again. An error in a plugin's code becomes a RunError of one line.
    """
    names = [Path(path).name for path in paths]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise InputError(f"two plugins are called {name} ({path} is one of them); rename one")
    entered: list[str] = []
    try:
        for path in paths:
            if path not in _active:
                activate(path, read(path))
            _users[path] = _users.get(path, 0) + 1
            entered.append(path)
        yield
    except (InputError, RunError):
        raise
    except Exception as error:
        if (line := line_of(error, paths)) is None:
            raise
        raise RunError(f"{line}: {type(error).__name__}: {_message(error)}") from error
    finally:
        for path in entered:
            _users[path] -= 1
            if not _users[path]:
                deactivate(path)


def activate(path: str, text: str) -> None:
    """Execute a plugin's text, and add its parts to their registries."""
    parts = _executed(path, text)
    for part in parts:
        if part.name in KINDS[part.kind]:
            others = [one.name for one in _active.values() if any(_same(part, theirs) for theirs in one.parts)]
            where = f"by the plugin {others[0]}" if others else "in this process"
            what = f"plugin {path}: {part.kind} '{part.name}' is registered {where} as well"
            sys.modules.pop(_module_name(path), None)
            raise InputError(f"{what}; give one of them another name")
    for part in parts:
        KINDS[part.kind].plug(part.name, part.value)
    _active[path] = Plugin(path, text, tuple(parts))


def deactivate(path: str) -> None:
    for part in _active.pop(path).parts:
        KINDS[part.kind].unplug(part.name)
    sys.modules.pop(_module_name(path), None)
    del _users[path]


def read(path: str) -> str:
    file = Path(path)
    if not re.fullmatch(r"[^.].*\.py", file.name):  # the copies in runs' folders are known by these names
        raise InputError(f"plugin {path} is not called like a Python file; give it a name that ends in .py")
    if not file.is_file():
        raise InputError(f"plugin {path} {'is no file' if file.exists() else 'does not exist'}; give a Python file")
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"plugin {path} cannot be read ({reason}); give a Python file") from None


def _executed(path: str, text: str) -> list[Part]:
    """The parts that a plugin registers."""
    module = ModuleType(_module_name(path))
    module.__file__ = path
    sys.modules[module.__name__] = module  # where classes look for the names in their annotations
    parts: list[Part] = []
    token = collected.set(parts)
    try:
        exec(compile(text.removeprefix("\ufeff"), path, "exec"), module.__dict__)  # the mark of some Windows editors
    except (Exception, SystemExit) as error:
        sys.modules.pop(module.__name__, None)
        line = line_of(error, [path]) or f"plugin {path}"
        what = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {_message(error)}"
        raise InputError(f"{line}: {what}") from None
    finally:
        collected.reset(token)
    if not parts:
        sys.modules.pop(module.__name__, None)
        decorators = ", ".join(f"@fedsieve.{kind.replace('data set', 'dataset').replace(' ', '_')}" for kind in KINDS)
        raise InputError(f"plugin {path} registers nothing; put one of {decorators} before a function or class")
    return parts


def line_of(error: BaseException, paths: Sequence[str]) -> str | None:
    """The last line of one of these plugins that an error came through, in words; None: it came through none."""
    if isinstance(error, SyntaxError) and error.filename in list(paths):
        return f"plugin {error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in paths]
    return f"plugin {frames[-1].filename}, line {frames[-1].lineno}" if frames else None


def place_of(error: BaseException) -> str | None:
    """`plugin parts.py, line 3`: the last line of a loaded plugin that an error came through, on any machine."""
    if (line := line_of(error, list(_active))) is None:
        return None
    path, _, number = line.removeprefix("plugin ").rpartition(", ")
    return f"plugin {Path(path).name}, {number}"


def _message(error: BaseException) -> str:
    return str(error.msg) if isinstance(error, SyntaxError) else (str(error).strip().splitlines() or [""])[0]


def _module_name(path: str) -> str:
    return f"fedsieve_plugin_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def _same(part: Part, other: Part) -> bool:
    return (part.kind, part.name) == (other.kind, other.name)
