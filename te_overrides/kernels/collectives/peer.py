"""Collectives through memory that the ranks of one node share, with the bits of `reference.py` (docs/collectives.md).

`Workspace` is what the kernels of `peer_kernel.py` need, whoever allocated it; `SymmetricWorkspace` allocates it with
torch's symmetric memory (CUDA and HIP, NVLink multicast not used). Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from te_overrides.kernels.collectives import peer_kernel
from te_overrides.kernels.collectives.peer_obstacles import PeerError, describe_rank, obstacle
from te_overrides.kernels.collectives.reference import Sum
from te_overrides.kernels.launching import device_of, options

WORLDS = (2, 4, 8)
"""Numbers of ranks that the kernels are built for; one list for the declaration, the launches and the tests."""
MOST_PROGRAMS = 64
PATIENCE = 300.0
"""Seconds after which a rank that has not come counts as missing, where the group's own timeout cannot be read."""
TICKS = {"cuda": 1_000_000_000, "hip": 100_000_000, "": 1000}
"""Ticks of a second on the kernels' clock; in Triton's interpreter, which has none, attempts."""
SMALL = 64 << 10
"""Bytes up to which every rank adds all of an all-reduce, which saves the second meeting."""
_ELEMENT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TL_WORD = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@dataclass
class Workspace:
    """One rank's view of the shared memory.

    Attributes:
        rank, world: this rank and how many there are.
        half_bytes: size of one of the two halves of a staging buffer.
        staging, flags: [world] int64 addresses on the device, in rank order: `2 * half_bytes` bytes, and
            `flag_words(world)` int32 that begin at 0.
        state: [2] int32 on the device, zeros at first: whose turn it is (-1: a rank was missed), programs that ended.
        missing: [1] int32 that kernel and host both reach, 0 while nobody is missing.
        patience: seconds after which a rank that has not come counts as missing; see `patience_of`.
    """

    rank: int
    world: int
    half_bytes: int
    staging: torch.Tensor
    flags: torch.Tensor
    state: torch.Tensor
    missing: torch.Tensor
    patience: float = PATIENCE

    def require_everybody(self) -> None:
        """Raise if a rank was missing in a call that has ended.

        Raises:
            PeerError: names the rank. The workspace is of no use afterwards.
        """
        if found := int(self.missing[0]):
            raise PeerError(
                f"rank {found - 1} did not come to a collective that rank {self.rank} of {self.world} was in, within "
                f"{self.patience:g} s: it died, or it makes other calls. That collective returned NaN, as does "
                "every later one of this group. End the job; the ranks' own errors say why."
            )


def patience_of(group: dist.ProcessGroup) -> float:
    """Seconds of the group's own timeout (`timeout=` of `init_process_group` and `new_group`), else `PATIENCE`.

    It is an option of the backend that serves the GPU; no version of torch offers it on the group.
    """
    gpu = torch.device("cuda")
    backend = group._get_backend(gpu) if gpu in group._device_types else None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
    return seconds if seconds > 0 else PATIENCE


def flag_words(world: int) -> int:
    """Words of a rank's table of flags: two meetings a call."""
    return 2 * MOST_PROGRAMS * world


def reduce_scatter(
    x: torch.Tensor, out: torch.Tensor, space: Workspace, *, wide: bool = False, programs: int | None = None
) -> None:
    """This rank's share of the tree over ranks of `x`.

    Args:
        x: [world * share], contiguous; bfloat16, float16 or float32.
        out: [share], contiguous; not inside `x`.
        wide: add in float32 and round once.
        programs: other than chosen by size; the same on every rank.

    Raises:
        PeerError: a size beyond the workspace, another dtype, a rank that was missing.
    """
    _require(x, space, x.numel() * x.element_size())
    if not out.numel():
        return
    block = _block(out.numel())
    _launch(
        peer_kernel.reduce_scatter_kernel, x, out, space, out.numel(), programs or _programs(out.numel(), block),
        {**_sum_constants(x, space, wide), "BLOCK": block},
    )  # fmt: skip


def all_reduce(
    x: torch.Tensor, out: torch.Tensor, space: Workspace, *, wide: bool = False, programs: int | None = None,
    shared: bool | None = None,
) -> None:  # fmt: skip
    """The tree over ranks of `x` [n], on every rank; `out` may be `x`. Other arguments as for `reduce_scatter`.

    Args:
        shared: whether ranks share the additions; default by size.
    """
    size = x.numel() * x.element_size()
    _require(x, space, size)
    if not x.numel():
        return
    block = _block(x.numel())
    shared = size > SMALL if shared is None else shared
    _launch(
        peer_kernel.all_reduce_kernel, x, out, space, x.numel(), programs or _programs(x.numel(), block),
        {**_sum_constants(x, space, wide), "BLOCK": block, "SHARED": shared},
    )  # fmt: skip


