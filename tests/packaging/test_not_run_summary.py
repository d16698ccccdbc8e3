"""A check that did not run must not read as a pass."""

import os
import shutil
import subprocess
import sys

import pytest
from tree import ROOT

SUITE = """
import pytest

@pytest.mark.gpu
def test_one(): ...

@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("n", range(3))
def test_two(n): ...

@pytest.mark.skip(reason="no compiler here")
def test_other(): ...

def test_runs(): ...
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_gpu_suites_are_listed_as_not_run_with_the_command_that_runs_them(tmp_path, workers):
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    (tests / "test_device.py").write_text(SUITE)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(workers), "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for line in (
        "not run: 1 in tests/test_device.py (needs 1 GPU, found 0)",
        "not run: 3 in tests/test_device.py (needs 2 GPUs, found 0)",
        "bash scripts/test.sh -m gpu tests/test_device.py",
        "skipped: 1 in tests/test_device.py (no compiler here)",
    ):
        assert line in run.stdout
    assert "1 passed, 5 skipped" in run.stdout.splitlines()[-1]
