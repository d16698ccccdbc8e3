"""A doctored copy of a real upstream release is named by `check`, refused at import twice in a row, and stops `run`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from upstream_wheels import sources

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    ("transformer-engine", "2.20.2", "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py",
     "flash_attn_fwd_softmax_lse_correction"),
    ("megatron-core", "0.16.1", "megatron/core/models/common/embeddings/rope_utils.py", "_apply_rotary_pos_emb_bshd"),
]  # fmt: skip


def _doctored(folder: Path, distribution: str, version: str, file: str, function: str) -> None:
    """A copy in which the function's body has one statement more."""
    shutil.copytree(sources(version, distribution), folder, dirs_exist_ok=True)
    path = folder / file
    lines = path.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith(f"def {function}("))
    end = next(i for i in range(at, len(lines)) if lines[i].rstrip().endswith(":"))
    lines.insert(end + 1, "    _ = None\n")
    path.write_text("".join(lines))


@pytest.mark.parametrize(("distribution", "version", "file", "function"), CASES, ids=lambda x: str(x)[-24:])
def test_check_names_the_function_that_moved(
    tmp_path: Path, distribution: str, version: str, file: str, function: str
) -> None:
    command = [sys.executable, "-m", "patches", "check", "--tree"]
    clean = subprocess.run(
        [*command, str(sources(version, distribution))], cwd=ROOT, capture_output=True, text=True
    )
    assert clean.returncode == 0, clean.stdout
    _doctored(tmp_path, distribution, version, file, function)
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (moved,) = [line for line in done.stdout.splitlines() if "MOVED" in line]
    assert function in moved and version in moved and "Sought source:" in moved
    assert "patches pin" in done.stderr


def test_importing_the_doctored_copy_is_refused_twice(tmp_path: Path) -> None:
    distribution, version, file, function = CASES[1]
    _doctored(tmp_path, distribution, version, file, function)
    program = (
        "import patches.auto, importlib\n"
        "for attempt in (1, 2):\n"
        "    try:\n"
        "        importlib.import_module('megatron.core.models.common.embeddings.rope_utils')\n"
        "        print('LOADED')\n"
        "    except Exception as error:\n"
        "        print(attempt, type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "DETERMINISTIC_ROCM": "invariant"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "LOADED" not in done.stdout
    for attempt in (1, 2):
        assert f"{attempt} DriftError" in done.stdout, done.stdout + done.stderr
    assert function in done.stdout and "patches pin megatron.rope" in done.stdout


@pytest.mark.parametrize("edited", [False, True], ids=["as reviewed", "body edited"])
def test_run_stops_a_script_whose_upstream_drifted(tmp_path: Path, edited: bool) -> None:
    """The script itself swallows nothing and asks for nothing: `run` alone must end it, with the sentence."""
    distribution, version, file, function = CASES[1]
    tree = tmp_path / "upstream"
    if edited:
        _doctored(tree, distribution, version, file, function)
    else:
        tree = sources(version, distribution)
    script = tmp_path / "script.py"
    script.write_text(
        f"from megatron.core.models.common.embeddings.rope_utils import {function} as f\n"
        "print('RAN ON with', getattr(f, '__deterministic_rocm__', 'upstream'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "patches", "run", str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tree), "DETERMINISTIC_ROCM": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if not edited:
        assert done.returncode == 0 and "RAN ON with megatron.rope" in done.stdout, done.stdout + done.stderr
        return
    assert done.returncode == 2 and "RAN ON" not in done.stdout, done.stdout
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("DriftError: ")]
    assert "Traceback" not in done.stderr
    for words in (function, version, "Sought source:", "Found source:", "patches pin megatron.rope"):
        assert words in sentence, sentence
