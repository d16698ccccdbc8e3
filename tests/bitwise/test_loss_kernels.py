"""The kernels of loss and embedding, in Triton's interpreter, against the references: all TP degrees, every dtype."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

ROOT = Path(__file__).parents[2]


def counts(*arguments: str) -> dict[str, dict[str, list[int]]]:
    script = ROOT / "tests" / "triton_cpu" / "loss_in_interpreter.py"
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", ["portable", "fused"])
def test_loss_and_embedding_have_the_references_bits(path: str) -> None:
    found = {f"{group} {name}": v for group, rows in counts(path).items() for name, v in rows.items()}
    wrong = {name: f"{m} of {n} differ" for name, (m, n) in found.items() if m or not n}
    assert not wrong, wrong
    assert any("TP=8" in name for name in found)


def test_another_order_of_lanes_is_noticed() -> None:
    """Mutation: at TP=8 the ranks' lanes in another bracket are other bits."""
    losses = counts("mutant")["losses"]
    assert sum(m for name, (m, _) in losses.items() if "TP=8" in name) > 0
