"""Ctrl-C, as a terminal sends it: to the whole group of processes. One line, status 130, nobody left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc")


def of_session(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_ctrl_c_ends_a_whole_model_check_in_one_line_and_leaves_no_rank(tmp_path: Path) -> None:
    words = ["model", "--device", "cpu", "--no-upstream", "--rows", "TP2", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "megatron_plugins.verify", *words],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        # The command, its engine, and ranks.
        while len(of_session(process.pid)) < 4:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
        assert said == "stopped by the user (Ctrl-C); nothing written\n"
        left = of_session(process.pid)
        assert left == [], f"{len(left)} processes are left"
        assert list(tmp_path.glob("verify-model-*")) == [], "temporary files are removed"
    finally:
        for pid in of_session(process.pid):
            os.kill(pid, signal.SIGKILL)
