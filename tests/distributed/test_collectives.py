"""Sums over ranks: one order whatever the size, the buffer, the form of the call and what came before."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bits import assert_equal_bits, count_mismatches
from procs import run_ranks
from te_overrides.kernels import accounting
from te_overrides.kernels.collectives import agreement, groups, selection
from te_overrides.kernels.collectives import reference as sums
from te_overrides.kernels.collectives.agreement import DisagreementError
from te_overrides.kernels.collectives.meeting import MissingRankError
from te_overrides.kernels.collectives.transport import all_gather
from te_overrides.kernels.tree.reference import balanced_tree

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _data(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    scale = torch.exp(torch.randn(shape, generator=generator) * 3)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def _want(world: int, shape: tuple[int, ...], dtype: torch.dtype, wide: bool = False) -> torch.Tensor:
    terms = [_data(rank, shape, dtype) for rank in range(world)]
    return balanced_tree([x.float() for x in terms]).to(dtype) if wide else balanced_tree(terms)


def _every_form(rank: int, world: int) -> int:
    compared = 0
    group = dist.group.WORLD
    for dtype, rows, wide in itertools.product(DTYPES, (0, 1, 3, 257), (False, True)):
        shape = (rows * world, 5)
        x, want = _data(rank, shape, dtype), _want(world, shape, dtype, wide)
        own = want.chunk(world)[rank] if rows else want[:0]
        name = f"{dtype} {shape} wide {wide}"
        assert_equal_bits(sums.all_reduce(x, group, wide=wide), want, f"all_reduce {name}")
        assert_equal_bits(sums.reduce_scatter(x, group, wide=wide), own, f"reduce_scatter {name}")
        under_way = sums.start_all_reduce(x, group, wide=wide), sums.start_reduce_scatter(x, group, wide=wide)
        assert_equal_bits(under_way[1].wait(), own, f"reduce_scatter under way {name}")
        assert_equal_bits(under_way[0].wait(), want, f"all_reduce under way {name}")
        assert under_way[0].wait() is under_way[0].wait()
        in_place = x.clone()
        assert sums.all_reduce(in_place, group, wide=wide, out=in_place) is in_place
        assert_equal_bits(in_place, want, f"in place {name}")
        buffer = torch.full((rows + 2, 5), torch.nan, dtype=dtype)
        sums.reduce_scatter(x, group, wide=wide, out=buffer[1 : rows + 1])
        assert_equal_bits(buffer[1 : rows + 1], own, f"into a buffer {name}")
        assert buffer[0].isnan().all() and buffer[-1].isnan().all()
        # The same data at an odd address inside a larger buffer.
        larger = torch.zeros(x.numel() + 7, dtype=dtype)
        larger[3 : 3 + x.numel()] = x.flatten()
        inside = larger[3 : 3 + x.numel()].view(shape)
        assert_equal_bits(sums.all_reduce(inside, group, wide=wide), want, f"inside a buffer {name}")
        compared += 6 * want.numel()
    return compared


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_form_has_the_bits_of_the_tree(world: int) -> None:
    assert len(set(run_ranks(world, _every_form))) == 1


def _orders(rank: int, world: int) -> None:
    """NVIDIA/nccl#2360: the result depended on what had been allocated before. Here on nothing but the values."""
    for order in itertools.permutations((1e8, 1.0, -1e8, 1.0)):
        want = torch.tensor((torch.tensor(order[0]) + order[1]) + (torch.tensor(order[2]) + order[3]))
        for size in (1, 64, 1000):
            got = sums.all_reduce(torch.full((size,), order[rank]), dist.group.WORLD)
            assert_equal_bits(got, want.expand(size).clone(), f"{order} {size}")


def test_all_24_orders_over_four_ranks() -> None:
    run_ranks(4, _orders)


def _many(rank: int, world: int) -> None:
    """NVIDIA/nccl#157: fused and separate reductions differed."""
    group = dist.group.WORLD
    a, b = _data(rank, (8, 3), torch.bfloat16), _data(rank, (16, 2, 5), torch.float32, seed=1)
    together = sums.reduce_scatter_many([a, b, a], group)
    for got, x in zip(together, (a, b, a), strict=True):
        assert_equal_bits(got, sums.reduce_scatter(x, group), "together against one after the other")


