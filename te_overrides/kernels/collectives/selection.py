"""Which transport carries a sum over ranks; none changes a bit (docs/numbers.md, "Collectives").

The default is a table by operation, bytes and number of ranks over the process group's own library. Other ways are
taken only where the environment asks for them, for they were never measured on several GPUs or nodes: memory that the
ranks of one node share (`peers`), a node's subtree before the upper levels (`nodes`), and both (`nodes+peers`: what
adds within a node shares memory). Where one of them cannot work the sum is refused in words. Every choice is logged
once, by logger `te_overrides.kernels.collectives`.
"""

from __future__ import annotations

import atexit
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from te_overrides.kernels.collectives.nodes import Nodes
    from te_overrides.kernels.collectives.peer import SymmetricWorkspace

VARIABLE = "DETERMINISTIC_ROCM_COLLECTIVES"
"""Must say the same on every rank; it is part of what ranks agree on before a sum's bytes move."""
SETTINGS = ("group", "nodes", "peers", "nodes+peers")
"""What it may say; unset is the first."""
PEER_CAP = 256 << 20
"""Bytes of one rank's message up to which `peers` serves it; twice that is the most that a workspace takes."""
PEER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What its kernels add."""

_log = logging.getLogger("te_overrides.kernels.collectives")


class SelectionError(RuntimeError):
    """A transport was asked for that does not exist, or that cannot carry this sum."""


@dataclass(frozen=True)
class Row:
    """An entry of the table: the first one that fits, and that the ranks' machines leave something to do, serves.

    Attributes:
        setting: value of the variable.
        operation: all_reduce or reduce_scatter.
        least_ranks: number of ranks from which it serves.
        least_bytes, most_bytes: bytes of one rank's operand between which it serves, both included.
        transport: gather (every rank adds everything), shares (every rank adds a share, then they are gathered),
            all_to_all (a rank receives its own share alone), nodes, peers.
    """

    setting: str
    operation: str
    transport: str
    least_ranks: int = 2
    least_bytes: int = 0
    most_bytes: int | None = None

    def fits(self, setting: str, operation: str, ranks: int, size: int) -> bool:
        """Whether this entry serves such a sum."""
        return (
            (self.setting, self.operation) == (setting, operation)
            and ranks >= self.least_ranks
            and size >= self.least_bytes
            and (self.most_bytes is None or size <= self.most_bytes)
        )


TABLE: tuple[Row, ...] = (
    Row("peers", "all_reduce", "peers", most_bytes=PEER_CAP),
    Row("peers", "reduce_scatter", "peers", most_bytes=PEER_CAP),
    Row("nodes", "all_reduce", "nodes", least_ranks=4),
    Row("nodes", "reduce_scatter", "nodes", least_ranks=4),
    *(
        row
        for operation in ("all_reduce", "reduce_scatter")
        for row in (
            Row("nodes+peers", operation, "nodes", least_ranks=4),
            Row("nodes+peers", operation, "peers", most_bytes=PEER_CAP),
        )
    ),
    *(
        row
        for setting in SETTINGS
        for row in (
            Row(setting, "all_reduce", "shares", least_ranks=4, least_bytes=256 << 10),
            Row(setting, "all_reduce", "gather"),
            Row(setting, "reduce_scatter", "all_to_all"),
        )
    ),
)


def said() -> str:
    """The variable's value as it stands, or the first of `SETTINGS`."""
    return os.environ.get(VARIABLE, SETTINGS[0])


def setting_from_environment() -> str:
    """The variable's value, or the first of `SETTINGS`.

    Raises:
        SelectionError: a value that means nothing.
    """
    value = said()
    if value not in SETTINGS:
        raise SelectionError(
            f"{VARIABLE}={value!r}: it is one of {', '.join(SETTINGS)}; unset is {SETTINGS[0]}. It must say the same "
            "on every rank."
        )
    return value


def look_up(setting: str, operation: str, ranks: int, size: int) -> str:
    """The transport of a sum of `size` bytes a rank over `ranks` ranks, by the table alone.

    Raises:
        SelectionError: an operation, or a setting, that the table does not list.
    """
    return _fitting(setting, operation, ranks, size)[0]


def _fitting(setting: str, operation: str, ranks: int, size: int) -> list[str]:
    """Transports of all entries that fit, in order; raises as `look_up`."""
    found = [row.transport for row in TABLE if row.fits(setting, operation, ranks, size)]
    if not found:
        raise SelectionError(f"no entry for {operation} of {size} bytes over {ranks} ranks with {setting!r}.")
    return found


@dataclass
class _Known:
    """What this process knows of a group; nothing of it holds the group, but for shared memory."""

    hosts: list[str] | None = None
    nodes: Nodes | None = None
    peers: SymmetricWorkspace | None = None
    stream: Any = None
    logged: set[tuple[str, str]] = field(default_factory=set)


# By the group itself, which may go: after `destroy_process_group` nothing here keeps it. Shared memory does, until
# `close`: a peer may still read it.
_known: WeakKeyDictionary[dist.ProcessGroup, _Known] = WeakKeyDictionary()


def _of(group: dist.ProcessGroup) -> _Known:
    return _known.setdefault(group, _Known())


def host_of_this_rank() -> str:
    """A name that the ranks of one machine share and no others."""
    from te_overrides.kernels.collectives.peer_obstacles import describe_rank

    return describe_rank().host


