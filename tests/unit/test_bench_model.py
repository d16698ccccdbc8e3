"""Taking a training step apart: every part is timed there and back, nothing of it changes, the parts add up."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bits import assert_equal_bits
from megatron_plugins.verify.model.plan import SHAPES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))
import model as bench  # noqa: E402
import model_parts  # noqa: E402


class Clock:
    """An event that knows only its place in the order in which events were recorded."""

    now = 0

    def __init__(self, **_: Any) -> None:
        self.time = -1

    def record(self) -> None:
        """Take the next number."""
        Clock.now += 1
        self.time = Clock.now

    def elapsed_time(self, end: Clock) -> float:
        """Events between this one and `end`."""
        return float(end.time - self.time)


class Two(torch.nn.Module):
    """Two linears one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, 8] -> [n, 8]."""
        return self.b(self.a(x))


def test_a_watched_model_has_the_same_bits_and_a_time_for_each_direction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    results = []
    for watched in (False, True):
        model, given = Two(), x.clone().requires_grad_()
        parts = model_parts.Parts()
        if watched:
            parts.watch(model, "forward", "both")
            parts.watch(model.a, "forward", "a")
            parts.watch(model.b, "forward", "b")
        out = model(given)
        out.sum().backward()
        results.append([out, given.grad, *(p.grad for p in model.parameters())])
    for got, want in zip(*results, strict=True):
        assert_equal_bits(got, want, "a watched model")
    # Of "both" the six events are start, a's two, b's two, end: five steps; of a and b there is nothing in between.
    assert parts.milliseconds() == {"both": (5.0, 5.0), "a": (1.0, 1.0), "b": (1.0, 1.0)}


def test_blocks_are_replaced_by_what_they_hold_and_the_sum_is_the_step() -> None:
    measured = {
        "layer": (20.0, 40.0), "attention block": (10.0, 20.0), "MLP block": (8.0, 16.0), "norms": (1.0, 2.0),
        "QKV and output projection": (4.0, 8.0), "core attention": (3.0, 6.0), "q/k norms": (1.0, 2.0),
        "gate, up and down projection": (6.0, 12.0),
    }  # fmt: skip
    rows = model_parts.table(measured, 70.0)
    assert rows["RoPE, reshapes"] == {"forward": 2.0, "backward": 4.0}
    assert rows["SwiGLU"] == {"forward": 2.0, "backward": 4.0}
    assert not {"layer", "attention block", "MLP block"} & rows.keys()
    assert sum(row["forward"] + row["backward"] for row in rows.values()) == 70.0


def test_a_cell_is_priced_and_one_that_cannot_run_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES["qwen3-8b-layers"]
    tokens = shape.batch * shape.sequence * shape.micro_batches
    linears = 4096 * 128 * (32 + 16 + 32) + 3 * 4096 * 12288
    want = 6 * tokens * (2 * (linears + 512 * 32 * 128) + 4096 * shape.vocabulary)
    assert bench.flops(shape) == want
    assert bench.price("deterministic", shape, 8) > bench.price("deterministic", shape, 4)
    monkeypatch.setattr(bench, "missing", lambda side: None)
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("a cell ran that was not to run"))
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert bench.run(parser.parse_args(["--seconds", "1"])) == 2
    shown = capsys.readouterr().out
    for name in bench.SIDES.values():
        assert f"not run: {name} (1 s are left); priced at" in shown
