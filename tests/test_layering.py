"""The arrows between the rooms (docs/architecture.md), read from the source: who may import whom, and what none may."""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import REPO

PACKAGE = "openpi_accel"
MAX_LINES = 400

# Room -> the rooms it may import besides itself. A room is a folder or a single module of the package.
BASE = {"errors", "types", "tree", "orbax_tree", "orbax_noise", "sizes"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "tree": {"errors", "types"},
    "sizes": set(),
    "orbax_noise": set(),
    "orbax_tree": {"errors", "types", "tree", "orbax_noise"},
    "cli": {"errors"},
    "config": {"errors"},
    "models": BASE | {"config"},
    "data": BASE | {"config"},
    "parallel": BASE | {"config"},
    "objective": BASE | {"config"},
    "accel": BASE | {"config", "models", "parallel"},
    "train": BASE | {"config", "parallel"},
    "build": BASE | {"config", "models", "data", "parallel", "objective", "accel", "train"},
    "training_run": BASE | {"config", "models", "parallel", "train", "build"},
    "tools": BASE
    | {"config", "models", "data", "parallel", "objective", "accel", "train", "build", "training_run", "cli"},
}
# A second model family will join: these rooms work for any model.
KNOW_NO_MODEL = ("train", "parallel")
MODEL_WORDS = re.compile(r"pi0(?!\.5)|pi05|siglip|gemma|adarms", re.IGNORECASE)
# A worker's environment is what its process inherits, so it is set there.
MAY_TOUCH_ENVIRONMENT = ("data/worker_env.py",)
FORBIDDEN = {
    "torch": "the project is torch-free",
    "tensorflow": "the project does without TensorFlow",
    "lerobot": "datasets are read natively; lerobot brings torch",
    "flax.linen": "one dialect of Flax: NNX",
    "scripts": "scripts are entry points",
    "tests": "tests are no library",
}


def sources(folder: pathlib.Path) -> dict[str, str]:
    """Path below `folder` -> text of every module there."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))}


LIBRARY = sources(REPO / PACKAGE)


def module_name(path: str) -> str:
    """`models/pi0.py` -> `openpi_accel.models.pi0`."""
    parts = [PACKAGE, *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(text: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, module) for every import in a module; `from a import b` gives a.b too where that is a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, ("." * node.level) + (node.module or "")
            yield from (
                (node.lineno, f"{node.module}.{a.name}") for a in node.names if f"{node.module}.{a.name}" in known
            )


def room_of(module: str) -> str:
    """`openpi_accel.models.pi0` -> `models`; the package itself is "".."""
    return module.split(".")[1] if "." in module else ""


def crossings(library: dict[str, str]) -> Iterator[str]:
    """Yields every import against the arrows."""
    known = {module_name(path) for path in library}
    for path, text in library.items():
        room = room_of(module_name(path))
        for line, module in imports(text, known):
            where = f"{PACKAGE}/{path}:{line}"
            if module.startswith("."):
                yield f"{where}: relative import; write {PACKAGE}.…"
            for name, why in FORBIDDEN.items():
                if module == name or module.startswith(name + "."):
                    yield f"{where}: imports {module}: {why}"
            if module.split(".")[0] != PACKAGE or room_of(module) in ("", room):
                continue
            if room_of(module) not in MAY_IMPORT.get(room, set()):
                yield f"{where}: {room or PACKAGE} may not import {room_of(module)} ({module})"


def cycle(library: dict[str, str]) -> list[str]:
    """The modules of an import cycle, imports inside functions counted too; empty where there is none."""
    known = {module_name(path) for path in library}
    graph = {}
    for path, text in library.items():
        name = module_name(path)
        graph[name] = {
            module for _, module in imports(text, known) if module in known and module not in (name, PACKAGE)
        }
        # `from package import module` imports the module; its package's __init__ is empty here.
        graph[name] -= {module for module in graph[name] if name.startswith(module + ".")}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def environment_reads(text: str) -> Iterator[int]:
    """Yields the lines that reach for the process's environment."""
    for node in ast.walk(ast.parse(text)):
        named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
        if named and node.attr in ("environ", "environb", "getenv", "putenv"):  # type: ignore[attr-defined]
            yield node.lineno  # type: ignore[attr-defined]
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (
                node.lineno for alias in node.names if alias.name in ("environ", "environb", "getenv", "putenv")
            )


def test_every_room_is_known():
    rooms = {room_of(module_name(path)) for path in LIBRARY} - {""}
    assert rooms <= set(MAY_IMPORT), f"say in MAY_IMPORT what {sorted(rooms - set(MAY_IMPORT))} may import"


def test_imports_follow_the_arrows():
    found = list(crossings(LIBRARY))
    assert not found, "\n".join(found)


def test_the_arrows_have_no_cycle():
    order = list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())
    assert order[0] == "errors" and order.index("models") < order.index("build") < order.index("tools")


def test_modules_have_no_import_cycle():
    found = cycle(LIBRARY)
    assert not found, " -> ".join(found)


def test_general_rooms_know_no_model():
    found = [
        f"{PACKAGE}/{path}: {match.group()}"
        for path, text in LIBRARY.items()
        if room_of(module_name(path)) in KNOW_NO_MODEL
        for match in MODEL_WORDS.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_only_entries_touch_the_environment():
    found = [
        f"{PACKAGE}/{path}:{line}"
        for path, text in LIBRARY.items()
        if path not in MAY_TOUCH_ENVIRONMENT
        for line in environment_reads(text)
    ]
    assert not found, "\n".join(found)


def test_modules_stay_small():
    sizes = {f"{PACKAGE}/{path}": text.count("\n") for path, text in LIBRARY.items()}
    sizes |= {f"scripts/{path}": text.count("\n") for path, text in sources(REPO / "scripts").items()}
    assert len(sizes) > 20
    found = {path: size for path, size in sizes.items() if size > MAX_LINES}
    assert not found, f"a module longer than {MAX_LINES} lines holds two purposes: {found}"


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("models/a.py", "from openpi_accel.train import step", "models may not import train"),
        ("train/a.py", "def f():\n    import openpi_accel.models.pi0", "train may not import models"),
        ("data/a.py", "from openpi_accel import objective", "data may not import objective"),
        ("parallel/a.py", "from ..models import pi0", "relative import"),
        ("models/a.py", "import torch.nn", "torch-free"),
        ("models/a.py", "import flax.linen as nn", "one dialect"),
    ],
)
def test_the_checker_finds_crossings(path: str, text: str, message: str):
    found = list(crossings({path: text, "objective.py": "", "models/pi0.py": "", "train/step.py": ""}))
    assert len(found) >= 1 and message in found[0]


def test_the_checker_finds_cycles():
    library = {
        "a.py": "import openpi_accel.b",
        "b.py": "def f():\n    from openpi_accel import c",
        "c.py": "",
        "__init__.py": "",
    }
    assert cycle(library) == []
    assert {"openpi_accel.a", "openpi_accel.b"} <= set(cycle(library | {"c.py": "from openpi_accel.a import x"}))


def test_the_checker_finds_environment_reads():
    assert sorted(environment_reads("import os\nos.environ['A']\nfrom os import getenv\nos.getenv('B')")) == [2, 3, 4]


@pytest.mark.shared
def test_house_rules(shared: pathlib.Path):
    done = subprocess.run(
        [sys.executable, shared / "tools" / "house_rules.py"], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