def test_several_in_one_exchange_are_one_after_the_other() -> None:
    run_ranks(4, _many)


def _laid_out(rank: int) -> dict[str, torch.Tensor]:
    """[8, 3] or [8] operands that do not lie in a row; elements differ by rank."""
    x = _data(rank, (8, 3), torch.float32)
    wide, complex_ = _data(rank, (8, 7), torch.bfloat16), torch.complex(x, x + 1)
    return {
        "transposed": x.t().contiguous().t(),
        "some columns": wide[:, 2:5],
        "one column": wide[:, 4:5],
        "every other": _data(rank, (16,), torch.float16)[::2],
        "one number expanded": _data(rank, (1,), torch.float32).expand(8),
        "one row expanded": _data(rank, (1, 3), torch.float32).expand(8, 3),
        "one column expanded": _data(rank, (8, 1), torch.bfloat16).expand(8, 3),
        "from behind, as strides": torch.as_strided(x, (8, 2), (1, 3)),
        "negated by a flag": complex_.conj().imag,
    }


def _odd_operands(rank: int, world: int) -> int:
    group, compared, table = dist.group.WORLD, 0, selection.TABLE
    everybody = [_laid_out(other) for other in range(world)]
    for name, x in _laid_out(rank).items():
        want = balanced_tree([operands[name].resolve_neg().contiguous() for operands in everybody])
        for transport in ("shares", "gather"):
            selection.TABLE = (selection.Row("group", "all_reduce", transport), *table)
            assert_equal_bits(sums.all_reduce(x, group), want, f"all_reduce, {name}")
        share = want.chunk(world)[rank]
        assert_equal_bits(sums.reduce_scatter(x, group), share, f"reduce_scatter, {name}")
        for piece, operands in zip(all_gather(x, group), everybody, strict=True):
            assert_equal_bits(piece, operands[name].resolve_neg().contiguous(), f"all_gather, {name}")
        # Into the operand's own memory, and into memory that does not lie in a row.
        into = x.resolve_neg().clone()
        sums.reduce_scatter(into, group, out=into[2:4])
        assert_equal_bits(into[2:4], share, f"into the operand, {name}")
        apart = torch.zeros(*share.shape, 2, dtype=x.dtype)[..., 1]
        assert_equal_bits(sums.reduce_scatter(x, group, out=apart), share, f"into every other place, {name}")
        compared += 5 * want.numel()
    # One element of any stride.
    number = torch.arange(10.0)[::5][:1] + rank
    assert_equal_bits(sums.all_reduce(number.expand(1), group), torch.full((1,), 6.0), "one number")
    assert_equal_bits(sums.all_reduce(torch.arange(10.0)[::5][:1], group), torch.zeros(1), "one of ten")
    return compared


def test_how_an_operand_lies_in_memory_changes_no_bit() -> None:
    assert len(set(run_ranks(4, _odd_operands))) == 1


def test_over_one_rank_buffers_that_share_memory_receive_their_own_sums() -> None:
    """[a, b] into [b, a]: over one rank a sum is a copy, and the first copy must not be what the second reads."""
    a, b = torch.arange(4.0), torch.arange(4.0) + 10
    under_way = sums.start_reduce_scatter_many([a, b], None, outs=[b, a])
    got = under_way.wait_all()
    assert got[0] is b and got[1] is a
    assert_equal_bits(b, torch.arange(4.0), "a into b")
    assert_equal_bits(a, torch.arange(4.0) + 10, "b into a")
    buffer = torch.arange(8.0)
    sums.all_reduce(buffer[:6], None, out=buffer[2:])
    assert_equal_bits(buffer[2:], torch.arange(6.0), "into itself, shifted")
    square = torch.arange(9.0).view(3, 3)
    sums.all_reduce(square, None, out=square.t())
    assert_equal_bits(square.t(), torch.arange(9.0).view(3, 3), "into itself, transposed")


