"""Two levels of groups, shares of the key heads, and ranks that mean different attention; on 4 and 8 gloo ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist

from attention_cases import RESULTS, everything, operands, packed_everything
from bits import assert_equal_bits
from patches.errors import NotCoveredError
from procs import run_ranks
from te_overrides.context_parallel_runtime import build
from te_overrides.kernels import accounting
from te_overrides.kernels.attention import context_parallel, gathering
from te_overrides.kernels.attention.context_parallel import context_parallel_attention, packed_attention
from te_overrides.kernels.attention.gathering import BOUND_VARIABLE, Traffic
from te_overrides.kernels.attention.ranks import Levels
from te_overrides.kernels.attention.reference import AttentionError
from te_overrides.kernels.collectives.agreement import DisagreementError
from te_overrides.kernels.zigzag.reference import from_canonical, packed_rank_rows

SEQ, GROUPS = 48, 4
PACKED = [0, 16, 16, 48]


def _tensors():
    return operands(SEQ, 1, 8, GROUPS, 8)


def _mine(x, size, rank, layout="zigzag"):
    return from_canonical(x, size, rank, layout)


def _compare(got, want, size, rank, what, layout="zigzag"):
    for name in RESULTS:
        whole = want[name].permute(2, 0, 1) if name == "lse" else want[name]
        part = got[name].permute(2, 0, 1) if name == "lse" else got[name]
        assert_equal_bits(part, _mine(whole, size, rank, layout), f"{name}, {what}, rank {rank}")


def _levels(size, inner):
    """The two groups of this rank, as parallel_state makes them, and groups of strided ranks instead."""
    made = {}
    for consecutive in (True, False):
        rows = torch.arange(size).view(-1, inner) if consecutive else torch.arange(size).view(inner, -1).T
        inners = [dist.new_group(row.tolist()) for row in rows]
        outers = [dist.new_group(column.tolist()) for column in rows.T]
        at = (rows == dist.get_rank()).nonzero()
        made[consecutive] = [inners[at[0, 0]], outers[at[0, 1]]] if at.numel() else None
    return made[True], made[False]


def attn_forward_func_with_cp(
    is_training, q, k, v, cp_group, cp_global_ranks, cp_comm_type, qkv_format, attn_mask_type,
    softmax_scale=None, window_size=None,
):  # fmt: skip
    """What upstream's entry point takes, as far as it enters."""
    raise AssertionError("the original must not run")


def _through_the_entry(tensors, **options):
    q, k, v, grad = tensors
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = build(attn_forward_func_with_cp)(
        True, q, k, v, qkv_format="sbhd", attn_mask_type="causal", **options
    )
    out.backward(grad)
    return {"out": out.detach(), "dQ": q.grad, "dK": k.grad, "dV": v.grad}


def _hierarchies(rank, world_size, want, packed):
    for size, inner in ((4, 2), (8, 2), (8, 4)):
        groups, strided = _levels(size, inner)
        flat = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        local = [_mine(x, size, rank) for x in _tensors()]
        what = f"a2a+p2p, {inner} inner of {size}"
        levels = Levels.of(groups, range(size))
        with accounting.count() as counter:
            got = everything(*local, cp_group=levels)
        with accounting.count() as alone:
            _compare(everything(*local, cp_group=flat), want, size, rank, f"one group of {size}")
        _compare(got, want, size, rank, what)
        assert counter.bytes_sent == alone.bytes_sent, "two levels bring what one brings"
        every_type = {
            comm: _through_the_entry(
                local,
                cp_group=groups if comm == "a2a+p2p" else flat,
                cp_global_ranks=range(size),
                cp_comm_type=comm,
            )
            for comm in ("p2p", "all_gather", "a2a", "a2a+p2p")
        }
        for (comm, results), name in itertools.product(every_type.items(), ("out", "dQ", "dK", "dV")):
            assert_equal_bits(
                results[name], _mine(want[name], size, rank), f"{name}, {comm}, CP={size}, rank {rank}"
            )
        rows = packed_rank_rows(PACKED, size, rank, "zigzag")
        tensors = [x.squeeze(1)[rows] for x in _tensors()]
        got = packed_everything(*tensors, cp_group=levels, cu_seqlens=PACKED)
        for name in RESULTS:
            part = packed[name][..., rows] if name == "lse" else packed[name][rows]
            assert_equal_bits(got[name], part, f"{name}, packed, {what}, rank {rank}")
        # Both have the right sizes; only the ranks tell.
        if inner * inner != size:
            with pytest.raises(AttentionError, match="cannot be derived"):
                Levels.of(strided, range(size))
        with pytest.raises(NotCoveredError, match="cannot be derived"):
            _through_the_entry(
                local, cp_group=groups[::-1], cp_global_ranks=range(size), cp_comm_type="a2a+p2p"
            )
        with pytest.raises(NotCoveredError, match="both must name one order"):
            _through_the_entry(
                local, cp_group=flat, cp_global_ranks=list(range(size))[::-1], cp_comm_type="p2p"
            )


def test_every_communication_type_and_two_levels_of_groups_have_the_bits_of_one_rank():
    packed = packed_everything(*(x.squeeze(1) for x in _tensors()), cu_seqlens=PACKED)
    run_ranks(8, _hierarchies, everything(*_tensors()), packed)


