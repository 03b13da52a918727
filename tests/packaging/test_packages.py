"""Checks that folder X is fleetbed.X, and api fleetbed itself: packages, shipped files, imports, public names.

`.ci/run` runs these against an installed wheel as well; FLEETBED_INSTALLED_IN says where it is.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings the same reader under its first name
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
ORDER = (
    "profiles",
    "models",
    "emulator",
    "flower",
    "analysis",
    "api",
    "cli",
)  # each may import itself and those before it
#: the same inside the packages that have sub-packages; modules beside these stand above them all
SUB_PACKAGES = {
    "models": ("families", "cost"),
    "emulator": (
        "machine",
        "cluster",
        "limits",
        "data",
        "method",
        "bases",
        "algorithms",
        "timeline",
        "wire",
        "processes",
        "remote",
        "checks",
        "records",
        "engine",
        "resume",
        "run",
    ),
    "analysis": ("tables", "figures", "page", "tracking"),
}
MOST_MODULES = 16  # in one folder
INSTALL_AGAIN = "the editable install is older than pyproject.toml: pip install --no-deps --no-build-isolation -e ."


def setuptools_table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return table


PACKAGES = setuptools_table()["packages"]


def folder_of(package: str) -> Path:
    return ROOT / ("api" if package == "fleetbed" else package.removeprefix("fleetbed.").replace(".", "/"))


def package_of(folder: Path) -> str:
    parts = folder.relative_to(ROOT).parts
    return "fleetbed" if parts == ("api",) else ".".join(("fleetbed", *parts))


def top_of(module: str) -> str:
    """The folder that a module below fleetbed is in."""
    name = module.split(".")[1]
    return name if name in ORDER else "api"


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ORDER:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(), str(path))


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules named by every import, those inside functions too; a relative one starts with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            if base == "fleetbed":
                yield from (f"fleetbed.{alias.name}" for alias in node.names)


def shipped_files(package: str) -> list[str]:
    """All but code in the package's folder, down to where the next package begins."""
    folder = folder_of(package)
    inner = [path.parent for path in folder.rglob("__init__.py") if path.parent != folder]
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix not in (".py", ".pyc")
        and not any(path.is_relative_to(other) for other in inner)
    )