@pytest.mark.parametrize("size", [1, 4])
def test_buffers_in_which_sums_would_overwrite_each_other_are_refused(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "group_size", lambda _: size)
    group, buffer = None if size == 1 else object(), torch.zeros(64)
    for out in (buffer[:1].expand(8), buffer.as_strided((2, 4), (2, 1)), buffer.as_strided((4, 2), (1, 3))):
        with pytest.raises(sums.CollectiveError, match="several of its elements lie in one place"):
            sums.all_reduce(torch.ones(out.shape), group, out=out)
    x = torch.ones(8 * size)
    with pytest.raises(sums.CollectiveError, match="outs 0 and 2 share memory"):
        sums.reduce_scatter_many([x, x, x], group, outs=[buffer[:8], None, buffer[7:15]])
    with pytest.raises(sums.CollectiveError, match="dim 0"):
        sums.reduce_scatter(torch.tensor(1.0), group)


def _with_setting(setting: str | None, x: torch.Tensor, group: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if setting is None:
            patch.delenv(selection.VARIABLE, raising=False)
        else:
            patch.setenv(selection.VARIABLE, setting)
        sums.all_reduce(x, group)


def _disagree(rank: int, world: int) -> str:
    group = dist.group.WORLD
    sums.all_reduce(torch.ones(4), group)
    found = []
    for odd in (
        lambda: sums.all_reduce(torch.ones(5 if rank == 2 else 6), group),
        lambda: sums.all_reduce(torch.ones(7, dtype=torch.float16 if rank == 1 else torch.bfloat16), group),
        lambda: (sums.reduce_scatter if rank else sums.all_reduce)(torch.ones(8), group),
        lambda: sums.all_reduce(torch.ones(9), group, wide=rank == 3),
        # Different transports would wait for each other.
        lambda: _with_setting("nodes" if rank == 2 else None, torch.ones(10), group),
        lambda: _with_setting("rccl" if rank == 1 else "group", torch.ones(11), group),
        # Longer than a line, and different where it is cut.
        lambda: sums.reduce_scatter_many([torch.ones(4)] * 60 + [torch.ones(8 if rank == 3 else 4)], group),
    ):
        with pytest.raises(DisagreementError) as error:
            odd()
        found.append(str(error.value))
    # A destroyed group takes what it agreed on with it: the next one may get its name and its id on some ranks.
    before = len(agreement._calls)
    short = dist.new_group(list(range(world)))
    agreement.require_agreement("a line", short, torch.device("cpu"))
    dist.destroy_process_group(short)
    del short
    assert len(agreement._calls) == before
    # Nothing is left behind: the next sum is right.
    assert_equal_bits(sums.all_reduce(torch.ones(4), group), torch.full((4,), 4.0), "after a disagreement")
    return " | ".join(found)


def test_ranks_that_mean_different_sums_all_say_so() -> None:
    reports = run_ranks(4, _disagree)
    assert len(set(reports)) == 1, "every rank names every rank's line"
    for words in (
        "rank 2 all_reduce of float32 (5,)",
        "rank 0 all_reduce of float32 (6,)",
        "float16 (7,)",
        "rank 0 all_reduce of float32 (8,)",
        "reduce_scatter of float32 (8,)",
        "added in float32",
        "all_reduce of float32 (10,) (so do ranks [1, 3]); rank 2 all_reduce with "
        "DETERMINISTIC_ROCM_COLLECTIVES=nodes of",
        "rank 1 all_reduce with DETERMINISTIC_ROCM_COLLECTIVES=rccl of float32 (11,)",
        "… [",
    ):
        assert words in reports[0], reports[0]


def _error(call: Callable[[], Any]) -> str:
    with pytest.raises((DisagreementError, MissingRankError)) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


def _swap(rank: int, world: int) -> tuple[int, list[str]]:
    """One rank makes two known sums of one size in the other order, then all go on alike."""
    group = dist.group.WORLD
    assert group is not None
    agreement.EVERY = 32
    a, b = torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.float16)
    for _ in range(20):
        for x in (a, b):
            assert_equal_bits(sums.all_reduce(x, group), torch.full_like(x, world), "in one order")
    order = [b, a] if rank == world - 1 else [a, b]
    wrong = sum(count_mismatches(sums.all_reduce(x, group), torch.full_like(x, world))[0] for x in order)
    calls = 2

    def go_on() -> None:
        nonlocal calls
        for _ in range(3 * agreement.EVERY):
            sums.all_reduce(a, group)
            calls += 1

    said = _error(go_on)
    assert calls <= agreement.EVERY and wrong, f"told after {calls} calls, {wrong} elements wrong"
    # The order is lost for good: nothing in this group is computed any more.
    assert _error(lambda: sums.all_reduce(a, group)) == said
    # Other groups are untouched; a comparison on request finds what no call follows.
    other = dist.new_group(list(range(world)))
    for x in (a, b, *order):
        sums.all_reduce(x, other)
    at_the_end = _error(lambda: agreement.compare(other))
    # Equal sums that ranks wait for in another order: their shares are gathered at the wait.
    third, table = dist.new_group(list(range(world))), selection.TABLE
    selection.TABLE = (selection.Row("group", "all_reduce", "shares"), *table)
    under_way = [sums.start_all_reduce(torch.full((8,), n), third) for n in (1.0, 2.0)]
    for each in under_way[::-1] if rank == 0 else under_way:
        each.wait()
    return wrong, [said, at_the_end, _error(lambda: agreement.compare(third))]


