"""A small upstream package, an override of it, and a process to try something in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from patches import fingerprint
from patches.target import Target

ROOT = Path(__file__).resolve().parents[2]

UPSTREAM = '''
"""Upstream's module."""
def helper(x):
    return x + 1

def merge(a, b=2):
    """Adds."""
    # a comment
    return helper(a) + b

class Model:
    def forward(self, x):
        return x * 2
'''

DECLARATION = """
from patches import override

def _declare(id, target, **more):
    fields = dict(why="w", how="h", retire_when="r", evidence="docs/limits.md", distribution="upstream")
    def build(original):
        def replacement(*args, **kwargs):
            return ("ours", original(*args, **kwargs))
        return replacement
    return override(id=id, target=target, modes=("stable", "invariant"), **fields, **more)(build)

_declare("up.merge", "upstream.core:merge", also=("helper",), versions=">=1.0,<3")
_declare("up.forward", "upstream.core:Model.forward")
"""

PRELUDE = """
import pathlib, sys
import patches
from patches.errors import *
def arm(mode="invariant"):
    return patches.arm(mode, declarations=["declaration"], lock_path=pathlib.Path("lock.json"))
"""


def write(folder: Path, upstream: str = UPSTREAM, reviewed: str = UPSTREAM, version: str = "1.5") -> None:
    """Lay out the package as installed, with a lock of the source that was reviewed."""
    (folder / "upstream").mkdir(exist_ok=True)
    (folder / "upstream" / "__init__.py").write_text("")
    (folder / "upstream" / "core.py").write_text(upstream)
    (folder / f"upstream-{version}.dist-info").mkdir(exist_ok=True)
    (folder / "declaration.py").write_text(DECLARATION)
    targets = {}
    for target, also in (("upstream.core:merge", ("helper",)), ("upstream.core:Model.forward", ())):
        found = fingerprint.of_source(reviewed, Target.parse(target), also)
        targets[target] = [{"fingerprint": found, "versions": ["1.5"]}]
    (folder / "lock.json").write_text(json.dumps({"schema": 1, "targets": targets}))


def run(folder: Path, program: str, **environment: str) -> str:
    """Run a program beside the package; returns what it printed, tracebacks included, and its exit status last."""
    script = folder / "program.py"
    script.write_text(PRELUDE + textwrap.dedent(program))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **environment}
    if "DETERMINISTIC_ROCM" not in environment:
        env.pop("DETERMINISTIC_ROCM", None)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return f"{done.stdout}{done.stderr}\nexit status {done.returncode}"
