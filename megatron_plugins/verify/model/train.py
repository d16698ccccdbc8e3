"""What one rank does for a row: train the model for some steps, then compare its part of every result.

Megatron's own training stack: DistributedDataParallel, the forward-backward function of the pipeline degree,
finalize_model_grads, the optimizer with gradient clipping. Nothing is gathered: a rank cuts out of the baseline's whole
tensors what it holds itself and counts the elements whose bits differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megatron_plugins.verify.model import build as building
from megatron_plugins.verify.model.plan import Row, Setting, Shape
from te_overrides.kernels.bits import count_mismatches


@dataclass
class Piece:
    """One rank's part of one result.

    Attributes:
        column, name: which result; `name` is a parameter's where there is one an each.
        replica: ranks that hold the same part say the same here.
        of_whole: cuts this part out of the baseline's whole tensor.
    """

    column: str
    name: str
    replica: tuple[int, ...]
    value: torch.Tensor
    of_whole: Callable[[torch.Tensor], torch.Tensor]


def tokens(shape: Shape) -> torch.Tensor:
    """[steps, micro-batches, batch, sequence + 1] int64, from a fixed seed."""
    size = (shape.steps, shape.micro_batches, shape.batch, shape.sequence + 1)
    return torch.randint(0, shape.vocabulary, size, generator=torch.Generator().manual_seed(7))


def spec_of(side: str) -> Any:
    """The transformer layer spec of a side."""
    if side == "deterministic":
        from megatron_plugins.layer_specs import deterministic_gpt_layer_spec

        return deterministic_gpt_layer_spec
    if side == "ring":
        from megatron_plugins.verify.model.te_ring import ring_spec

        return ring_spec()
    from megatron.core.models.gpt import gpt_layer_specs

    if side == "te":
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    return gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)


def log_prob(side: str, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """logits [B, s, V / TP], labels [B, s] -> log-probability of the labels [B, s], by the side's own function."""
    if side == "deterministic":
        from te_overrides.kernels.cross_entropy.ops import vocab_parallel_log_prob

        group = parallel_state.get_tensor_model_parallel_group()
        chosen: torch.Tensor = vocab_parallel_log_prob(
            logits, labels, group if dist.get_world_size(group) > 1 else None
        )
        return chosen
    by_position = logits.transpose(0, 1).float().contiguous()
    loss: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(
        by_position, labels.transpose(0, 1).contiguous()
    )
    return -loss.transpose(0, 1)


def positions_of(row: Row, sequence: int) -> torch.Tensor:
    """Positions of this context-parallel rank's tokens."""
    rank = int(parallel_state.get_context_parallel_rank())
    if row.cp == 1:
        return torch.arange(sequence)
    if row.cp_layout == "contiguous":
        return torch.arange(sequence).chunk(row.cp)[rank]
    chunks = torch.arange(sequence).chunk(2 * row.cp)
    return torch.cat([chunks[rank], chunks[2 * row.cp - 1 - rank]])


