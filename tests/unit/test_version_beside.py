"""The version of an upstream package is read beside the code that runs, however that was installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from patches.versions import beside

MODULE = "transformer_engine.pytorch.attention"


def _package(root: Path) -> Path:
    file = root / "transformer_engine" / "pytorch" / "attention.py"
    file.parent.mkdir(parents=True)
    file.touch()
    return file


@pytest.mark.parametrize(
    "name", ["transformer_engine-2.8.0+rocm.dist-info", "Transformer.Engine-2.8.0+rocm.dist-info"]
)
def test_a_wheel_says_it_in_its_folder_name(tmp_path: Path, name: str) -> None:
    file = _package(tmp_path)
    (tmp_path / name).mkdir()
    assert beside(file, MODULE, "transformer-engine") == "2.8.0+rocm"


@pytest.mark.parametrize("folder", ["transformer_engine.egg-info", "EGG-INFO"])
def test_a_source_tree_installed_in_place_and_an_egg_say_it_in_pkg_info(tmp_path: Path, folder: str) -> None:
    """TransformerEngine for ROCm is often built and run from its own checkout."""
    file = _package(tmp_path)
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "PKG-INFO").write_text(
        "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.8.0.dev0+abc\n\nVersion: 9 is in the description\n"
    )
    assert beside(file, MODULE, "transformer_engine") == "2.8.0.dev0+abc"


def test_a_neighbours_version_is_not_taken(tmp_path: Path) -> None:
    file = _package(tmp_path)
    (tmp_path / "transformer_engine_torch-2.8.0.dist-info").mkdir()
    (tmp_path / "other.egg-info").mkdir()
    (tmp_path / "other.egg-info" / "PKG-INFO").write_text("Name: other\nVersion: 1\n")
    assert beside(file, MODULE, "transformer-engine") is None