def _hosts(group: dist.ProcessGroup) -> list[str]:
    """The ranks' machines, in rank order. Collective the first time."""
    known = _of(group)
    if known.hosts is None:
        hosts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(hosts, host_of_this_rank(), group=group)
        known.hosts = hosts
    return known.hosts


def transport_of(operation: str, x: torch.Tensor, size: int, group: dist.ProcessGroup) -> str:
    """The transport of a sum over `group`, logged once. Its ranks have agreed on operation, shapes and dtypes before.

    Args:
        operation: all_reduce or reduce_scatter.
        x: an operand.
        size: bytes of all operands of one rank.

    Raises:
        SelectionError: a value of the variable that means nothing; a transport that it asks for and that cannot carry
            this sum.
        CollectiveError: `nodes` where ranks of a node are no neighbours.
        PeerError: `peers` where ranks cannot share memory.
    """
    setting, ranks = setting_from_environment(), dist.get_world_size(group)
    why = f"{VARIABLE}={setting}" if VARIABLE in os.environ else "the table"
    fitting = _fitting(setting, operation, ranks, size)
    if fitting[0] in ("nodes", "peers"):
        _require_no_capture(fitting[0], x)
    transport = next(one for one in fitting if _has_work(one, setting, x, group))
    if transport != fitting[0]:
        passed = ", ".join(fitting[: fitting.index(transport)])
        why += f"; {passed} passed over, for the ranks' machines or the operand leave nothing to it"
    if transport == "nodes":
        nodes_of_group(group)
    if transport == "peers":
        _require_peers(x, group)
    known = _of(group)
    if (operation, transport) not in known.logged:
        known.logged.add((operation, transport))
        where = f"{ranks} ranks of group {group.group_name}"
        _log.info("%s over %s, first of %d bytes: %s (%s)", operation, where, size, transport, why)
    return transport


def _has_work(transport: str, setting: str, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the ranks' machines leave a transport something to do. Collective the first time, where that is asked."""
    if transport == "nodes":
        # One node, or one rank a node: the sum over nodes is the flat one.
        return 1 < len(set(_hosts(group))) < dist.get_world_size(group)
    if transport == "peers" and setting != "peers":
        return len(set(_hosts(group))) == 1 and _can_share(x, dist.get_world_size(group))
    # Where it was asked for by name it is not passed over but refused, by `_require_peers`.
    return True


def _can_share(x: torch.Tensor, ranks: int) -> bool:
    """Whether the kernels for shared memory are built for such a sum; the same on every rank that has agreed on it."""
    if not x.is_cuda or x.dtype not in PEER_DTYPES:
        return False
    from te_overrides.kernels.collectives.peer import WORLDS

    return ranks in WORLDS


def _require_no_capture(transport: str, x: torch.Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise SelectionError(
            f"a sum over ranks by {transport} was about to be captured into a graph: it asks ranks on the host, which "
            f"a graph does not replay, and was never run there. Unset {VARIABLE}, or leave the sum out of the graph."
        )


def _require_peers(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    if not x.is_cuda:
        raise SelectionError(
            f"{VARIABLE}=peers, and a sum over ranks of a tensor on {x.device.type}: memory is shared between GPUs. "
            "Unset the variable."
        )
    if x.dtype not in PEER_DTYPES:
        raise SelectionError(
            f"{VARIABLE}=peers, and a sum over ranks of {x.dtype}: its kernels add bfloat16, float16 and float32. "
            "Unset the variable."
        )
    peers_of(group)


def peers_of(group: dist.ProcessGroup) -> tuple[SymmetricWorkspace, Any]:
    """The group's shared memory, and the stream on which its calls follow each other. Collective the first time.

    Raises:
        PeerError: ranks that cannot share memory.
    """
    known = _of(group)
    if known.peers is None:
        from te_overrides.kernels.collectives.peer import SymmetricWorkspace

        known.peers = SymmetricWorkspace(group, PEER_CAP)
        known.stream = torch.cuda.Stream()
    return known.peers, known.stream


def nodes_of_group(group: dist.ProcessGroup) -> Nodes:
    """The groups inside and across the nodes of `group`. Collective over `group` the first time.

    Raises:
        CollectiveError: ranks of a node that are no neighbours, numbers that are no powers of two.
    """
    known = _of(group)
    if known.nodes is None:
        from te_overrides.kernels.collectives.nodes import nodes_of

        known.nodes = nodes_of(group, _hosts(group))
        # Made for this group alone, they go with it.
        finalize(group, _destroy, known.nodes).atexit = False
    return known.nodes


def _destroy(nodes: Nodes) -> None:
    for group in (nodes.inside, nodes.across):
        # The whole world may have been destroyed before.
        if group is not None and group in distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def close() -> None:
    """Let go of all shared memory once no rank reads it. Collective over every group that shares some, in the order in
    which they began to.

    Raises:
        PeerError: a rank was missing in an earlier call.
    """
    for known in list(_known.values()):
        if known.peers is not None:
            known.peers.close()
    _known.clear()


@atexit.register
def _at_exit() -> None:
    """Without the others, who may be gone: what this process launched ends; what a peer has mapped outlives it."""
    if any(known.peers is not None for known in _known.values()):
        torch.cuda.synchronize()
    _known.clear()