def cut_contiguously(model: Any) -> None:
    """Tell a deterministic model that its context-parallel ranks hold consecutive positions.

    Megatron cuts zigzag alone, so nothing in a configuration says it; rotary angles are cut by the model itself.
    """
    for module in model.modules():
        if hasattr(module, "layout"):
            module.layout = replace(module.layout, cp_layout="contiguous")
    rotary = model.rotary_pos_emb
    forward = rotary.forward

    def contiguous(length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs["packed_seq"] = True  # upstream's word for: do not cut
        whole: torch.Tensor = forward(length, *args, **kwargs)
        size, rank = (
            int(parallel_state.get_context_parallel_world_size()),
            int(parallel_state.get_context_parallel_rank()),
        )
        return whole.chunk(size)[rank]

    rotary.forward = contiguous


class Trainer:
    """A model of one row with its optimizer. `changes` are further values of Megatron's configuration."""

    def __init__(self, setting: Setting, row: Row, **changes: Any) -> None:
        self.setting, self.row = setting, row
        shape, device = setting.shape, setting.device
        dtype = building.DTYPES[setting.dtype]
        self.config = building.configuration(shape, row, dtype, device, **changes)
        self.model = building.build(shape, self.config, spec_of(setting.side))
        if row.cp_layout == "contiguous":
            cut_contiguously(self.model)
        if device == "cuda":
            self.model.cuda(torch.cuda.current_device())
        wrapped = self.model if dtype is torch.float32 else Float16Module(self.config, self.model)
        self.ddp = DistributedDataParallel(
            config=self.config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            module=wrapped,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                clip_grad=1.0,
                bf16=dtype is torch.bfloat16,
                fp16=dtype is torch.float16,
                params_dtype=dtype,
            ),
            [self.ddp],
        )
        self.packed = row.kind == "packed"
        positions = positions_of(row, shape.sequence)
        self.length = shape.sequence * (shape.batch if self.packed else 1)
        self.rows = 1 if row.kind == "alone" or self.packed else shape.batch
        self.positions = positions
        self.seen: dict[str, list[torch.Tensor]] = {"logits": [], "log-probs": [], "loss": []}
        self._labels: torch.Tensor | None = None
        self._keep = False
        if parallel_state.is_pipeline_last_stage():
            self.model.output_layer.register_forward_hook(self._see_logits)

    def _see_logits(self, _module: Any, _inputs: Any, output: Any) -> None:
        if self._keep:
            logits = output[0].detach().transpose(0, 1).contiguous()
            assert self._labels is not None
            self.seen["logits"].append(logits)
            self.seen["log-probs"].append(log_prob(self.setting.side, logits, self._labels))

    def _batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """ids, labels, positions of this rank, each [B, s] (or [1, B * s] packed)."""
        ids, labels = (part[:, self.positions] for part in (rows[:, :-1], rows[:, 1:]))
        where = self.positions.expand(ids.shape[0], -1)
        if self.packed:
            ids, labels, where = (x.reshape(1, -1) for x in (ids, labels, where))
        return tuple(x.contiguous().to(self.setting.device) for x in (ids, labels, where))

    def _extra(self) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """Attention mask and further arguments of the model."""
        device = self.setting.device
        if self.packed:
            from megatron.core.packed_seq_params import PackedSeqParams

            shape = self.setting.shape
            bounds = torch.arange(0, self.length + 1, shape.sequence, dtype=torch.int32, device=device)
            return None, {
                "packed_seq_params": PackedSeqParams(
                    qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=shape.sequence,
                    max_seqlen_kv=shape.sequence,
                )
            }  # fmt: skip
        length = self.setting.shape.sequence
        return ~torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril(), {}

    def _forward(self, iterator: Any, module: Any) -> Any:
        ids, labels, where = self._batch(next(iterator))
        mask, extra = self._extra()
        self._labels = labels
        losses = module(ids, where, mask, labels=labels, **extra)

        def per_token(output: torch.Tensor) -> Any:
            if self._keep:
                self.seen["loss"].append(output.detach().float())
            count = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
            return output.float().sum(), count, {}

        return losses, per_token

    def step(self, batches: torch.Tensor, keep: bool) -> None:
        """Forward and backward over micro-batches [m, B, S + 1], gradients finalized; `finish` ends the step.

        Args:
            keep: remember logits, log-probabilities and losses.
        """
        self._keep = keep
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.row.kind == "alone":
            batches = batches[:, :1]
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(batches),
            model=[self.ddp],
            num_microbatches=len(batches),
            seq_length=self.length,
            micro_batch_size=self.rows,
            forward_only=False,
        )
        self._keep = False

    def finish(self) -> float:
        """Clip, and let Adam step; the gradient norm."""
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def forward_only(self, rows: torch.Tensor) -> None:
        """A forward without gradient on ``rows`` [B, n]: what an RL reference model does."""
        ids = rows.to(self.setting.device)
        length = ids.shape[1]
        mask = ~torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device).tril()
        with torch.no_grad():
            self.model(
                ids, torch.arange(length, device=ids.device).expand(ids.shape[0], -1).contiguous(), mask
            )

    # ---- results -----------------------------------------------------------------------------------------------

    def token_pieces(self) -> list[Piece]:
        """Logits, log-probabilities and losses of the kept step: [micro-batches, B, s, …]."""
        if not parallel_state.is_pipeline_last_stage():
            return []
        tp, cp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
        shape, degree, positions = self.setting.shape, self.row.tp, self.positions
        kept = 1 if self.row.kind == "alone" else shape.batch

        def tokens_of(whole: torch.Tensor) -> torch.Tensor:
            return whole[:, :kept, positions]

        pieces = []
        for column, parts in self.seen.items():
            value = torch.stack(parts)
            if self.packed:
                value = value.view(len(parts), shape.batch, -1, *value.shape[3:])
            if column == "logits":
                pieces.append(
                    Piece(column, "", (cp, tp), value, lambda w: tokens_of(w.chunk(degree, -1)[tp]))
                )
            else:
                pieces.append(Piece(column, "", (cp,), value, tokens_of))
        return pieces

    def parameter_pieces(self, column: str, value_of: Callable[[Any], torch.Tensor]) -> list[Piece]:
        """One piece a parameter of this rank."""
        tp, degree = parallel_state.get_tensor_model_parallel_rank(), self.row.tp
        pieces = []
        for name, parameter in self.model.named_parameters():
            whole_name = building.global_name(self.model, name)
            value = value_of(parameter).detach().clone()
            cut = building.is_sharded(parameter)

            def of_whole(whole: torch.Tensor, name: str = name, value: torch.Tensor = value) -> torch.Tensor:
                return building.shard(name, whole, value, degree, tp)

            pieces.append(Piece(column, whole_name, (tp,) if cut else (), value, of_whole))
        return pieces


