"""Ranks that cannot share memory are named before anything waits for them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from te_overrides.kernels.collectives import peer
from te_overrides.kernels.collectives.peer_obstacles import PeerError, RankPlace, describe_rank, obstacle

FOUR = [RankPlace("node a", f"GPU-{i}", "", 4) for i in range(4)]


def test_four_gpus_of_one_node_can() -> None:
    assert obstacle(FOUR, peer.WORLDS) is None


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (FOUR[:3], "3 ranks"),
        ([*FOUR[:3], RankPlace("node b", "GPU-3", "", 4)], "rank 3 runs on another machine"),
        ([*FOUR[:3], RankPlace("node a", "GPU-1", "", 4)], "ranks 1 and 3 use one GPU"),
        (
            [RankPlace("node a", f"GPU-{i}", str(i), 1) for i in range(4)],
            "rank 0 sees 1 of the group's 4 GPUs",
        ),
        ([*FOUR[:3], RankPlace("node a", "", "", 0)], "rank 3 has no GPU"),
    ],
)
def test_what_stands_in_the_way_is_said(places: list[RankPlace], words: str) -> None:
    """The fourth is a masked process, as Ray and verl start them: CUDA_VISIBLE_DEVICES leaves one GPU to each."""
    assert words in (obstacle(places, peer.WORLDS) or "")


def test_this_process_has_a_place() -> None:
    assert describe_rank().host and describe_rank().devices == torch.cuda.device_count()


def test_a_message_larger_than_the_workspace_is_refused() -> None:
    space = peer.simulated(2, 64, torch.device("cpu"))[0]
    with pytest.raises(PeerError, match="128 bytes a rank do not fit into a workspace of 64"):
        peer.all_reduce(torch.zeros(32), torch.zeros(32), space)
    with pytest.raises(PeerError, match="torch.int32"):
        peer.all_reduce(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), space)
    with pytest.raises(PeerError, match=r"3 ranks.*\(2, 4, 8\)"):
        peer.all_gather(torch.zeros(2), torch.zeros(6), peer.simulated(3, 64, torch.device("cpu"))[0])
