"""A place that cannot be written is told before anything is measured, with status 2 and without a traceback."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from megatron_plugins.verify import __main__ as verify
from megatron_plugins.verify.outputs import (
    add_json,
    json_alone,
    output_file,
    output_file_or_stdout,
    write_json,
)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
OF_THEIR_OWN = {
    "scan_upstream.py": "takes folders behind it",
    "collectives.py": "",
    "collectives_checks.py": "",
}


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


def test_a_python_without_what_the_checks_need_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    assert verify.main(["attention"]) == 2
    said = capsys.readouterr().err
    assert f"for {sys.executable}, found no torch. Take the Python" in said and said.count("\n") == 1


def test_a_place_that_can_be_written_is_made(tmp_path: Path) -> None:
    assert output_file(str(tmp_path / "a" / "b.json")).parent.is_dir()
    assert output_file_or_stdout("-") == "-"
    with pytest.raises(argparse.ArgumentTypeError, match="sought a file"):
        output_file(str(tmp_path))


@pytest.mark.parametrize(
    "words", [[], ["--json"], ["--json", "FILE"]], ids=["no --json", "no file", "a file"]
)
def test_json_without_a_file_has_standard_output_to_itself(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_json(parser)
    file = tmp_path / "made" / "report.json"
    args = parser.parse_args([str(file) if word == "FILE" else word for word in words])
    with json_alone(args.json):
        print("a table")
    write_json(args.json, [1, 2])
    shown = capsys.readouterr()
    if words == ["--json"]:
        assert json.loads(shown.out) == [1, 2] and shown.err == "a table\n"
    else:
        assert shown.out == "a table\n" and shown.err == ""
    assert file.exists() == ("FILE" in words)


def test_every_script_s_json_is_this_one() -> None:
    own = sorted(path.name for path in SCRIPTS.rglob("*.py") if '"--json"' in path.read_text())
    unlike = [name for name in own if name not in OF_THEIR_OWN]
    assert unlike == [], f"{len(unlike)} scripts declare a --json of their own: {unlike}"
