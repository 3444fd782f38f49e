"""The house rules, read off the syntax trees."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

FLOORS = {
    # only downward; a room may use its own parts
    "cli": 8,
    "console": 7,
    "road": 6,
    "health": 6,
    "parity": 5,
    "verify": 5,
    "sources": 4,
    "targets": 4,
    "plan": 4,
    "calibrate": 4,
    "store": 3,
    "quantize": 3,
    "writer": 3,
    "arch": 2,
    "layout": 2,
    "report": 2,
    "model": 1,
    "kernels": 0,
    "errors": 0,
}
FOLDERS = {"fp8export": ROOT / "fp8export", "kernels": ROOT / "kernels", "calibrate": ROOT / "calibrate"}
FILES = sorted(file for folder in FOLDERS.values() for file in folder.rglob("*.py"))
NAMES = [file.relative_to(ROOT).as_posix() for file in FILES]
LINE_BUDGET = 400
OPTIONAL = {"transformers", "compressed_tensors", "accelerate", "onnxruntime", "triton", "fcntl"}


def room(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "fp8export" else parts[0]


def dotted(file: Path) -> list[str]:
    """The module's path as imported: fp8export.kernels.reference for kernels/reference.py."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return parts if parts[0] == "fp8export" else ["fp8export", *parts]


def imports(file: Path) -> list[tuple[str, ast.stmt, bool]]:
    """(absolute name, node, at module level) of every import."""
    found = []
    tree = ast.parse(file.read_text())
    top = set(ast.walk(tree)) - {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    typing_only = {
        n
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and getattr(branch.test, "id", "") == "TYPE_CHECKING"
        for n in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node, node in top - typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = dotted(file)
            base = base[: len(base) - node.level] if node.level else []
            if file.name == "__init__.py" and node.level:
                base = dotted(file)[: len(dotted(file)) - node.level]
            prefix = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                found.append((f"{prefix}.{alias.name}", node, node in top - typing_only))
    return found


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_imports_only_go_down(file) -> None:
    mine = room(file)
    if mine in ("__init__", "__main__"):
        return
    for name, _, _ in imports(file):
        parts = name.split(".")
        if parts[0] != "fp8export" or parts[1] in ("__version__", mine):
            continue
        assert FLOORS[parts[1]] < FLOORS[mine], f"{file.name} on floor {FLOORS[mine]} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_no_file_is_over_the_line_budget(file) -> None:
    assert len(file.read_text().splitlines()) <= LINE_BUDGET


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_no_star_imports_and_optional_packages_only_inside_functions(file) -> None:
    for name, _, top in imports(file):
        assert not name.endswith(".*")
        assert not (top and name.split(".")[0] in OPTIONAL), name


def mentions(file: Path, *words: str) -> bool:
    tree = ast.parse(file.read_text())
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    names |= {k.arg for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg}
    names |= {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    return bool(names & set(words))


ONLY_ONE_ROOM = [
    (("pickle", "weights_only", "pickletools"), {"fp8export/store/safe_pickle.py"}),
    (("print", "echo"), {"fp8export/cli.py"}),
    (("posix_fallocate", "ftruncate", "rename"), {"fp8export/writer.py"}),
    (("distributed",), set()),
]


@pytest.mark.parametrize(("words", "rooms"), ONLY_ONE_ROOM)
def test_dangerous_things_happen_in_one_room_only(words, rooms) -> None:
    users = {name for name, file in zip(NAMES, FILES, strict=True) if mentions(file, *words)}
    assert users <= rooms


def test_only_kernels_know_448() -> None:
    for name, file in zip(NAMES, FILES, strict=True):
        numbers = {n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)}
        if not name.startswith("kernels/") and name != "fp8export/sources/te_fp8.py":
            assert not {448} & {n for n in numbers if isinstance(n, int | float)}, name


def test_kernels_stand_alone() -> None:
    for file in FOLDERS["kernels"].glob("*.py"):
        roots = {name.split(".")[0] for name, _, _ in imports(file)}
        roots -= {"fp8export", "collections"}
        assert roots <= {"torch", "triton", "math"}, file
        assert all(n.startswith("fp8export.kernels") for n, _, _ in imports(file) if n.startswith("fp8export"))


def test_sources_and_targets_never_meet() -> None:
    for file in FILES:
        names = [name for name, _, _ in imports(file)]
        if room(file) == "sources":
            assert not any(n.startswith("fp8export.targets") for n in names), file
        if room(file) == "targets":
            assert not any(n.startswith(("fp8export.sources", "fp8export.store")) for n in names), file


@pytest.mark.parametrize("file", [f for f in FILES if "__all__" in f.read_text()], ids=lambda f: f.parent.name)
def test_public_names_are_sorted_and_exist(file) -> None:
    tree = ast.parse(file.read_text())
    (value,) = [
        n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"
    ]
    names = ast.literal_eval(value)
    module = __import__(".".join(p for p in dotted(file) if p != "__init__"), fromlist=["x"])
    assert sorted(set(names)) == sorted(names)
    assert all(hasattr(module, name) for name in names)


def test_every_source_has_a_builder_and_every_target_a_golden_file() -> None:
    from builders import llama

    from fp8export.sources import SOURCES
    from fp8export.targets import TARGETS

    for name in SOURCES:
        assert callable(getattr(llama, name)), name
    for name in TARGETS:
        assert (ROOT / "tests" / "golden" / f"{name}.json").is_file(), name


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import fp8export, sys, json; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "rich", "click"} & set(json.loads(result.stdout))


def test_nothing_in_the_product_speaks_of_this_workplace() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for name in tracked:
        if name.endswith((".py", ".md", ".toml", ".txt", ".yaml")) and name != "tests/test_house.py":
            text = (ROOT / name).read_text()
            for word in ("/work/", "../shared", "subagent", "Claude"):
                assert word not in text, f"{name} mentions {word}"


def test_the_wheel_ships_every_folder_of_code() -> None:
    import tomllib

    shipped = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {".".join(dotted(file)[:-1]) for file in FILES if file.name == "__init__.py"}
    assert shipped == folders
