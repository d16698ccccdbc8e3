"""Bytes arrive in rank order, unchanged, for any dtype; the counter sees what left the rank."""

import pytest
import torch
import torch.distributed as dist

from bits import assert_equal_bits
from fake_streams import FakeStreams
from procs import run_ranks
from te_overrides.kernels import accounting
from te_overrides.kernels.collectives import agreement, transport
from te_overrides.kernels.collectives.agreement import DisagreementError
from te_overrides.kernels.collectives.reference import CollectiveError, exchange_columns

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def _payload(rank, dtype, shape):
    raw = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) * 0.37 + rank
    return (raw > rank + 1) if dtype is torch.bool else raw.to(dtype)


def _into_buffers(x, want, rank):
    """`all_gather` into a buffer: apart, in a larger one, in place, over its own operand, and where nothing lies in a
    row; with the bytes of the form without one."""
    group, rows = dist.group.WORLD, x.shape[0] if x.dim() else 1
    shape = (len(want) * rows, *x.shape[1:])

    def check(x, out, name):
        behind = out.untyped_storage().data_ptr()
        got = transport.all_gather(x, group, out=out)
        for each, wanted in zip(got, want, strict=True):
            assert_equal_bits(each, wanted, f"{name} {x.dtype} {tuple(x.shape)}")
            assert each.untyped_storage().data_ptr() == behind
        assert_equal_bits(out, torch.stack(want).view(shape), f"{name}, the buffer")

    check(x, torch.zeros(shape, dtype=x.dtype), "apart")
    larger = torch.zeros(shape[0] + 3, *shape[1:], dtype=x.dtype)
    check(x, larger[1 : shape[0] + 1], "in a larger one")
    assert not larger[0].any() and not larger[shape[0] + 1 :].any()
    check(x, torch.zeros(*shape, 2, dtype=x.dtype)[..., 1], "every other place")
    for name, start in (("in place", rank * rows), ("over its operand", ((rank + 1) % len(want)) * rows)):
        out = torch.zeros(shape, dtype=x.dtype)
        own = out[start : start + rows].view(x.shape)
        own.copy_(x)
        check(own, out, name)
    under_way = transport.start_all_gather(x, group, out=(out := torch.zeros(shape, dtype=x.dtype)))
    under_way.wait()
    assert_equal_bits(out, torch.stack(want).view(shape), "under way")


def _move(rank, world_size):
    for dtype in DTYPES:
        for shape in [(), (3,), (2, 3, 5), (0, 4)]:
            x = _payload(rank, dtype, shape)
            for source, got in enumerate(transport.all_gather(x, dist.group.WORLD)):
                assert_equal_bits(got, _payload(source, dtype, shape), f"all_gather {dtype} {shape}")
            _into_buffers(x, [_payload(source, dtype, shape) for source in range(world_size)], rank)
            pieces = [_payload(10 * rank + target, dtype, shape) for target in range(world_size)]
            for source, got in enumerate(transport.all_to_all(pieces, dist.group.WORLD)):
                assert_equal_bits(
                    got, _payload(10 * source + rank, dtype, shape), f"all_to_all {dtype} {shape}"
                )

    strided = torch.arange(12.0).view(3, 4).t().requires_grad_()
    gathered = transport.all_gather(strided + rank, dist.group.WORLD)
    assert all(torch.equal(got, torch.arange(12.0).view(3, 4).t() + r) for r, got in enumerate(gathered))
    assert not gathered[0].requires_grad

    # A signalling NaN and a subnormal are bytes like any other.
    odd = torch.tensor([0x7F800001, 0x00000001, -0x80000000], dtype=torch.int32).view(torch.float32)
    for got in transport.all_gather(odd, dist.group.WORLD):
        assert torch.equal(got.view(torch.int32), odd.view(torch.int32))

    with accounting.count() as counter:
        transport.all_gather(torch.zeros(5, dtype=torch.bfloat16), dist.group.WORLD)
        transport.all_to_all([torch.zeros(7)] * world_size, dist.group.WORLD)
    others = world_size - 1
    assert counter.bytes_sent == {"all_gather": 10 * others, "all_to_all": 28 * others}

    with pytest.raises(ValueError, match=f"1 pieces for a group of {world_size} ranks"):
        transport.all_to_all([torch.zeros(2)], dist.group.WORLD)
    # A group inside the world: ranks are counted within it.
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[rank % 2]
    assert [int(got) for got in transport.all_gather(torch.tensor(rank), mine)] == (
        [0, 2] if rank != 1 else [1]
    )
    return transport.group_size(mine), transport.group_rank(mine)


def test_bytes_move_in_rank_order_for_every_dtype_and_are_counted():
    assert run_ranks(3, _move) == [(2, 0), (1, 0), (2, 1)]


