"""The release scan names what moved and fails on a release nobody has reviewed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from upstream_wheels import sources

ROOT = Path(__file__).resolve().parents[2]


def scan(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/scan_upstream.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_reviewed_releases_pass_and_their_changes_show() -> None:
    done = scan("--json", sources("2.19.0"), sources("2.20.2"))
    assert done.returncode == 0, done.stderr
    rows = {row["id"]: row["folders"] for row in json.loads(done.stdout)}
    assert [f["verdict"] for f in rows["te.out_correction"]] == ["accepted", "outside"]
    assert [f["version"] for f in rows["te.lse_merge"]] == ["2.19.0", "2.20.2"]
    assert "megatron.rope" not in rows


def test_an_unreviewed_release_fails_and_is_marked(tmp_path: Path) -> None:
    shutil.copytree(sources("2.20.2"), tmp_path / "next")
    file = tmp_path / "next/transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py"
    file.write_text(file.read_text().replace("def flash_attn_fwd_softmax_lse_correction", "def renamed"))
    done = scan(sources("2.20.2"), tmp_path / "next")
    assert done.returncode == 1 and "absent" in done.stdout
    assert scan(tmp_path / "none").returncode == 2
