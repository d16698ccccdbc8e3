"""TransformerEngine's releases against the reviewed fingerprints, and a release that lost a function."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from upstream_wheels import ROOT, TRANSFORMER_ENGINE, sources

CONTEXT_PARALLEL = "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py"


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "te_cpu")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "DETERMINISTIC_ROCM": "", **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.parametrize("version", TRANSFORMER_ENGINE)
def test_every_target_of_a_supported_release_is_as_reviewed(version: str) -> None:
    check = _python("-m", "patches", "check", "--json", "--tree", str(sources(version)))
    findings = {f["id"]: f["verdict"] for f in json.loads(check.stdout) if f["id"].startswith("te.")}
    compiled = {id for id, verdict in findings.items() if verdict == "not checkable here"}
    assert compiled == {"te.thd_second_half_lse_correction", "te.thd_out_correction"}, check.stdout
    assert set(findings.values()) == {"accepted", "outside", "not checkable here"} and not check.returncode
    assert sum(verdict == "accepted" for verdict in findings.values()) == (9 if version == "2.20.2" else 10)


def test_a_lost_function_is_named_by_a_drift_error_that_no_import_guard_swallows(tmp_path: Path) -> None:
    """verl#6959: a private upstream name was imported before the version check, and the ImportError said nothing."""
    tree = tmp_path / "te"
    shutil.copytree(sources("2.16.0"), tree, ignore=shutil.ignore_patterns("*.so", "examples"))
    module = tree / CONTEXT_PARALLEL
    source = module.read_text()
    module.write_text(
        source.replace("def flash_attn_fwd_out_correction_init(", "def flash_attn_fwd_out_correction_start(")
    )
    program = """
import importlib, sys
for _ in range(2):
    try:
        try:
            importlib.import_module("armed")
        except ImportError:
            print("swallowed")
    except Exception as error:
        sys.modules.pop("armed", None)
        print(type(error).__name__, error)
"""
    run = _python("-c", program, DETERMINISTIC_ROCM="stable", TE_SOURCES=str(tree))
    lines = [line for line in run.stdout.splitlines() if "DriftError" in line or "swallowed" in line]
    assert len(lines) == 2, run.stdout + run.stderr
    for line in lines:
        assert line.startswith("DriftError") and "flash_attn_fwd_out_correction_init" in line
        assert "te.out_correction_init" in line and "2.16.0" in line


def test_a_checkout_installed_in_place_is_armed_and_an_unknown_release_says_how_to_name_it(
    tmp_path: Path,
) -> None:
    """Without a version, functions of later releases would be sought in an earlier one."""
    package = sources("2.16.0") / "transformer_engine"
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so", "examples"))
    program = "import armed; from patches import current_ledger as c; print({e.state for e in c().entries.values()})"
    environment = {"DETERMINISTIC_ROCM": "stable", "TE_SOURCES": str(tmp_path)}
    unknown = _python("-c", program, **environment)
    assert unknown.returncode and "DriftError" in unknown.stderr and ".egg-info lies beside" in unknown.stderr
    info = tmp_path / "transformer_engine.egg-info" / "PKG-INFO"
    info.parent.mkdir()
    info.write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.16.0.dev0+abc\n")
    known = _python("-c", program, **environment)
    assert known.returncode == 0 and "APPLIED" in known.stdout and "REFUSED" not in known.stdout, known.stderr


def test_a_release_whose_ring_lies_elsewhere_is_refused_not_left_as_it_is(tmp_path: Path) -> None:
    """TransformerEngine 2.2 has the same functions in attention.py: without a refusal nothing would be replaced."""
    tree = sources("2.2.0")
    program = f"""
import ast, pathlib, sys, types
import patches.auto
# Upstream's own functions in its own module, without the compiled half that the rest of it imports.
source = pathlib.Path({str(tree)!r}, "transformer_engine/pytorch/attention.py")
for name in ("transformer_engine", "transformer_engine.pytorch"):
    module = types.ModuleType(name)
    module.__path__ = [str(pathlib.Path({str(tree)!r}, *name.split(".")))]
    sys.modules[name] = module
import importlib.abc, importlib.machinery
class Functions(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, **_):
        kept = [n for n in ast.parse(data).body if getattr(n, "name", "").endswith("lse_correction")]
        return compile(ast.Module(body=kept, type_ignores=[]), path, "exec")
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "transformer_engine.pytorch.attention":
            return importlib.util.spec_from_file_location(name, source, loader=Functions(name, str(source)))
import importlib.util
sys.meta_path.insert(1, Finder())
import builtins, torch
builtins.jit_fuser, builtins.torch = (lambda f: f), torch
for _ in range(2):
    try:
        import transformer_engine.pytorch.attention
        print("IMPORTED")
    except Exception as error:
        print(type(error).__name__, error)
"""
    run = _python("-c", program, DETERMINISTIC_ROCM="stable")
    assert run.stdout.count("NotCoveredError sought TransformerEngine 2.3 or newer") == 2, (
        run.stdout + run.stderr
    )
    assert "IMPORTED" not in run.stdout
    check = _python("-m", "patches", "check", "te.before_context_parallel_module", "--tree", str(tree))
    assert check.returncode == 0 and "as reviewed, transformer-engine 2.2.0" in check.stdout, check.stdout
