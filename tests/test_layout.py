"""How the code is laid out: imports point one way, names are told apart, tests stand where their code does."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedsieve"
# Each layer may import from itself and from those above it in this list. A module belongs to the longest name.
LAYERS = [
    ["errors", "randomness", "observe.profile", "observe.callbacks", "observe.numbers"],
    ["files", "wire", "privacy"],
    ["config", "sieve.rules", "federate.schedule"],  # and the registries, which import no part before it is used
    ["data"],
    ["model"],
    ["sieve"],
    ["federate"],
    ["runs"],
    ["observe"],
    ["context"],
    ["phase"],
    ["engine", "federation"],
    ["experiment"],
    ["analysis"],
    ["cli"],
    ["__main__"],
]
SLOTS = ("methods", "aggregators", "server_optimizers", "local_optimizers", "selection")
REGISTRIES = [f"federate.{slot}" for slot in SLOTS] + ["data"]
SIEVE = {
    "config.mask_settings",
    "config.refusals",
    "config.registry",
    "config.settings",
    "errors",
    "files.atomic",
    "model.flat",
    "model.outputs",
    "model.vit",
    "sieve",
}


def module_name(path: Path) -> str:
    """`federate.round`, and of a package's `__init__.py` that of the package."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def imports(module: str, types_too: bool = True) -> list[str]:
    """The modules of fedsieve that a module imports anywhere, be it in a function or, if asked, for types only."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    left_out = set() if types_too else {inner for block in for_types for inner in ast.walk(block)}
    return [name for node in ast.walk(tree) if node not in left_out for name in named_in(node, module)]


def named_in(node: ast.AST, module: str) -> Iterator[str]:
    """The modules of fedsieve that an import statement names."""
    if isinstance(node, ast.Import):
        named = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module} imports by a relative name"
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        modules = [name for name in inner if name.removeprefix("fedsieve.") in MODULES]
        named = modules if len(modules) == len(inner) else [str(node.module), *modules]
    else:
        return
    yield from (name.partition(".")[2] for name in named if name.partition(".")[0] == "fedsieve")


def layer_of(module: str) -> int:
    if module in REGISTRIES:
        module = "config"
    found = {
        name: number
        for number, layer in enumerate(LAYERS)
        for name in layer
        if module == name or module.startswith(f"{name}.")
    }
    return found[max(found, key=len)]


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_imports_point_one_way(module: str) -> None:
    for imported in filter(None, imports(module)):
        assert layer_of(imported) <= layer_of(module), f"{module} imports {imported}"


def test_no_module_is_imported_by_what_it_imports() -> None:
    for module in filter(None, MODULES):
        seen, ahead = set(), [module]
        while ahead:
            new = {name for name in imports(ahead.pop(), types_too=False) if name} - seen
            assert module not in new, f"{module} is imported by what it imports"
            seen |= new
            ahead += new


def test_the_sieve_works_without_the_rest() -> None:
    """It is offered as a library of its own: masks and optimizers under them for any torch module."""
    for module in MODULES:
        if module.startswith("sieve"):
            for imported in imports(module):
                assert imported in SIEVE or imported.startswith("sieve."), f"{module} imports {imported}"


def test_no_two_files_have_the_same_name_up_to_a_plural() -> None:
    alike = defaultdict(list)
    for module in filter(None, MODULES):
        alike[module.rpartition(".")[2].removesuffix("s")].append(module)
    assert not {name: modules for name, modules in alike.items() if len(modules) > 1}


def test_at_most_five_modules_at_the_top_level() -> None:
    assert len([path for path in SOURCE.glob("*.py") if not path.stem.startswith("__")]) <= 5


def test_tests_stand_where_their_code_does() -> None:
    others = {"real", "scripts"}  # of real data, and of what is not in the package
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert all((SOURCE / folder).is_dir() or folder.name in others for folder in folders)
