"""The wheel holds the files of the listed packages and nothing else."""

import email.parser
import shutil
import subprocess
import sys
import zipfile

import pytest
from tree import ROOT, TOP_PACKAGES, shown


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel. Built from a copy, since setuptools leaves build/ and egg-info beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "tree"
    copy.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*TOP_PACKAGES, "scripts", "tests", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = folder.glob("*.whl")
    return path


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_file_of_its_packages_and_no_other(wheel):
    in_tree = {
        shown(path)
        for package in TOP_PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    shipped = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert shipped - in_tree == set()
    assert in_tree - shipped == set(), "list it in setup.cfg, [options] packages or [options.package_data]"


def test_the_wheel_is_pure_python_under_its_name_and_version(wheel):
    assert wheel.name == "deterministic_rocm-0.1.0-py3-none-any.whl"


def test_the_metadata_says_what_it_needs_and_carries_the_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.parser.Parser().parsestr(
            archive.read("deterministic_rocm-0.1.0.dist-info/METADATA").decode()
        )
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra")) == {"audit", "megatron", "te", "gpu", "verify", "dev"}
    needed = metadata.get_all("Requires-Dist")
    assert [line for line in needed if "extra ==" not in line] == []
    assert not any(line.startswith(("torch", "apex")) for line in needed)
    assert any(name.endswith("LICENSE") for name in contents(wheel))


def test_installing_the_wheel_hooks_nothing_in(wheel):
    """No console script and no .pth: the layer is armed on request alone."""
    assert not any(name.endswith((".pth", ".start", "entry_points.txt")) for name in contents(wheel))
