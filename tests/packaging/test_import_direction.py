"""Imports point one way: megatron_plugins -> te_overrides.kernels, te_overrides -> patches -> standard library."""

import ast
import subprocess
import sys

import pytest
from tree import ROOT, TOP_PACKAGES, shown, sources

OURS = (*TOP_PACKAGES, "scripts", "tests")

# First match wins: who may import what of ours.
ALLOWED = (
    ("te_overrides.kernels", ("te_overrides.kernels",)),
    ("te_overrides", ("te_overrides", "patches")),
    ("megatron_plugins", ("megatron_plugins", "te_overrides.kernels", "patches")),
    ("patches", ("patches",)),
)


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path, source):
    """(line, absolute module name) of everything that a file imports, inside functions too."""
    package = (
        module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def within(name, package):
    return name == package or name.startswith(package + ".")


def wrong_imports(path, source):
    importer = module_name(path)
    allowed = next(names for package, names in ALLOWED if within(importer, package))
    for line, name in imports(path, source):
        ours = name.split(".")[0] in OURS
        if ours and not any(within(name, package) for package in allowed):
            yield f"{shown(path)}:{line}: imports {name}; {importer} may import {', '.join(allowed)}"
        if within(importer, "patches") and not ours and name.split(".")[0] not in sys.stdlib_module_names:
            yield f"{shown(path)}:{line}: imports {name}; patches may import the standard library alone"


def test_imports_point_one_way():
    found = [line for path in sources(*TOP_PACKAGES) for line in wrong_imports(path, path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("patches/x.py", "import torch"),
        ("patches/x.py", "from te_overrides import kernels"),
        ("te_overrides/x.py", "def f():\n    from megatron_plugins import layer_specs"),
        ("te_overrides/kernels/x.py", "from patches import override"),
        ("te_overrides/kernels/gemm/x.py", "from ... import overrides"),
        ("megatron_plugins/x.py", "from te_overrides import lse_merge"),
        ("megatron_plugins/x.py", "importlib.import_module('scripts.step0_report')"),
    ],
)
def test_a_wrong_import_is_found(importer, source):
    assert len(list(wrong_imports(ROOT / importer, source))) == 1


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("patches/x.py", "from .errors import DriftError\nimport importlib.util, json"),
        (
            "te_overrides/x.py",
            "from patches import override\nfrom te_overrides.kernels.bits import count_mismatches",
        ),
        ("te_overrides/kernels/gemm/x.py", "from ..bits import count_mismatches"),
        ("megatron_plugins/x.py", "from te_overrides.kernels import bits\nimport megatron.core"),
        ("megatron_plugins/x.py", "from te_overrides import kernels"),
    ],
)
def test_a_right_import_is_not(importer, source):
    assert list(wrong_imports(ROOT / importer, source)) == []


def test_importing_the_patch_layer_imports_no_torch():
    modules = [module_name(path) for path in sources("patches")]
    passive = [name for name in modules if name.split(".")[-1] not in ("__main__", "auto")]
    program = (
        f"import importlib, sys\nfor name in {passive!r}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'megatron', 'transformer_engine', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