@pytest.mark.parametrize("world", [4, 8])
def test_ranks_that_swap_known_sums_are_told_within_the_calls_between_comparisons(world: int) -> None:
    results = run_ranks(world, _swap)
    print(f"elements that differ before anybody is told, a rank: {[wrong for wrong, _ in results]} of 8")
    assert all(said == results[0][1] for _, said in results), "every rank says the same"
    swapped, at_the_end, waits = results[0][1]
    bf16, fp16 = "all_reduce of bfloat16 (4,)", "all_reduce of float16 (4,)"
    others = f" (so do ranks {list(range(1, world - 1))})"
    for said, call in ((swapped, 41), (at_the_end, 3)):
        assert "or the same in another order. They part at call " + str(call) in said, said
        assert f"rank 0 {bf16}, then {fp16}" in said and f"rank {world - 1} {fp16}, then {bf16}" in said, said
    assert others in swapped and "Every rank must make the same calls" in swapped, swapped
    assert "rank 0 the shares of call 2, then the shares of call 1" in waits, waits


def _store_keys(group: dist.ProcessGroup) -> int:
    """While no rank adds any."""
    dist.barrier(group)
    keys: int = groups.store_of(group).num_keys()
    dist.barrier(group)
    return keys


def _beside_the_payload(rank: int, world: int) -> list[str]:
    """What a new call and a known one do to each other; what stays in the store; what a graph's capture asks."""
    group, said = dist.group.WORLD, []
    assert group is not None
    agreement.EVERY = 16
    sums.all_reduce(torch.ones(1), group)
    before = _store_keys(group)
    for n in range(40):
        sums.all_reduce(torch.ones(n % 20), group)
    after = _store_keys(group)
    assert after == before, f"{after - before} keys more"
    # While a graph is captured nothing is asked, and its calls count alike; what became due comes behind it.
    calls, cuda = agreement._calls[group], torch.device("cuda")
    known, meetings = next(iter(calls.known)), calls.meetings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(2 * agreement.EVERY):
            agreement.require_agreement(known, group, cuda)
        with pytest.raises(agreement.CaptureError, match="new to a graph"):
            agreement.require_agreement("new to a graph", group, cuda)
        assert calls.meetings == meetings and len(calls.since) >= 2 * agreement.EVERY
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        agreement.require_agreement(known, group, cuda)
    assert calls.meetings == meetings + 1 and len(calls.since) == 1
    # 512 bytes that are known on one rank and a new sum on the others: an error, and nobody's words are added.
    short, *later = (dist.new_group(list(range(world)), timeout=timedelta(seconds=2)) for _ in range(3))
    x = torch.ones(128)
    sums.all_reduce(x, short)
    start = time.monotonic()
    with pytest.raises((MissingRankError, RuntimeError)) as error:
        sums.all_reduce(x if rank == 1 else torch.ones(7), short)
    said.append(f"{type(error.value).__name__}: {error.value}")
    # A rank that does not come at all, rank 0, which compares, included.
    for absent, late in zip((2, 0), later, strict=True):
        dist.barrier()
        if rank == absent:
            # When the others have gone it must not go on as if they were there.
            time.sleep(4)
        said.append(_error(lambda late=late: sums.all_reduce(x, late)))
        again = _error(lambda late=late: sums.all_reduce(x, late))
        assert "an earlier call of this group failed" in again and said[-1].split(": ", 1)[1] in again, again
    assert time.monotonic() - start < 30
    return said