def all_gather(x: torch.Tensor, out: torch.Tensor, space: Workspace, *, programs: int | None = None) -> None:
    """Every rank's `x` [n], any dtype, one after the other into `out` [world * n] of that dtype, as bytes."""
    size = x.numel() * x.element_size()
    _require(x, space, size, sums=False)
    if not size:
        return
    # By the dtype alone: ranks whose tensors are aligned otherwise must cut the message alike.
    width = min(8, x.element_size())
    x, out = (t.view(torch.uint8).view(_WORD[width]) for t in (x, out))
    block = _block(x.numel())
    constants = {"WORLD": space.world, "DTYPE": _TL_WORD[width], "BLOCK": block}
    _launch(
        peer_kernel.all_gather_kernel, x, out, space, x.numel(), programs or _programs(x.numel(), block), constants
    )  # fmt: skip


def _require(x: torch.Tensor, space: Workspace, size: int, sums: bool = True) -> None:
    space.require_everybody()
    if space.world not in WORLDS:
        raise PeerError(f"{space.world} ranks: the kernels are built for {WORLDS}.")
    if size > space.half_bytes:
        raise PeerError(f"{size} bytes a rank do not fit into a workspace of {space.half_bytes}.")
    if sums and x.dtype not in _ELEMENT:
        raise PeerError(f"a sum of {x.dtype}: the kernels add {', '.join(str(d) for d in _ELEMENT)}.")


def _sum_constants(x: torch.Tensor, space: Workspace, wide: bool) -> dict[str, Any]:
    element = _ELEMENT[x.dtype]
    return {
        "WORLD": space.world, "LEVELS": space.world.bit_length() - 1, "DTYPE": element,
        "ADDED": tl.float32 if wide else element,
    }  # fmt: skip


def _block(count: int) -> int:
    """Elements of a block: small ones leave work for several programs."""
    return 4096 if count >= 4096 * 16 else 512


def _programs(count: int, block: int) -> int:
    """Programs of a call. All of them must run at the same time, for they wait for each other."""
    return min(MOST_PROGRAMS, triton.cdiv(count, block))


def _target(kernel: Any) -> str:
    # Triton's interpreter replaces the decorator.
    if not isinstance(kernel, triton.JITFunction):
        return ""
    return "hip" if torch.version.hip else "cuda"


def _launch(
    kernel: Any, x: torch.Tensor, out: torch.Tensor, space: Workspace, count: int, programs: int,
    constants: dict[str, Any],
) -> None:  # fmt: skip
    if programs > MOST_PROGRAMS:
        raise PeerError(f"{programs} programs: the tables of flags have room for {MOST_PROGRAMS}.")
    target = _target(kernel)
    threads = 512 if constants["BLOCK"] == 4096 else 128
    with device_of(x):
        kernel[(programs, 1, 1)](
            x, out, space.staging, space.flags, space.state, space.missing, space.rank, count, space.half_bytes,
            int(space.patience * TICKS[target]), **constants, TARGET=target, THREADS=threads, **options(threads),
        )  # fmt: skip


class SymmetricWorkspace:
    """A workspace in torch's symmetric memory that grows with what is asked of it, up to a cap.

    Args:
        group: the process group; its ranks must lie on one node, on devices that reach each other.
        cap: most bytes of one rank's message; larger ones are for another transport.

    Raises:
        PeerError: a group that cannot share memory; says which rank and why, on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, cap: int = 256 << 20) -> None:
        self.group, self.cap = group, cap
        described: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(described, describe_rank(), group=group)
        if why := obstacle(described, WORLDS):
            raise PeerError(why)
        self._space: Workspace | None = None
        self._held: list[Any] = []

    def of(self, size: int) -> Workspace:
        """The workspace for messages of `size` bytes. Collective where it has to grow: every rank asks for the same.

        Raises:
            PeerError: more than the cap, or a rank that was missing in an earlier call.
        """
        if size > self.cap:
            raise PeerError(f"{size} bytes a rank: peer-to-peer messages end at {self.cap}.")
        if self._space is None or self._space.half_bytes < size:
            self._grow(max(1 << 20, 1 << (size - 1).bit_length()))
        assert self._space is not None
        self._space.require_everybody()
        return self._space

    def require_everybody(self) -> None:
        """`Workspace.require_everybody`, where there is one."""
        if self._space is not None:
            self._space.require_everybody()

    def _grow(self, half_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.close()
        rank, world = dist.get_rank(self.group), dist.get_world_size(self.group)
        device = torch.device("cuda", torch.cuda.current_device())
        words = flag_words(world)
        # One allocation: the flags lie behind the two halves.
        memory = symmetric_memory.empty(2 * half_bytes + 4 * words, dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric_memory.rendezvous(memory, self.group)
        if (handle.rank, handle.world_size) != (rank, world):
            raise PeerError(
                f"symmetric memory numbers this process {handle.rank} of {handle.world_size}, its group {rank} of "
                f"{world}: the order of the sum would be another. Unset DETERMINISTIC_ROCM_COLLECTIVES."
            )
        dist.barrier(self.group)
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._held = [memory, handle]
        self._space = Workspace(
            rank, world, half_bytes, addresses, addresses + 2 * half_bytes,
            torch.zeros(2, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32).pin_memory(),
            patience_of(self.group),
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the memory once no rank reads it any more. Collective."""
        if self._space is None:
            return
        torch.cuda.synchronize()
        self._space.require_everybody()
        dist.barrier(self.group)
        self._space, self._held = None, []


