"""The gate stops a run that is not what its ledger says, before the first forward, naming what it found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from procs import RankFailure, run_ranks

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = ("patches.auto", "megatron.core.models.gpt")


def one_forward(rank: int, world: int, spoil: str) -> dict[str, Any]:
    """Build a model, spoil something, run it; returns ledger states."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from megatron_plugins.verify.model import on_cpu

    on_cpu.install()
    import patches
    import small_model

    layout = small_model.layout_of(world)
    small_model.initialize(layout)
    side = "upstream" if "local spec" in spoil else "deterministic"
    model = small_model.build(layout, torch.float32, side)
    if spoil == "alias":
        from megatron.core.models.common.embeddings import rope_utils

        sys.modules["small_model"].kept = rope_utils._apply_rotary_pos_emb_bshd.__wrapped__  # type: ignore[attr-defined]
    if spoil == "overwritten":
        from megatron.core.models.common.embeddings import rope_utils

        rope_utils._apply_rotary_pos_emb_bshd = lambda t, *_a, **_k: t
    if spoil == "module":
        model.decoder.layers[0].mlp = torch.nn.Linear(64, 64)
    if spoil == "dropout":
        model.embedding.embedding_dropout.p = 0.1
    if spoil == "digest" and rank == 1:
        ledger = patches.current_ledger()
        assert ledger is not None
        ledger.entries["megatron.rope"].fingerprint = "source:other"
    ids = torch.zeros(1, 16, dtype=torch.int64)
    mask = ~torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    for _ in range(2):
        model(ids, torch.arange(16)[None], mask)
    ledger = patches.current_ledger()
    assert ledger is not None
    return {"states": {id: entry.state for id, entry in ledger.entries.items()}, "digest": ledger.digest()}


def run(spoil: str, world: int = 1, mode: str = "invariant", **env: str) -> list[dict[str, Any]]:
    return run_ranks(world, one_forward, spoil, env={"DETERMINISTIC_ROCM": mode, **env}, imports=IMPORTS)


def test_a_sound_run_is_verified_and_writes_its_ledger(tmp_path: Path) -> None:
    import json

    path = tmp_path / "ledger.json"
    first, second = run("nothing", 2, DETERMINISTIC_ROCM_LEDGER=str(path))
    assert first == second
    assert first["states"]["megatron.rope"] == "VERIFIED"
    assert first["states"]["te.lse_merge"] == "NOT_REQUIRED"
    written = json.loads(path.read_text())
    assert (
        written["mode"] == "invariant" and written["digest"] == first["digest"] and written["world_size"] == 2
    )


@pytest.mark.parametrize(
    ("spoil", "environment", "words"),
    [
        # AMD-AGI/Primus#731: the flag is accepted and ignored by attention.
        (
            "local spec",
            {},
            ["decoder.layers.0.input_layernorm", "nobody owns", "deterministic_gpt_layer_spec"],
        ),
        ("module", {}, ["decoder.layers.0.mlp (torch.nn.modules.linear.Linear)"]),
        ("dropout", {}, ["embedding.embedding_dropout (torch.nn.modules.dropout.Dropout)"]),
        (
            "alias",
            {},
            ["megatron.rope: small_model.kept still holds upstream's _apply_rotary_pos_emb_bshd by value"],
        ),
        ("overwritten", {}, ["megatron.rope", "it was replaced after this project did"]),
        (
            "nothing",
            {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"},
            ["NVTE_ALLOW_NONDETERMINISTIC_ALGO='1'", "atomics"],
        ),
    ],
    ids=["upstream attention", "foreign module", "dropout", "alias", "overwritten", "environment"],
)
def test_the_gate_stops_the_job_and_names_what_it_found(
    spoil: str, environment: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(RankFailure) as failure:
        run(spoil, **environment)
    assert "GateError" in str(failure.value)
    for word in words:
        assert word in str(failure.value)


def test_a_rank_with_another_ledger_is_stopped() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 has ledger digest \w+, rank 0 has \w+"):
        run("digest", 2)


def test_mode_stable_lets_upstreams_modules_run() -> None:
    (result,) = run("local spec", mode="stable")
    assert result["states"]["megatron.gpt_model.outer_parts"] == "VERIFIED"
    assert "megatron.rope" not in result["states"]
