"""A resumed run must have the ledger of the run that wrote the checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_plugins import gate
from patches.errors import GateError


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Megatron's arguments as its training loop leaves them: both folders are the same one."""
    args = SimpleNamespace(load=str(tmp_path), save=str(tmp_path))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args))  # type: ignore[arg-type]
    return tmp_path


def test_a_checkpoint_without_a_ledger_says_nothing(checkpoint: Path) -> None:
    gate._compare_with_checkpoint("abc")


def test_the_same_digest_resumes_and_another_is_refused(checkpoint: Path) -> None:
    (path,) = gate._beside("save")
    assert path == checkpoint / gate.LEDGER_NAME
    path.write_text(json.dumps({"digest": "abc"}))
    gate._compare_with_checkpoint("abc")
    with pytest.raises(
        GateError, match=r"ledger digest abc, this run has def.*remove .*determinism-ledger\.json"
    ):
        gate._compare_with_checkpoint("def")


def test_an_unreadable_ledger_is_refused(checkpoint: Path) -> None:
    (checkpoint / gate.LEDGER_NAME).write_text("{")
    with pytest.raises(GateError, match="restore or remove it"):
        gate._compare_with_checkpoint("abc")


def test_a_run_without_megatrons_arguments_has_no_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars", raising=False)
    assert gate._beside("load") == []