def _master(parameter: Any) -> torch.Tensor:
    """The float32 weight that Adam keeps, where it keeps one."""
    main = getattr(parameter, "main_param", None)
    weight: torch.Tensor = parameter if main is None else main.view(parameter.shape)
    return weight


def train(setting: Setting, row: Row, on_step: Callable[[int], None]) -> list[Piece]:
    """All steps of one model, and every result of them; `on_step` hears the number of steps that are done."""
    data = tokens(setting.shape)
    trainer = Trainer(setting, row)
    norms = []
    pieces: list[Piece] = []
    for index, batches in enumerate(data):
        trainer.step(batches, keep=index == 0)
        if index == 0:
            pieces += trainer.token_pieces()
            if row.kind == "alone":
                return pieces
            pieces += trainer.parameter_pieces("gradients", lambda p: p.main_grad)
        norms.append(trainer.finish())
        on_step(index + 1)
    pieces += trainer.parameter_pieces("weights", _master)
    every = torch.tensor(norms, dtype=torch.float64)
    pieces.append(Piece("gradient norm", "", (), every, lambda whole: whole))
    return pieces


def _history(setting: Setting, row: Row) -> None:
    """What happens in the process before the model of an "actor" or "rebuild" row is built."""
    data = tokens(setting.shape)
    if row.kind == "rebuild":
        before = Trainer(setting, row)
        before.step(data[0, :1], keep=False)
        before.finish()
    elif row.kind == "actor":
        reference = Trainer(setting, row)
        for batch in data[0]:
            reference.forward_only(batch[:, :-1])
        for eighths in (1, 3, 5, 7):
            reference.forward_only(data[0, 0, :1, : setting.shape.sequence * eighths // 8])


def save_baseline(pieces: list[Piece], path: Path) -> None:
    """Whole tensors by column and name."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    for piece in pieces:
        out.setdefault(piece.column, {})[piece.name] = piece.value.cpu()
    torch.save(out, path)


def compare(pieces: list[Piece], baseline: Path) -> list[dict[str, Any]]:
    """One record a piece: column, name, replica, mismatched, total, first differing index, largest difference."""
    whole = torch.load(baseline, mmap=True)
    records = []
    for piece in pieces:
        want = piece.of_whole(whole[piece.column][piece.name]).to(piece.value.device)
        if want.shape != piece.value.shape:
            raise ValueError(
                f"{piece.column} {piece.name}: this rank holds {tuple(piece.value.shape)}, its part of the baseline is "
                f"{tuple(want.shape)}"
            )
        mismatched, total, first = count_mismatches(piece.value, want)
        largest = float((piece.value.double() - want.double()).abs().max()) if mismatched else 0.0
        records.append(
            {
                "column": piece.column,
                "name": piece.name,
                "replica": list(piece.replica),
                "mismatched": mismatched,
                "total": total,
                "first": None if not mismatched else f"{piece.name or piece.column}{first}",
                "max_abs": largest,
            }
        )
    return records


@contextmanager
def _one_by_one(*_: Any, **__: Any) -> Iterator[None]:
    """In place of torch's coalescing manager: the calls inside run one after the other."""
    yield None


@contextmanager
def process_group(rank: int, world: int, store: str, device: str) -> Any:
    """A default process group: NCCL where every rank has a GPU of its own, gloo anywhere else."""
    backend = "gloo"
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        backend = "nccl" if gpus >= world else "gloo"
        if backend == "gloo":
            # gloo all-reduces tensors of a GPU, but not several at once. DistributedDataParallel has one bucket here.
            param_and_grad_buffer._coalescing_manager = _one_by_one
    distributed: Any = dist
    meeting = distributed.FileStore(store, world)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_row(
    setting: Setting,
    row: Row,
    rank: int,
    store: str,
    baseline: Path,
    is_baseline: bool,
    on_step: Callable[[int], None],
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Everything one rank does for a row: its records (none after writing the baseline), and seconds by phase."""
    clock = [time.monotonic()]
    records: list[dict[str, Any]] = []
    with process_group(rank, row.ranks, store, setting.device):
        building.initialize(row)
        clock.append(time.monotonic())
        _history(setting, row)
        clock.append(time.monotonic())
        pieces = train(setting, row, on_step)
        clock.append(time.monotonic())
        if is_baseline:
            save_baseline(pieces, baseline)
        else:
            records = compare(pieces, baseline)
    clock.append(time.monotonic())
    names = ("groups", "history", "training", "comparison")
    return records, {
        name: round(end - start, 2) for name, start, end in zip(names, clock, clock[1:], strict=False)
    }
