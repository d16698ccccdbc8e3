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


def _save_into(folder: str) -> None:
    sys.modules["megatron.training.global_vars"]._GLOBAL_ARGS.save = folder


def test_the_folder_of_checkpoints_to_come_is_made(checkpoint: Path) -> None:
    """Upstream makes it when it saves, long after the ledger is written."""
    _save_into(str(checkpoint / "new" / "run"))
    assert gate._beside_checkpoints_to_come() == [checkpoint / "new" / "run" / gate.LEDGER_NAME]
    assert (checkpoint / "new" / "run").is_dir()


def test_a_folder_of_checkpoints_that_cannot_be_made_is_refused(checkpoint: Path) -> None:
    (checkpoint / "file").write_text("")
    _save_into(str(checkpoint / "file" / "run"))
    with pytest.raises(GateError, match=r"of --save, found .*file/run.*name a folder"):
        gate._beside_checkpoints_to_come()


def test_checkpoints_in_an_object_store_have_no_neighbour(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint)
    _save_into("msc://bucket/run")
    assert gate._beside_checkpoints_to_come() == [] and list(checkpoint.iterdir()) == []