def _on_stream(
    call: Callable[[], None], stream: torch.cuda.Stream, *tensors: torch.Tensor
) -> torch.cuda.Event:
    """`call` on the group's stream: its calls must follow each other, whichever streams they are asked for on."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    for x in tensors:
        x.record_stream(stream)
    return stream.record_event()


def _laid_out(x: torch.Tensor) -> torch.Tensor:
    """`x` as the kernels read it: its values one after the other."""
    return x.detach().resolve_conj().resolve_neg().contiguous()


def _target_of(out: torch.Tensor | None, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """Where a kernel may write what belongs into `out`."""
    if out is not None and out.is_contiguous():
        return out.detach()
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _finish(
    ended: Sequence[torch.cuda.Event], totals: Sequence[torch.Tensor], outs: Sequence[torch.Tensor | None],
    shared: SymmetricWorkspace,
) -> list[torch.Tensor]:  # fmt: skip
    for event in ended:
        torch.cuda.current_stream().wait_event(event)
    shared.require_everybody()
    return [
        total if out is None else out if out.data_ptr() == total.data_ptr() else out.copy_(total)
        for total, out in zip(totals, outs, strict=True)
    ]


def start_all_reduce_by_peers(
    x: torch.Tensor, shared: SymmetricWorkspace, stream: torch.cuda.Stream, *, wide: bool, out: torch.Tensor | None
) -> Sum:  # fmt: skip
    """`reference.start_all_reduce` through shared memory; `wait` also raises PeerError for a rank that was missing."""
    terms, total = _laid_out(x), _target_of(out, x.shape, x)
    space = shared.of(terms.numel() * terms.element_size())
    ended = _on_stream(
        lambda: all_reduce(terms.view(-1), total.view(-1), space, wide=wide), stream, terms, total
    )
    return Sum(lambda: _finish([ended], [total], [out], shared))


def start_reduce_scatter_by_peers(
    tensors: Sequence[torch.Tensor], shared: SymmetricWorkspace, stream: torch.cuda.Stream, *, wide: bool,
    outs: Sequence[torch.Tensor | None],
) -> Sum:  # fmt: skip
    """`reference.start_reduce_scatter_many` through shared memory, one tensor after the other."""
    world = dist.get_world_size(shared.group)
    read = {x.untyped_storage().data_ptr() for x in tensors}
    ended, totals = [], []
    for x, out in zip(tensors, outs, strict=True):
        shape = torch.Size((x.shape[0] // world, *x.shape[1:]))
        # A gradient bucket's shard lies inside the bucket, or inside another one of the call; the kernel writes while
        # it reads.
        inside = out is not None and out.untyped_storage().data_ptr() in read
        terms, total = _laid_out(x), _target_of(None if inside else out, shape, x)
        space = shared.of(terms.numel() * terms.element_size())

        def call(terms: Any = terms, total: Any = total, space: Any = space) -> None:
            reduce_scatter(terms.view(-1), total.view(-1), space, wide=wide)

        ended.append(_on_stream(call, stream, terms, total))
        totals.append(total)
    return Sum(lambda: _finish(ended, totals, outs, shared))


def simulated(
    world: int, half_bytes: int, device: torch.device, patience: float = PATIENCE
) -> Sequence[Workspace]:
    """Workspaces of `world` ranks in this process, on one device: what tests of four and eight ranks use on one GPU."""
    staging = [torch.zeros(2 * half_bytes, dtype=torch.uint8, device=device) for _ in range(world)]
    flags = [torch.zeros(flag_words(world), dtype=torch.int32, device=device) for _ in range(world)]
    return [in_memory(rank, staging, flags, patience) for rank in range(world)]


def in_memory(
    rank: int, staging: Sequence[torch.Tensor], flags: Sequence[torch.Tensor], patience: float
) -> Workspace:
    """The workspace of one rank over buffers that this process can reach, one a rank."""
    device = staging[0].device
    missing = torch.zeros(1, dtype=torch.int32)
    space = Workspace(
        rank, len(staging), staging[0].numel() // 2,
        torch.tensor([x.data_ptr() for x in staging], dtype=torch.int64, device=device),
        torch.tensor([x.data_ptr() for x in flags], dtype=torch.int64, device=device),
        torch.zeros(2, dtype=torch.int32, device=device), missing.pin_memory() if device.type == "cuda" else missing,
        patience,
    )  # fmt: skip
    # The addresses alone would not keep them.
    space.held = (list(staging), list(flags))  # type: ignore[attr-defined]
    return space
