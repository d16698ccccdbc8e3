"""The set-up either does nothing, quickly, or stops in words: what was sought, what was found, what to do."""

import os
import shutil
import subprocess
import time

import pytest
from tree import ROOT


@pytest.fixture
def checkout(tmp_path):
    """A folder with the two files that the set-up is made of."""
    (tmp_path / "scripts").mkdir()
    for name in ("setup_env.sh", "requirements.txt"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    return tmp_path


def executable(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def set_up(checkout, **environment):
    return subprocess.run(
        ["bash", "-c", "set -euo pipefail; source scripts/setup_env.sh; echo ready"],
        cwd=checkout,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_without_a_python_it_says_what_is_needed_and_makes_nothing(checkout):
    run = set_up(checkout, PYTHON="/nowhere/python3")
    assert run.returncode == 1
    assert "Sought: Python 3.10 or newer with the modules venv and ensurepip." in run.stderr
    assert "/nowhere/python3: not found" in run.stderr
    assert "PYTHON=/path/to/python3" in run.stderr
    assert not (checkout / ".venv").exists()


def test_an_old_python_is_named_with_its_version(checkout):
    old = executable(
        checkout / "python3.8",
        'case "$2" in *platform*) echo 3.8.10 /usr/bin/python3.8;; *version_info*) exit 1;; esac',
    )
    run = set_up(checkout, PYTHON=str(old))
    assert run.returncode == 1
    assert f"{old}: is 3.8.10 /usr/bin/python3.8, too old" in run.stderr


def test_a_python_without_venv_is_named_with_the_package_to_install(checkout):
    bare = executable(
        checkout / "python3",
        'case "$2" in *platform*) echo 3.11.2 /usr/bin/python3;; *ensurepip*) exit 1;; esac',
    )
    run = set_up(checkout, PYTHON=str(bare))
    assert run.returncode == 1
    assert "is 3.11.2 /usr/bin/python3, without venv and ensurepip" in run.stderr
    assert "python3-venv" in run.stderr


def test_a_broken_venv_is_not_repaired_behind_your_back(checkout):
    (checkout / ".venv").mkdir()
    run = set_up(checkout)
    assert run.returncode == 1
    assert f"rm -r {checkout}/.venv" in run.stderr


def test_a_pip_failure_shows_its_last_lines_and_what_to_do(checkout):
    executable(
        checkout / ".venv" / "bin" / "python",
        'case "$*" in\n*"-m pip"*) echo "ERROR: no matching distribution"; exit 1;;\n'
        '*"import torch"*) exit 1;;\n*platform*) echo 3.11.2 here;;\nesac',
    )
    run = set_up(checkout)
    assert run.returncode == 1
    assert "ERROR: no matching distribution" in run.stderr
    assert "Sought: pip install torch==2.13.0, for Python 3.11.2 here." in run.stderr
    assert not (checkout / ".venv" / "setup.stamp").exists()


def test_a_stamped_venv_is_used_at_once_and_a_changed_list_is_not(checkout):
    python = executable(checkout / ".venv" / "bin" / "python", 'echo "Python 3.11.2"')
    stamp = subprocess.run(
        [
            "bash",
            "-c",
            "{ $0 -V && cat scripts/requirements.txt scripts/setup_env.sh; } | cksum",
            str(python),
        ],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (checkout / ".venv" / "setup.stamp").write_text(stamp)
    start = time.monotonic()
    run = set_up(checkout)
    assert time.monotonic() - start < 1
    assert (run.returncode, run.stdout, run.stderr) == (0, "ready\n", "")

    with open(checkout / "scripts" / "requirements.txt", "a") as requirements:
        requirements.write("another\n")
    assert "1/4 using the .venv that is there" in set_up(checkout).stderr