def test_what_ranks_exchange_about_a_sum_never_meets_its_payload() -> None:
    results = run_ranks(4, _beside_the_payload)
    everybody = list(range(4))
    for rank, (line, second, zeroth) in enumerate(results):
        for absent, said in ((1, line), (2, second), (0, zeroth)):
            came = [other for other in everybody if other != absent]
            if rank != absent:
                assert "within its timeout of 2 s" in said, said
                assert f"ranks {came} came, ranks {[absent]} did not" in said, f"rank {rank}: {said}"
        # Its own payload found nobody.
        if rank == 1:
            assert line.startswith("RuntimeError"), line


def _die(rank: int, world: int, folder: str) -> None:
    """Rank 1 dies in the middle of its calls. The survivors' errors go into files: a dead rank ends the world."""
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=5))
    for call in range(100):
        if rank == 1 and call == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            sums.all_reduce(torch.full((1000,), float(call)), group)
        except RuntimeError as error:
            with open(f"{folder}/{rank}", "w") as file:
                file.write(f"{time.monotonic() - start:.1f} {type(error).__name__}")
            time.sleep(30)


def test_no_survivor_of_a_dead_rank_hangs(tmp_path: Any) -> None:
    """Every survivor raises within the group's timeout."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    world = 4

    def main(rank: int) -> None:
        store = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
        _die(rank, world, str(tmp_path))

    processes = [context.Process(target=main, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 40
    survivors = [tmp_path / str(rank) for rank in (0, 2, 3)]
    while time.monotonic() < deadline and not all(path.exists() and path.read_text() for path in survivors):
        time.sleep(0.2)
    for process in processes:
        process.kill()
        process.join()
    for path in survivors:
        seconds, kind = path.read_text().split()
        assert float(seconds) < 10 and kind in ("RuntimeError", "DistBackendError", "DistNetworkError"), (
            path.read_text()
        )


def _many_calls(rank: int, world: int) -> tuple[int, int]:
    import resource

    group = dist.group.WORLD
    x = torch.ones(64)
    for _ in range(500):
        sums.all_reduce(x, group)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5000):
        sums.all_reduce(x, group)
        sums.reduce_scatter(x, group)
    return before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_ten_thousand_calls_leave_no_memory_behind() -> None:
    for before, after in run_ranks(2, _many_calls):
        assert after - before < 8 * 1024, f"{after - before} KiB more"


def test_what_is_not_defined_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sums.CollectiveError, match="over 3 ranks"):
        sums.check_sum_world(3)
    monkeypatch.setattr(sums, "group_size", lambda _: 4)
    group: Any = object()
    with pytest.raises(sums.CollectiveError, match=r"divisible by 4, got \(6, 2\)"):
        sums.reduce_scatter(torch.ones(6, 2), group)
    with pytest.raises(sums.CollectiveError, match="Give a buffer of that"):
        sums.reduce_scatter(torch.ones(8, 2), group, out=torch.ones(8, 2))
    with pytest.raises(sums.CollectiveError, match="Give a buffer of that"):
        sums.all_reduce(torch.ones(8), group, out=torch.ones(8, dtype=torch.float64))


def _either_way(rank, world_size):
    """Adding everything everywhere, and sharing the additions: one tree, fewer bytes."""
    group = dist.group.WORLD
    for size, dtype, wide in (
        (1, torch.float32, False),
        (1001, torch.bfloat16, False),
        (4096, torch.bfloat16, True),
    ):
        x = torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)
        found, sent = [], []
        for transport in ("shares", "gather"):
            selection.TABLE = (selection.Row("group", "all_reduce", transport),)
            with accounting.count() as counter:
                found.append(sums.all_reduce(x, group, wide=wide))
            sent.append(sum(counter.bytes_sent.values()))
        assert_equal_bits(*found, f"{size} {dtype} wide {wide}")
        if size > 1:
            # n - 1 times the operand, or (n - 1) / n of it twice; a padded element at most beside that.
            assert sent[1] == (world_size - 1) * size * x.element_size()
            assert sent[0] <= 2 * (world_size - 1) * (size // world_size + 1) * x.element_size()


@pytest.mark.parametrize("world", [4, 8])
def test_sharing_the_additions_of_an_all_reduce_changes_no_bit(world):
    run_ranks(world, _either_way)
