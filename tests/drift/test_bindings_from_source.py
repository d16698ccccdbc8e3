"""The signatures of compiled functions in the lock are what pybind11 makes of upstream's own C++ declarations.

`compiled_declarations.json` holds the declarations and the statements that bind them, copied from the source
distributions by `scripts/te_declarations.py`. Here they are compiled as they stand, with empty bodies, against the
pybind11 of the installed torch; what the functions then say of themselves is compared with the lock. What a build of
2.20.2 said on a GPU host is in docs/evidence/results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from patches import binding
from patches.lock import Lock
from patches.versions import matches
from upstream_wheels import ROOT

FORMS = json.loads(Path(__file__).with_name("compiled_declarations.json").read_text())
SEEN = json.loads((ROOT / "docs" / "evidence" / "results" / "te-ring-h200.json").read_text())
SEEN_RELEASE = "2.20.2"
NAMES = sorted({form["name"] for form in FORMS})
REVIEWED = ">=2.3"
"""Older releases are refused by name (te_overrides/before_context_parallel_module.py)."""


def _source(forms: list[dict[str, Any]]) -> str:
    """One extension, every form in a namespace and a submodule of its own, so that forms of one name do not meet."""
    lines = ["#include <torch/csrc/utils/pybind.h>", "namespace py = pybind11;"]
    for index, form in enumerate(forms):
        qualified = re.findall(r"&((?:\w+::)*)" + form["name"] + r"\b", form["binding"])[0]
        body = form["declaration"].removesuffix(";") + " {}"
        if qualified:
            body = f"namespace {qualified.removesuffix('::')} {{ {body} }}"
        lines.append(f"namespace form{index} {{ {body} void bind(py::module_ m) {{ {form['binding']} }} }}")
    calls = " ".join(f'form{index}::bind(m.def_submodule("form{index}"));' for index in range(len(forms)))
    return "\n".join([*lines, f"PYBIND11_MODULE(declared, m) {{ {calls} }}", ""])


@pytest.fixture(scope="module")
def docstrings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler: sought $CXX or g++")
    folder = tmp_path_factory.mktemp("declared")
    (folder / "declared.cpp").write_text(_source(FORMS))
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = Path(torch.__file__).parent / "lib"
    done = subprocess.run(
        [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", *includes, "declared.cpp", "-o", "declared.so",
         f"-L{libraries}", "-ltorch_python", "-ltorch_cpu", "-lc10"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    names = [form["name"] for form in FORMS]
    program = (
        "import json, torch, declared; "
        f"print(json.dumps([getattr(getattr(declared, f'form{{i}}'), n).__doc__ for i, n in enumerate({names})]))"
    )
    asked = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr
    answer: list[str] = json.loads(asked.stdout)
    return answer


class _Documented:
    def __init__(self, doc: str) -> None:
        self.__doc__ = doc


def _fingerprint(docstring: str) -> str:
    found = binding.of_function(_Documented(docstring))
    assert found is not None, docstring
    return found


def test_the_lock_holds_what_pybind11_makes_of_every_release_s_declaration(docstrings: list[str]) -> None:
    derived: dict[str, dict[str, set[str]]] = {name: {} for name in NAMES}
    for form, docstring in zip(FORMS, docstrings, strict=True):
        assert docstring.startswith(form["name"] + "("), docstring
        reviewed = {version for version in form["versions"] if matches(version, REVIEWED)}
        derived[form["name"]].setdefault(_fingerprint(docstring), set()).update(reviewed)
    lock = Lock.read()
    for name in NAMES:
        locked = lock.accepted(f"transformer_engine_torch:{name}")
        assert {print_: set(versions) for print_, versions in locked.items()} == derived[name]


def test_the_lock_says_which_releases_no_build_has_shown() -> None:
    """All but the one that was seen with its own compiled module."""
    lock = Lock.read()
    for name in NAMES:
        target = f"transformer_engine_torch:{name}"
        for found, versions in lock.accepted(target).items():
            unseen = [version for version in versions if version != SEEN_RELEASE]
            assert lock.derived.get((target, found), []) == unseen
        seen = {_fingerprint(SEEN[run]["bindings"][name]) for run in ("upstream", "ours")}
        assert len(seen) == 1 and SEEN_RELEASE in lock.accepted(target)[seen.pop()]


def test_what_a_build_shows_is_no_longer_derived(tmp_path: Path) -> None:
    shutil.copy(ROOT / "patches" / "overrides.lock.json", tmp_path)
    path, target = tmp_path / "overrides.lock.json", "transformer_engine_torch:thd_out_correction"
    lock = Lock.read(path)
    found, versions = next((f, v) for (t, f), v in lock.derived.items() if t == target)
    seen = versions[0]
    assert lock.accept(target, found, seen) and not lock.accept(target, found, seen)
    lock.write()
    again = Lock.read(path)
    assert seen in again.accepted(target)[found] and seen not in again.derived[target, found]
    assert again.derived[target, found] == lock.derived[target, found] != []
