"""`python -m megatron_plugins.verify attention`: equal, different and not run are three statuses, none is silent."""

import json
import os

import pytest
import torch

from megatron_plugins.verify.__main__ import main
from megatron_plugins.verify.attention import rows
from megatron_plugins.verify.attention.plan import BY_NAME, RESULTS, ROWS


def _run(tmp_path, capsys, *arguments):
    status = main(
        ["attention", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path), "--json", *arguments]
    )
    said = capsys.readouterr()
    return status, said.out, said.err


def test_every_row_that_a_cpu_can_run_is_equal_and_the_report_names_what_ran(tmp_path, capsys):
    """CP 1/2/4/8 times TP 1/2/4/8 in both layouts, groups of groups, packing, pages: all rows, 8 processes."""
    status, out, _ = _run(tmp_path, capsys)
    report = json.loads(out)
    assert status == 0 and set(report["rows"]) == {row.name for row in ROWS}
    meshes = {(row.cp, row.tp, row.layout) for row in ROWS if row.kind == "mesh"}
    assert len(meshes) == 15 and {cp * tp for cp, tp, _ in meshes} == {2, 4, 8}
    for name, result in report["rows"].items():
        assert result["ran"] and set(result["columns"]) == set(BY_NAME[name].columns)
        assert all(wrong == 0 and total > 0 for wrong, total in result["columns"].values()), name
    whole = report["rows"]["one sequence alone"]["columns"]
    assert report["rows"]["CP4xTP2 zigzag"]["columns"] == whole, "all ranks together compare everything once"
    assert report["environment"]["transport"] == "gloo" and report["environment"]["ranks"] == 8
    assert json.loads((tmp_path / "verify-attention.json").read_text()) == report
    assert (tmp_path / "verify-attention.png").stat().st_size > 1000


def test_one_wrong_bit_of_one_rank_is_status_1_and_named(tmp_path, capsys, monkeypatch):
    mesh = rows.KINDS["mesh"]

    def wrong(row, baseline, group, rank):
        for name, got, want in mesh(row, baseline, group, rank):
            if rank == 3 and name == "dK":
                got.view(torch.int16).view(-1)[5] ^= 1
            yield name, got, want

    monkeypatch.setitem(rows.KINDS, "mesh", wrong)
    status, out, err = _run(tmp_path, capsys, "--rows", "CP4 contiguous", "TP2")
    columns = {name: result["columns"] for name, result in json.loads(out)["rows"].items()}
    assert status == 1 and "CP4 contiguous: 1 of" in err
    wrong_at = {name: {c: n for c, (n, _) in found.items() if n} for name, found in columns.items()}
    assert wrong_at == {"CP4 contiguous": {"dK": 1}, "TP2": {}} and set(columns["TP2"]) == set(RESULTS)


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_rank_that_fails_is_status_2_with_its_words(tmp_path, capsys, monkeypatch, how):
    def fail(row, baseline, group, rank):
        if rank == 1 and how == "raises":
            raise ValueError("a rank's own words")
        if rank == 1:
            os._exit(7)
        yield from ()

    monkeypatch.setitem(rows.KINDS, "mesh", fail)
    status, out, err = _run(tmp_path, capsys, "--rows", "TP2")
    assert status == 2 and json.loads(out)["rows"]["TP2"] == {"ran": False}
    assert ("a rank's own words" if how == "raises" else "rank 1 ended with status 7") in err


def test_what_cannot_run_is_status_2(tmp_path, capsys):
    for arguments, words in (
        (("--rows", "CP3"), "no row 'CP3'; known: repeats"),
        (("--length", "150"), "give a multiple of 48"),
        (("--device", "cuda"), "torch sees no GPU"),
    ):
        if arguments[0] == "--device" and torch.cuda.is_available():
            continue
        status, _, err = _run(tmp_path, capsys, *arguments)
        assert status == 2 and words in err
