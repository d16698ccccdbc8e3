"""The table of transports: who serves which sum, and what is refused before anything moves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from te_overrides.kernels.collectives import agreement, selection

CAP = selection.PEER_CAP


@pytest.mark.parametrize(
    ("setting", "operation", "ranks", "size", "transport"),
    [
        ("group", "all_reduce", 8, (256 << 10) - 1, "gather"),
        ("group", "all_reduce", 8, 256 << 10, "shares"),
        ("group", "all_reduce", 2, 1 << 30, "gather"),
        ("group", "reduce_scatter", 4, 0, "all_to_all"),
        ("nodes", "all_reduce", 4, 1, "nodes"),
        ("nodes", "reduce_scatter", 2, 1, "all_to_all"),
        ("peers", "all_reduce", 8, CAP, "peers"),
        ("peers", "all_reduce", 8, CAP + 1, "shares"),
        ("peers", "reduce_scatter", 2, CAP + 1, "all_to_all"),
        ("nodes+peers", "all_reduce", 8, CAP, "nodes"),
        ("nodes+peers", "reduce_scatter", 2, CAP, "peers"),
        ("nodes+peers", "reduce_scatter", 2, CAP + 1, "all_to_all"),
    ],
)
def test_the_first_entry_that_fits_serves(
    setting: str, operation: str, ranks: int, size: int, transport: str
) -> None:
    assert selection.look_up(setting, operation, ranks, size) == transport


def test_what_was_never_measured_is_never_the_default() -> None:
    assert selection.SETTINGS[0] == "group"
    assert not {row.transport for row in selection.TABLE if row.setting == "group"} & {"nodes", "peers"}
    assert {row.setting for row in selection.TABLE} == set(selection.SETTINGS)
    with pytest.raises(selection.SelectionError, match="no entry for all_gather"):
        selection.look_up("group", "all_gather", 4, 1)


def test_a_setting_that_means_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(selection.VARIABLE, raising=False)
    assert selection.setting_from_environment() == "group"
    monkeypatch.setenv(selection.VARIABLE, "nccl")
    with pytest.raises(selection.SelectionError, match="'nccl': it is one of group, nodes, peers, nodes"):
        selection.setting_from_environment()


class OnGpu:
    is_cuda = True

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype


@pytest.mark.parametrize(
    ("ranks", "nodes", "size", "x", "transport"),
    [
        (16, 2, 1, OnGpu(), "nodes"),
        (8, 1, 1, OnGpu(), "peers"),
        (2, 1, CAP, OnGpu(), "peers"),
        # Machines, kernels or memory that leave it the group's library.
        (2, 2, 1, OnGpu(), "gather"),
        (16, 16, 1, OnGpu(), "gather"),
        (16, 1, 1, OnGpu(), "gather"),
        (8, 1, CAP + 1, OnGpu(), "shares"),
        (8, 1, 1, OnGpu(torch.float64), "gather"),
        (8, 1, 1, torch.zeros(1), "gather"),
    ],
)
def test_a_sum_within_a_node_shares_memory_and_one_across_does_not(
    monkeypatch: pytest.MonkeyPatch, ranks: int, nodes: int, size: int, x: Any, transport: str
) -> None:
    class Group:
        group_name = "some"

    group: Any = Group()
    asked: list[str] = []
    monkeypatch.setenv(selection.VARIABLE, "nodes+peers")
    monkeypatch.setattr(selection, "_known", {})
    monkeypatch.setattr(selection.dist, "get_world_size", lambda _: ranks)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(selection, "_hosts", lambda _: [str(rank * nodes // ranks) for rank in range(ranks)])
    monkeypatch.setattr(selection, "nodes_of_group", lambda _: asked.append("nodes"))
    monkeypatch.setattr(selection, "peers_of", lambda _: asked.append("peers"))
    assert selection.transport_of("all_reduce", x, size, group) == transport
    assert asked == [transport] * (transport in ("nodes", "peers"))


@pytest.mark.parametrize("setting", ["nodes", "peers", "nodes+peers"])
def test_a_captured_graph_is_refused_by_name(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selection.VARIABLE, setting)
    monkeypatch.setattr(selection.dist, "get_world_size", lambda _: 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x: Any = OnGpu()
    group: Any = object()
    with pytest.raises(
        selection.SelectionError, match=f"by {setting.partition('+')[0]} was about to be captured"
    ):
        selection.transport_of("all_reduce", x, 8, group)


def test_a_captured_sum_that_was_never_agreed_on_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        pass

    group: Any = Group()
    known = "all_reduce of float32 (4,)"
    agreement._calls[group] = agreement._Calls(known={known: (1, known)})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    agreement.require_agreement("all_reduce of float32 (4,)", group, torch.device("cuda"))
    with pytest.raises(
        agreement.CaptureError, match=r"all_reduce of float32 \(8,\)\. Ranks agree on the host"
    ):
        agreement.require_agreement("all_reduce of float32 (8,)", group, torch.device("cuda"))


def test_ranks_that_share_memory_wait_as_long_as_their_group() -> None:
    pytest.importorskip("triton")
    from te_overrides.kernels.collectives import peer

    alone, minutes = torch.distributed.HashStore(), timedelta(minutes=7)
    torch.distributed.init_process_group("gloo", store=alone, rank=0, world_size=1, timeout=minutes)
    try:
        world: Any = torch.distributed.group.WORLD
        assert peer.patience_of(world) == 420.0
        without_gpu: Any = torch.distributed.new_group([0], backend="cpu:gloo")
        assert peer.patience_of(without_gpu) == peer.PATIENCE == 300.0
    finally:
        torch.distributed.destroy_process_group()
