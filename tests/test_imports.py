"""Imports go down only, and nothing below the faces of the package speaks to the user or knows a data set."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "whiflash"

FLOOR = {"errors", "home"}
BELOW_MODEL = FLOOR | {"nn", "routers", "target", "drafters", "decoding"}
# The command line and the modules it is split into: one floor.
TOP = {"cli", "chat", "demo", "inspect", "options", "terminal"}
BELOW_TOP = BELOW_MODEL | {"model", "progress", "journal", "calibration", "training", "evaluation", "whiflash"}
FACE_ROOMS = {"options", "terminal", "chat", "demo", "inspect"}
# Every room, and the rooms it may import from. A new room needs its place here.
MAY_IMPORT = {
    "errors": set(),
    "home": set(),
    "nn": FLOOR,
    "routers": FLOOR | {"nn"},  # on the same floor: routers read their files with nn, which knows no router
    "target": FLOOR | {"nn"},
    "drafters": FLOOR | {"nn", "target"},
    "decoding": FLOOR | {"nn", "routers", "target", "drafters"},
    "calibration": FLOOR | {"target"},
    "model": BELOW_MODEL | {"calibration"},
    "progress": FLOOR,
    "journal": FLOOR,
    "inspect": BELOW_MODEL,
    "options": FLOOR,
    "terminal": BELOW_MODEL | {"model"},
    "chat": BELOW_MODEL | {"model", "terminal"},
    "demo": BELOW_MODEL | {"model", "terminal", "progress"},
    "training": BELOW_MODEL | {"model", "progress", "journal"},
    "evaluation": BELOW_MODEL | {"model", "progress", "journal", "calibration"},
    **dict.fromkeys(TOP, TOP | BELOW_TOP),
    "whiflash": FLOOR | {"model"},  # the package's own __init__
    "__main__": {"cli"},
}
FACES = TOP | {"__main__", "progress", "training", "evaluation"}
FACE_LIBRARIES = {"rich", "typer", "click", "tqdm", "datasets", "matplotlib"}


def room(path: Path, package: Path) -> str:
    first = path.relative_to(package).with_suffix("").parts[0]
    return "whiflash" if first == "__init__" else first


def imported(tree: ast.AST, path: Path, package: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and absolute dotted parts of everything the module imports, wherever in it the import stands."""
    here = ("whiflash", *path.relative_to(package).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, [*base, alias.name]


def offences(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        mine, where = room(path, package), path.relative_to(package)
        if mine not in MAY_IMPORT:
            found.append(f"{where}: room {mine!r} has no place in MAY_IMPORT")
            continue
        tree = ast.parse(path.read_text(), str(path))
        rooms = MAY_IMPORT.keys() | {path.name for path in package.iterdir()}
        for line, (top, *rest) in imported(tree, path, package):
            if top == "whiflash":
                # `from whiflash import WhiFlash` reaches the package itself, `from whiflash import nn` the room.
                other = rest[0] if rest and rest[0] in rooms else "whiflash"
                if other != mine and other not in MAY_IMPORT[mine]:
                    found.append(f"{where}:{line}: {mine} imports {other}")
            elif top in FACE_LIBRARIES and mine not in FACES:
                found.append(f"{where}:{line}: {mine} imports {top}")
        if mine not in FACES:
            found += [f"{where}:{node.lineno}: {mine} prints" for node in ast.walk(tree) if is_print(node)]
    return found


def is_print(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def test_the_package_keeps_the_rules():
    assert len(list(PACKAGE.rglob("*.py"))) > 10, "the package was not found"
    assert offences(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "offence"),
    [
        ("nn/a.py", "from whiflash.target import config", "nn imports target"),
        ("nn/a.py", "import whiflash.routers.fixed", "nn imports routers"),
        ("routers/a.py", "from ..drafters.draft import Draft", "routers imports drafters"),
        ("target/a.py", "def f():\n    from whiflash import drafters", "target imports drafters"),
        ("decoding/a.py", "from whiflash import WhiFlash", "decoding imports whiflash"),
        ("training/a.py", "from whiflash.evaluation import datasets", "training imports evaluation"),
        ("model.py", "from .cli import main", "model imports cli"),
        ("model.py", "import rich.table", "model imports rich"),
        ("drafters/a.py", "from tqdm.auto import tqdm", "drafters imports tqdm"),
        ("decoding/a.py", "print('round')", "decoding prints"),
        ("attic/a.py", "", "room 'attic' has no place in MAY_IMPORT"),
    ],
)
def test_an_offence_is_found(tmp_path, file, source, offence):
    for name in ("target", "drafters", "routers", "evaluation"):
        (tmp_path / name).mkdir()
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    assert [entry.split(": ", 1)[1] for entry in offences(tmp_path)] == [offence]


def test_imports_downwards_and_beside_are_fine(tmp_path):
    (tmp_path / "decoding").mkdir()
    (tmp_path / "decoding" / "a.py").write_text(
        "import torch\nfrom whiflash.errors import WhiFlashError\nfrom . import accept\nfrom ..routers import router\n"
    )
    (tmp_path / "cli.py").write_text("import rich\nfrom whiflash import WhiFlash\nprint(WhiFlash)\n")
    assert offences(tmp_path) == []
