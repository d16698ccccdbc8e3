"""A place that cannot be written is told before anything is measured, with status 2 and without a traceback."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_plugins.verify import __main__ as verify
from megatron_plugins.verify.outputs import output_file, output_file_or_stdout


@pytest.mark.parametrize(
    "command",
    [
        ["ffn", "--json"],
        ["attention", "--json"],
        ["model", "--json"],
        ["model", "--out"],
        ["attention", "--out"],
    ],
    ids=" ".join,
)
def test_a_place_that_cannot_be_written_ends_the_command_at_once(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        verify.main([*command, str(tmp_path / "file" / "there")])
    assert end.value.code == 2
    assert f"sought a folder {tmp_path / 'file'}" in capsys.readouterr().err


def test_a_place_that_can_be_written_is_made(tmp_path: Path) -> None:
    assert output_file(str(tmp_path / "a" / "b.json")).parent.is_dir()
    assert output_file_or_stdout("-") == "-"
    with pytest.raises(argparse.ArgumentTypeError, match="sought a file"):
        output_file(str(tmp_path))