def _disagree(rank, world_size):
    """Movements on which the last rank means something else: refused on every rank before a byte moves."""
    group, odd, said = dist.group.WORLD, rank == world_size - 1, []
    piece = torch.zeros(6)
    for call in (
        # Uneven shards of a sequence, an empty one among them; equal bytes in another shape or dtype.
        lambda: transport.all_gather(torch.zeros(2 if odd else 3, 5), group),
        lambda: transport.all_gather(torch.zeros(0 if odd else 3, 5), group),
        lambda: transport.all_gather(torch.zeros(*((3, 2) if odd else (2, 3))), group),
        lambda: transport.all_gather(torch.zeros(4, dtype=torch.int32 if odd else torch.float32), group),
        lambda: transport.all_to_all([torch.zeros(2 if odd else 3)] * world_size, group),
        lambda: (
            transport.all_gather(piece, group) if odd else transport.all_to_all([piece] * world_size, group)
        ),
        # Of one width a piece on every rank.
        lambda: exchange_columns(torch.zeros(1, 2 * world_size - odd), group),
    ):
        with pytest.raises(DisagreementError, match="shards of different sizes are padded to one") as error:
            call()
        said.append(str(error.value))
    for _ in range(2):
        for x in (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float16)):
            transport.all_gather(x, group)
    # Two that are known, in another order: told at the next comparison.
    order = [torch.bfloat16, torch.float16]
    for dtype in order[::-1] if odd else order:
        transport.all_gather(torch.zeros(3, dtype=dtype), group)
    with pytest.raises(DisagreementError, match="They part at call 5 of the group") as error:
        agreement.compare(group)
    return [*said, str(error.value)]


@pytest.mark.parametrize("world", [4, 8])
def test_ranks_that_mean_different_movements_all_say_so(world):
    reports = run_ranks(world, _disagree)
    assert all(report == reports[0] for report in reports)
    last = world - 1
    for said, (one, other) in zip(
        reports[0],
        (
            ("all_gather of float32 (3, 5)", "all_gather of float32 (2, 5)"),
            ("all_gather of float32 (3, 5)", "all_gather of float32 (0, 5)"),
            ("all_gather of float32 (2, 3)", "all_gather of float32 (3, 2)"),
            ("all_gather of float32 (4,)", "all_gather of int32 (4,)"),
            ("all_to_all of float32 (3,)", "all_to_all of float32 (2,)"),
            ("all_to_all of float32 (6,)", "all_gather of float32 (6,)"),
            (
                f"exchange_columns of float32 (1, {2 * world})",
                f"exchange_columns of float32 (1, {2 * world - 1})",
            ),
            ("all_gather of bfloat16 (3,), then", "all_gather of float16 (3,), then"),
        ),
        strict=True,
    ):
        assert f"rank 0 {one}" in said and f"rank {last} {other}" in said, said


def _on_several_streams(rank, world_size):
    """Started on one stream, waited for on others. Real bytes over gloo; streams, events and the allocator's records
    are a log, and every tensor counts as one of a GPU."""
    streams = FakeStreams()
    with pytest.MonkeyPatch.context() as patch:
        streams.install(patch)
        for start in (
            lambda x: transport.start_all_gather(x, dist.group.WORLD),
            lambda x: transport.start_all_to_all(list(x.chunk(world_size)), dist.group.WORLD),
        ):
            x = torch.arange(4.0) + rank
            streams.current = streams.named("start")
            exchange = start(x)
            _, (sent, received), _ = exchange._under_way
            memory = {sent.untyped_storage().data_ptr(), received.untyped_storage().data_ptr()}
            assert len(memory) == 2
            del sent, received
            streams.current, streams.log = streams.named("first"), []
            arrived = exchange.wait()
            recorded = {where for what, where, name in streams.log if (what, name) == ("read", "first")}
            assert memory <= recorded, "what was sent and what arrived is kept for the stream that waits"
            assert ("event", None, "first") in streams.log
            streams.log = []
            assert exchange.wait() == arrived and streams.log == [], "nothing to do on the same stream"
            streams.current = streams.named("second")
            exchange.wait()
            assert ("wait", "first", "second") in streams.log
            assert ("read", arrived[0].untyped_storage().data_ptr(), "second") in streams.log
        # A group of one has nothing to wait for but the stream that made it.
        streams.current = streams.named("start")
        alone, streams.log = transport.start_all_gather(x, None), []
        streams.current = streams.named("second")
        alone.wait()
        assert streams.log[0] == ("wait all", "start", "second")


def test_what_moves_is_kept_for_the_stream_that_waits():
    run_ranks(2, _on_several_streams)


def test_no_group_is_a_group_of_one():
    x = torch.arange(3.0, requires_grad=True)
    with accounting.count() as counter:
        assert_equal_bits(transport.all_gather(x, None)[0], x, "all_gather")
        assert_equal_bits(transport.all_to_all([x], None)[0], x, "all_to_all")
    assert counter.bytes_sent == {}
    for value, out in ((x, torch.zeros(3)), (x[0], torch.zeros(1))):
        (got,) = transport.all_gather(value, None, out=out)
        assert_equal_bits(got, value, "into a buffer")
        assert got.data_ptr() == out.data_ptr() and not got.requires_grad
    assert (transport.group_size(None), transport.group_rank(None)) == (1, 0)


def test_pieces_and_buffers_that_do_not_fit_are_refused():
    class TwoRanks:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport.dist, "get_world_size", lambda group: 2)
        with pytest.raises(ValueError, match=r"rank 1 is torch.float32 \(3,\).*pad the pieces"):
            transport.all_to_all([torch.zeros(2), torch.zeros(3)], TwoRanks())
        with pytest.raises(ValueError, match="rank 1 is torch.int64"):
            transport.all_to_all([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], TwoRanks())
        for out in (torch.zeros(3), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int32)):
            with pytest.raises(CollectiveError, match="Give a buffer of that"):
                transport.all_gather(torch.zeros(2), TwoRanks(), out=out)
        with pytest.raises(CollectiveError, match="several of its elements lie in one place"):
            transport.all_gather(torch.zeros(2), TwoRanks(), out=torch.zeros(1).expand(4))