def _shares(rank, world_size, want):
    local = [_mine(x, world_size, rank) for x in _tensors()]
    sent = []
    for bound in (1 << 30, 25_000, 12_000, 1):
        with accounting.count() as counter:
            got = everything(*local, cp_group=dist.group.WORLD, gather_bytes=bound)
        _compare(got, want, world_size, rank, f"gathered operands within {bound} bytes")
        sent.append(counter.bytes_sent)
    assert sent[1:] == sent[:1] * 3, sent
    assert [_count(local, bound) for bound in (1 << 30, 25_000, 12_000, 1)] == [1, 2, 4, 4]

    # A share that forgets which heads are its own is seen.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "_heads", lambda groups, per_group: slice(0, per_group * GROUPS // 2))
        wrong = everything(*local, cp_group=dist.group.WORLD, gather_bytes=25_000)["out"]
        with pytest.raises(AssertionError, match="elements differ"):
            assert_equal_bits(wrong, _mine(want["out"], world_size, rank), "out")

    # Rank 1 holds its rows as another layout has them, takes another mask, other boundaries, another bound.
    for changes in ({"layout": "contiguous"}, {"causal": False}, {"window": (4, 0)}, {"gather_bytes": 7}):
        with pytest.raises(DisagreementError, match="rank 1 attention"):
            everything(*local, cp_group=dist.group.WORLD, **(changes if rank == 1 else {}))
    tensors = [x.squeeze(1)[:8] for x in local[:3]]
    bounds = [0, 16, 32] if rank == 1 else [0, 32, 32]
    with pytest.raises(DisagreementError, match="2 sequences"):
        packed_attention(*tensors, cu_seqlens=bounds, cp_group=dist.group.WORLD)


def _count(local, bound):
    plan = context_parallel._Plan.of(dist.group.WORLD, "zigzag", [], context_parallel.Mask(), None, bound)
    return len(plan.shares(*local[:3], backward=True))


def test_shares_of_heads_change_no_bit_and_no_byte_and_ranks_must_mean_one_attention():
    run_ranks(4, _shares, everything(*_tensors()))


def _most_bytes(events):
    """Most bytes held at a time by tensors, over what was held before."""
    held, most = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


class _Loopback:
    """An exchange over `size` ranks that all sent what this one did: no bytes move, the same memory is held."""

    def __init__(self, payload, size):
        self._sent, self._received = payload, payload.new_empty(size * payload.numel())
        self._received.view(size, -1).copy_(payload)
        self._size = size

    def wait(self):
        return list(self._received.chunk(self._size))


def _attention_without_arithmetic(patch, size):
    """What remains is what the schedule holds."""
    patch.setattr(gathering, "levels_of", lambda _: ["a group"])
    patch.setattr(context_parallel, "levels_of", lambda _: [])
    patch.setattr(context_parallel, "cp_size_of", lambda _: size)
    patch.setattr(context_parallel, "cp_rank_of", lambda _: 0)
    patch.setattr(gathering, "start_all_gather", lambda payload, _: _Loopback(payload, size))
    patch.setattr(context_parallel, "attention_statistics", lambda grad, out, lse: (lse, lse))
    patch.setattr(
        context_parallel,
        "attention_forward",
        lambda q, *_, **__: (q, torch.zeros(q.shape[1], q.shape[2], q.shape[0])),
    )
    patch.setattr(context_parallel, "attention_dq", lambda q, *_, **__: q)
    patch.setattr(context_parallel, "attention_dkv", lambda q, k, v, *_, **__: (k, v))


def _measured(run):
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        result = run()
    return result, _most_bytes(profile.profiler.kineto_results.events())


@pytest.mark.parametrize(
    ("bound", "shares"), [(1 << 40, (1, 1)), (15 << 20, (1, 2)), (5 << 20, (4, 8)), (1, (8, 8))]
)
def test_what_a_schedule_holds_is_what_its_bound_was_compared_with(monkeypatch, bound, shares):
    """Peak of torch's own allocations in one forward and one backward, results left out."""
    ranks, rows, heads, groups, d = 4, 512, 16, 8, 64
    _attention_without_arithmetic(monkeypatch, ranks)
    q, k, v, grad = operands(rows, 1, heads, groups, d)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    (out, lse), forward = _measured(lambda: context_parallel_attention(*leaves, gather_bytes=bound))
    _, backward = _measured(lambda: torch.autograd.grad(out, leaves, grad))
    keys = ranks * rows * 2 * d * 2
    queries = ranks * rows * (heads // groups) * (2 * d * 2 + 2 * 4)
    results = lse.nbytes, 0
    if shares[0] > 1:
        results = out.nbytes + lse.nbytes, 0
    if shares[1] > 1:
        results = results[0], q.nbytes + k.nbytes + v.nbytes
    for count, passes, measured, result in zip(
        shares, ((keys,), (keys, queries)), (forward, backward), results, strict=True
    ):
        traffic = Traffic(passes, ranks)
        assert traffic.shares(groups, bound, overlap=False) == count
        stated = traffic.peak(groups, count)
        assert stated <= bound or count == groups
        assert 0.85 * stated <= measured <= 1.05 * stated + result, (stated, measured, result)


def test_the_bound_is_read_from_the_environment_and_refused_in_words(monkeypatch):
    tensors = operands(4, 1, 2, 1, 8)
    for value in ("0", "-3", "much"):
        monkeypatch.setenv(BOUND_VARIABLE, value)
        with pytest.raises(AttentionError, match=f"{BOUND_VARIABLE}='{value}'"):
            context_parallel_attention(*tensors[:3])
    monkeypatch.setenv(BOUND_VARIABLE, "1")
    assert context_parallel.bound_from_environment() == 1 << 20
