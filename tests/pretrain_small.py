"""A few training steps of a small GPT the way upstream's pretrain_gpt.py goes, on CPU ranks.

Megatron's own parser (with the flag), its validation, its configuration from arguments, its spec import, its
DistributedDataParallel, optimizer, forward-backward function, gradient finalization and checkpoints. What is left
out is what needs a GPU or a data set. Started as ``python -m patches run tests/pretrain_small.py --result FILE
<Megatron arguments>``.
"""

from __future__ import annotations

import os
import sys
import typing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
if not hasattr(typing, "override"):  # megatron.training from 0.18 on wants Python 3.12
    typing.override = lambda function: function  # type: ignore[attr-defined]

SEQUENCE, MICRO_BATCH, VOCABULARY = 128, 1, 1024


def _extra_arguments(parser: Any) -> Any:
    parser.add_argument("--result", type=Path, required=True)
    return parser


def main() -> None:
    from megatron_plugins.verify.model import on_cpu

    on_cpu.install_for_training()
    torch.set_num_threads(1)
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
    from megatron.training.global_vars import set_global_variables

    args = parse_args(_extra_arguments, ignore_unknown_args=bool(os.environ.get("IGNORE_UNKNOWN")))
    validate_args(args)
    # As upstream's initialize_megatron does; checkpointing and the gate look there.
    set_global_variables(args, build_tokenizer=False)
    print("spec", args.spec, flush=True)
    dist.init_process_group("gloo")
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    results = train(args, core_transformer_config_from_args(args))
    stages = [None] * dist.get_world_size()
    dist.all_gather_object(stages, results)
    if dist.get_rank() == 0:
        first, last = stages[0], stages[-1]
        assert first is not None and last is not None
        # Losses exist on the last pipeline stage, weights on each.
        torch.save({**last, "weights": {**first["weights"], **last["weights"]}}, args.result)
    dist.barrier()
    dist.destroy_process_group()


def build(args: Any, config: Any) -> Any:
    """Model with weights that depend on names alone, as a checkpoint's would."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import import_module

    from megatron_plugins.verify.model.build import fill_by_name, global_name

    spec = (
        import_module(args.spec)
        if args.spec is not None
        else get_gpt_layer_local_spec(normalization="RMSNorm")
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    fill_by_name(model, lambda name: global_name(model, name), 0.1)
    return model


def train(args: Any, config: Any) -> dict[str, Any]:
    """Losses and gradient norms of every step, whole weights after the last."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    import small_model
    from megatron_plugins.verify.model.build import global_name

    model = build(args, config)
    if args.bf16:
        model = Float16Module(config, model)
    ddp = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
        ),
        module=model,
    )
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            clip_grad=1.0,
            bf16=args.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        [ddp],
    )
    layout = small_model.layout_of(args.tensor_model_parallel_size, args.context_parallel_size)
    positions = small_model.positions_of(layout)
    micro_batches = args.global_batch_size // args.micro_batch_size
    generator = torch.Generator().manual_seed(7)
    data = torch.randint(
        0, VOCABULARY, (args.train_iters, micro_batches, MICRO_BATCH, SEQUENCE + 1), generator=generator
    )
    mask = ~torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril()

    def forward(iterator: Any, module: Any) -> Any:
        tokens = next(iterator)
        ids, labels = tokens[:, :-1][:, positions], tokens[:, 1:][:, positions]
        losses = module(ids, positions.expand(MICRO_BATCH, -1).contiguous(), mask, labels=labels.contiguous())

        def per_token(output: torch.Tensor) -> Any:
            total = output.float().sum()
            return total, torch.tensor(output.numel(), dtype=torch.int), {"losses": output.detach()}

        return losses, per_token

    out: dict[str, Any] = {"losses": [], "norms": []}
    done = load_checkpoint([ddp], optimizer, None)[0] if args.load else 0
    for batches in data[done:]:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        step = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[ddp],
            num_microbatches=micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        out["norms"].append(float(norm))
        if parallel_state.is_pipeline_last_stage():
            whole = [small_model.whole_sequence(s["losses"], positions) for s in step]
            out["losses"].append(torch.stack(whole))
    if args.save:
        save_checkpoint(args.train_iters, [ddp], optimizer, None, 0)
    group = parallel_state.get_tensor_model_parallel_group()
    weights = {}
    inner = model.module if args.bf16 else model
    for name, parameter in inner.named_parameters():
        value = parameter.detach().clone()
        if layout.tp > 1 and getattr(parameter, "tensor_model_parallel", False):
            value = small_model.unshard(name, small_model.gather(value, group), parameter.partition_dim)
        weights[global_name(inner, name)] = value
    out["weights"] = weights
    return out


if __name__ == "__main__":
    main()
