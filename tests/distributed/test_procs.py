"""The helper that every distributed test stands on: results in rank order, failures by rank, hangs killed."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from procs import RankFailure, run_ranks


def _gather(rank, world_size, x):
    parts = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(parts, x + rank)
    return rank, torch.stack(parts)


def _environment(rank, world_size, name):
    return os.environ.get(name), os.environ["RANK"], torch.get_num_threads(), "megatron" in sys.modules


def _one_rank_raises(rank, world_size):
    if rank == 1:
        raise ZeroDivisionError("the claim of rank 1 is false")
    dist.barrier()


def _one_rank_dies(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def _one_rank_never_arrives(rank, world_size):
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def _one_rank_exits(rank, world_size):
    if rank == 1:
        sys.exit(3)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_results_come_back_in_rank_order(world_size):
    x = torch.arange(3.0)
    want = torch.stack([x + rank for rank in range(world_size)])
    results = run_ranks(world_size, _gather, x)
    assert [rank for rank, _ in results] == list(range(world_size))
    assert all(torch.equal(got, want) for _, got in results)


def test_ranks_see_the_environment_of_now_and_start_clean(monkeypatch):
    monkeypatch.setenv("SET_AFTER_THE_FORK_SERVER", "yes")
    assert run_ranks(2, _environment, "SET_AFTER_THE_FORK_SERVER") == [
        ("yes", "0", 1, False),
        ("yes", "1", 1, False),
    ]
    assert run_ranks(1, _environment, "ADDED", env={"ADDED": "too"}) == [("too", "0", 1, False)]


def test_a_failure_names_the_rank_and_shows_its_own_traceback():
    with pytest.raises(RankFailure, match=r"(?s)rank 1:.*_one_rank_raises.*the claim of rank 1 is false"):
        run_ranks(2, _one_rank_raises)


def test_a_failure_does_not_wait_for_the_ranks_that_wait_for_it():
    start = time.monotonic()
    with pytest.raises(RankFailure):
        run_ranks(4, _one_rank_raises, timeout=60)
    assert time.monotonic() - start < 20


def test_a_rank_that_dies_is_named_with_its_exit_status():
    with pytest.raises(RankFailure, match=r"rank 1 died without a word, exit status -11"):
        run_ranks(2, _one_rank_dies)


def test_a_rank_that_exits_is_a_failure():
    with pytest.raises(RankFailure, match=r"(?s)rank 1:.*SystemExit: 3"):
        run_ranks(2, _one_rank_exits)


def test_a_hang_is_killed_and_shows_where_each_rank_was():
    with pytest.raises(RankFailure, match=r"(?s)still running after 3 s.*_one_rank_never_arrives"):
        run_ranks(2, _one_rank_never_arrives, timeout=3)


def test_no_ranks_is_refused():
    with pytest.raises(ValueError, match="world_size 0"):
        run_ranks(0, _gather)
