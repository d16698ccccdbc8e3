"""scripts/pretrain_gpt.sh passes arguments through and does not call a run deterministic without its ledger."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from test_training_end_to_end import MODEL, ONE

from upstream_wheels import sources

ROOT = Path(__file__).resolve().parents[2]


def launch(megatron: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import sys

    # The script takes python3 from the PATH; give it this one.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    upstream = sources("0.17.1", "megatron-core")
    env = {
        **os.environ, "PATH": path, "MEGATRON_PATH": str(megatron), "TORCHRUN_ARGS": "--nproc-per-node 1 --standalone",
        "PYTHONPATH": str(upstream), "TORCH_COMPILE_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo", **environment,
    }  # fmt: skip
    return subprocess.run(
        ["bash", str(ROOT / "scripts/pretrain_gpt.sh"), *arguments],
        cwd=megatron,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """A checkout whose pretrain_gpt.py is the small training script."""
    (tmp_path / "pretrain_gpt.py").write_text(
        f"import runpy; runpy.run_path({str(ROOT / 'tests/pretrain_small.py')!r}, run_name='__main__')\n"
    )
    return tmp_path


def test_arguments_go_through_and_the_ledger_is_required(megatron: Path) -> None:
    ledger = megatron / "ledger.json"
    result = megatron / "r.pt"
    arguments = ["--result", str(result), *MODEL, *ONE.split()]
    done = launch(megatron, *arguments, DETERMINISTIC_ROCM_LEDGER=str(ledger))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert result.exists() and '"mode": "invariant"' in ledger.read_text()


def test_a_run_without_a_ledger_is_not_called_deterministic(megatron: Path) -> None:
    (megatron / "pretrain_gpt.py").write_text("print('trained something')\n")
    done = launch(megatron, DETERMINISTIC_ROCM_LEDGER=str(megatron / "ledger.json"))
    assert done.returncode == 3
    assert "ledger" in done.stderr and "Do not use its results" in done.stderr


def test_a_missing_checkout_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path)
    assert done.returncode == 2 and f"{tmp_path}/pretrain_gpt.py" in done.stderr
