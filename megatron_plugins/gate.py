"""The gate: before a model's first forward, on every rank, or the job stops.

Hung on every GPTModel by the override of its constructor, so it works through Megatron's training loop and for
frameworks that use megatron.core alone (verl, slime, Megatron-Bridge).

Digests are compared through the process group's store, not by a collective: pipeline stages reach their first forward
at different times, and a collective there would wait for a stage that waits for this one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import patches
from megatron_plugins.arguments import HYBRID_SPEC, SPEC
from megatron_plugins.env_contract import violations
from megatron_plugins.owned_modules import foreign_modules
from patches import gate as patch_gate
from patches.errors import GateError

LEDGER_VARIABLE = "DETERMINISTIC_ROCM_LEDGER"
LEDGER_NAME = "determinism-ledger.json"
_KEY = "deterministic-rocm/digest"

_process_passed = False


def ledger_path() -> Path:
    """Where rank 0 writes the ledger: the variable, or the working directory."""
    return Path(os.environ.get(LEDGER_VARIABLE) or LEDGER_NAME)


def before_first_forward(model: Any, _inputs: Any) -> None:
    """Forward pre-hook of a GPTModel; cheap after the first call.

    Raises:
        GateError: an override that is not verified, a module that nobody owns, an environment variable that changes
            bits, or another ledger on rank 0.
    """
    if getattr(model, "deterministic_gate_passed", False):
        return
    ledger = patches.current_ledger()
    if ledger is None:
        raise GateError(
            "a model with the deterministic gate runs in a process that is not armed; import patches.auto first"
        )
    if ledger.mode == "invariant":
        _check_model(model)
    _check_process(ledger)
    model.deterministic_gate_passed = True


def _check_model(model: Any) -> None:
    foreign = foreign_modules(model)
    if foreign:
        spec = " ".join(HYBRID_SPEC if hasattr(model, "hybrid_stack_spec") else SPEC)
        raise GateError(
            f"mode invariant promises the same bits in every layout, but nobody owns {len(foreign)} modules here: "
            + ", ".join(foreign[:8])
            + (" …" if len(foreign) > 8 else "")
            + f". Build it with --spec {spec}, or run with --deterministic-rocm=stable."
        )


def _check_process(ledger: Any) -> None:
    global _process_passed
    if _process_passed:
        return
    broken = violations(ledger.mode)
    if broken:
        raise GateError("environment variables change bits: " + " ".join(broken))
    patch_gate.settle(ledger)
    rank, size = 0, 1
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        _compare_with_rank_0(ledger.digest(), rank)
    _compare_with_checkpoint(ledger.digest())
    if rank == 0:
        patch_gate.write(ledger, [ledger_path(), *_beside_checkpoints_to_come()], world_size=size)
        print(f"{patch_gate.table(ledger)}\n  ledger: {ledger_path()}", flush=True)
    _process_passed = True


def _beside(argument: str) -> list[Path]:
    """The ledger's place in Megatron's checkpoint folder ``args.save`` or ``args.load``, if the run has a local one."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    args = getattr(global_vars, "_GLOBAL_ARGS", None)
    folder = getattr(args, argument, None)
    return [Path(folder) / LEDGER_NAME] if folder and "://" not in str(folder) else []


def _beside_checkpoints_to_come() -> list[Path]:
    """The same for ``args.save``, whose folder upstream makes only when it saves.

    Raises:
        GateError: the folder cannot be made.
    """
    places = _beside("save")
    for path in places:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GateError(
                f"sought to write the ledger beside the checkpoints of --save, found {error}; name a folder that can "
                "be written"
            ) from error
    return places


def _compare_with_checkpoint(digest: str) -> None:
    """A resumed run must be the run that wrote the checkpoint; a checkpoint without a ledger says nothing.

    Raises:
        GateError: the checkpoint's neighbour has another digest.
    """
    for path in _beside("load"):
        try:
            wrote = json.loads(path.read_text())["digest"]
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError) as error:
            raise GateError(
                f"sought the ledger beside the checkpoint in {path}, found {error!r}; restore or remove it"
            ) from error
        if wrote != digest:
            raise GateError(
                f"the checkpoint in {path.parent} was written by a run with ledger digest {wrote}, this run has "
                f"{digest}: resuming would not continue that run's bits. Install what wrote it (the file lists "
                f"overrides and versions), or remove {path} to go on knowingly."
            )


def _compare_with_rank_0(digest: str, rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set(_KEY, digest)
        return
    wanted = store.get(_KEY).decode()
    if wanted != digest:
        raise GateError(
            f"rank {rank} has ledger digest {digest}, rank 0 has {wanted}: they run other code (another "
            "version, override or mode). Give every rank the same environment; `python -m patches status` on both "
            "hosts shows the difference."
        )