def python(code: str) -> str:
    """Run it in a fresh interpreter, away from the checkout, so that nothing is found by being there."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.anchor, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_list_is_that_of_the_folders() -> None:
    folders = [path.parent for top in ORDER for path in (ROOT / top).rglob("__init__.py")]
    assert sorted(PACKAGES) == sorted(map(package_of, folders))
    mapped = setuptools_table()["package-dir"]
    assert mapped == {package: folder_of(package).relative_to(ROOT).as_posix() for package in PACKAGES}


def test_every_folder_with_code_is_a_package() -> None:
    for path, _ in modules():
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has code and no __init__.py"


def test_the_links_for_the_type_checker_lead_to_the_folders() -> None:
    links = ROOT / ".ci/types/fleetbed"
    wanted = {path.name: path for path in (ROOT / "api").iterdir() if path.is_file()}
    wanted |= {folder: ROOT / folder for folder in ORDER if folder != "api"}
    assert {link.name: link.resolve() for link in links.iterdir()} == wanted


@pytest.mark.parametrize("package", PACKAGES)
def test_all_that_is_not_code_is_in_package_data(package: str) -> None:
    patterns = setuptools_table()["package-data"].get(package, [])
    for file in shipped_files(package):
        assert any(fnmatch(file, pattern) for pattern in patterns), f"{package} would be shipped without {file}"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_installed_files_equal_the_checkout(package: str) -> None:
    installed = resources.files(package)
    assert all(installed.joinpath(path.name).is_file() for path in folder_of(package).glob("*.py")), INSTALL_AGAIN
    code = [path.name for path in folder_of(package).glob("*.py")]
    for file in (*shipped_files(package), *code):
        assert installed.joinpath(file).read_bytes() == (folder_of(package) / file).read_bytes(), file


@pytest.mark.skipif("FLEETBED_INSTALLED_IN" not in os.environ, reason="the package is installed from the checkout")
def test_the_tests_run_against_the_wheel() -> None:
    for package in PACKAGES:
        file = importlib.import_module(package).__file__
        assert file is not None
        assert Path(file).is_relative_to(os.environ["FLEETBED_INSTALLED_IN"])


@pytest.mark.skipif("FLEETBED_INSTALLED_IN" not in os.environ, reason="only a wheel can hold too much")
def test_the_wheel_holds_the_packages_and_nothing_else() -> None:
    files = metadata.files("fleetbed") or []
    outside = {file.parts[0] for file in files if not file.parts[0].startswith(("fleetbed", ".."))}
    assert outside == set()
    in_package = {file.parts[1] for file in files if file.parts[0] == "fleetbed"} - {"__pycache__"}
    assert in_package == {*ORDER, *(path.name for path in (ROOT / "api").iterdir() if path.is_file())} - {"api"}
    assert any(file.name == "LICENSE" for file in files)


def test_imports_go_one_way() -> None:
    wrong = []
    for path, tree in modules():
        own = ORDER.index(path.relative_to(ROOT).parts[0])
        for name in imported(tree):
            parts = name.split(".")
            if parts[0] == "fleetbed" and len(parts) > 1 and ORDER.index(top_of(name)) > own:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("package", SUB_PACKAGES)
def test_sub_packages_import_only_those_above_them(package: str) -> None:
    order = SUB_PACKAGES[package]
    folders = {path.parent.name for path in (ROOT / package).rglob("__init__.py")} - {package}
    assert folders == set(order)
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        own = path.relative_to(ROOT / package).parts[0]
        place = order.index(own) if own in order else -1
        for name in imported(ast.parse(path.read_text())):
            parts = name.split(".")
            if parts[:2] == ["fleetbed", package] and parts[2:] and parts[2] in order and order.index(parts[2]) > place:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_no_folder_has_more_modules_than_one_can_keep_in_ones_head() -> None:
    """But for the methods, of which each is one file that can be read by itself."""
    counts = Counter(path.parent for path, _ in modules() if path.name != "__init__.py")
    del counts[ROOT / "emulator" / "algorithms"]
    assert {str(folder): count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_no_two_classes_have_the_same_name() -> None:
    """But for the two names by which a method's module is found."""
    found: dict[str, list[str]] = {}
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in found.items() if len(where) > 1 and name not in ("Params", "Method")} == {}


def test_own_modules_are_imported_by_their_full_name() -> None:
    wrong = []
    for path, tree in modules():
        for name in imported(tree):
            # a bare name would load the module a second time under it, a relative one hides where it is
            if name.startswith(".") or name.split(".")[0] in ORDER:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def public_definitions(package: str) -> set[str]:
    """Functions, classes and constants that the package's __init__ itself defines for others."""
    found: set[str] = set()
    for node in ast.parse((folder_of(package) / "__init__.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_match_the_package(package: str) -> None:
    module = importlib.import_module(package)
    said = getattr(module, "__all__", [])
    assert len(set(said)) == len(said)
    assert public_definitions(package) <= set(said), "defined in __init__ and not in __all__"
    for name in said:
        getattr(module, name)
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018 (a lazy package must not answer to everything)


@pytest.mark.parametrize("module", ["fleetbed.cli.main", *PACKAGES])
def test_the_command_and_the_packages_start_without_torch(module: str) -> None:
    loaded = python(f"import sys, {module}; print(*sys.modules)").split()
    assert module in loaded
    assert {"torch", "torchvision", "matplotlib", "scipy", "ray"}.isdisjoint(loaded)


def test_the_command_is_installed() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="fleetbed")
    assert entry.value == "fleetbed.cli.main:program"
    assert callable(entry.load())


def test_no_path_of_somebodys_machine_is_in_a_tracked_file() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    path_of_a_machine = re.compile(rb"(?<![\w./:~-])/(?:work|root|opt|home/\w|Users/\w)[\w./-]*/")
    wrong = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file() or path.suffix == ".npz" or path == Path(__file__):
            continue
        wrong += [f"{name}: {found.group().decode()}" for found in path_of_a_machine.finditer(path.read_bytes())]
    assert wrong == []
