"""The ``--deterministic-rocm`` argument in Megatron's parser: what it selects and what it refuses.

The flag exists in the parser only while the patch layer is armed. An unarmed run with the flag stops at argparse with
"unrecognized arguments", which is the honest answer: nothing of this project would have been active.
"""

from __future__ import annotations

import argparse
import importlib.util
from importlib.metadata import version
from typing import Any

from megatron_plugins.refusals import Rule, refusals
from patches.errors import NotCoveredError
from patches.override import MODES
from te_overrides.kernels.collectives.reference import SUM_WORLDS
from te_overrides.kernels.cross_entropy.reference import VOCABULARY_UNIT

SPEC = ["megatron_plugins.layer_specs", "deterministic_gpt_layer_spec"]
"""Megatron's ``--spec``: module and attribute."""
HYBRID_SPEC = ["megatron_plugins.hybrid_specs", "deterministic_hybrid_stack_spec"]
"""The same where the arguments describe a HybridModel."""
WHOLE = (
    "deterministic_aiter_gpt_layer_spec",
    "deterministic_gpt_layer_spec",
    "deterministic_gpt_layer_spec_two_lane",
    "deterministic_gpt_layer_spec_with_te_names",
)
"""Specs of that module in which every part of a layer is deterministic."""


def add_flag(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deterministic-rocm[=stable|invariant]``; bare means invariant. Adding twice changes nothing."""
    if "--deterministic-rocm" not in parser._option_string_actions:
        group = parser.add_argument_group(title="deterministic-rocm")
        group.add_argument(
            "--deterministic-rocm",
            nargs="?",
            const="invariant",
            choices=MODES,
            default=None,
            help="bitwise reproducible training: 'stable' (same layout, same bits) or 'invariant' (same bits in every "
            "TP, CP, SP and PP layout; the default)",
        )
    return parser


def apply_flag(args: argparse.Namespace, armed: str) -> None:
    """Settle mode and spec after parsing. Sets ``args.spec`` only where the user gave none.

    Raises:
        NotCoveredError: the command line asks for another mode than the one that is armed, or for a foreign spec.
    """
    asked = getattr(args, "deterministic_rocm", None)
    if asked is not None and asked != armed:
        raise NotCoveredError(
            f"--deterministic-rocm={asked} on the command line, but the patch layer is armed as {armed!r} "
            "(DETERMINISTIC_ROCM). Give both the same value."
        )
    args.deterministic_rocm = armed
    if armed != "invariant":
        return
    spec = getattr(args, "spec", None)
    pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None)
    if pattern or (spec is not None and spec[0] == HYBRID_SPEC[0]):
        _require_hybrid_model()
    if spec is None:
        args.spec = list(HYBRID_SPEC if pattern else SPEC)
    elif not str(spec[0]).startswith("megatron_plugins."):
        raise NotCoveredError(
            f"--spec {' '.join(map(str, spec))} with --deterministic-rocm=invariant: that spec's modules keep "
            f"their own arithmetic. Drop --spec (then {' '.join(SPEC)} is used), or run with "
            f"--deterministic-rocm=stable."
        )
    elif spec[0] == SPEC[0] and spec[1] not in WHOLE:
        raise NotCoveredError(
            f"--spec {' '.join(map(str, spec))} with --deterministic-rocm=invariant: that spec makes a part of a layer "
            f"deterministic, the promise is for the whole. Take one of {', '.join(WHOLE)}, or run with "
            "--deterministic-rocm=stable."
        )


def _require_hybrid_model() -> None:
    # Upstream would take a spec whose module cannot be imported for none at all.
    if importlib.util.find_spec("megatron.core.models.hybrid") is None:
        raise NotCoveredError(
            "a hybrid model with --deterministic-rocm=invariant: the contract covers HybridModel, which megatron-core "
            f"has from 0.18 on; {version('megatron-core')} is installed. Drop --hybrid-layer-pattern and the hybrid "
            "spec, or take a newer megatron-core."
        )


def _padding(args: Any) -> int:
    return int(getattr(args, "make_vocab_size_divisible_by", 128)) * int(args.tensor_model_parallel_size)


ELEMENTWISE = ("adam", "sgd")
"""Optimizers whose update of an element depends on that element's gradient and state alone."""
_SCALED = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")


def _scaled_states(args: Any) -> list[str]:
    """Optimizer states in a format that is scaled by the largest value of the shard it lies in."""
    kept = {name: str(getattr(args, name, "float32")).removeprefix("torch.") for name in _SCALED}
    return [
        f"{name}={dtype}"
        for name, dtype in kept.items()
        if dtype not in ("float32", "fp32", "bfloat16", "bf16")
    ]


ARGUMENT_RULES: tuple[Rule, ...] = (
    Rule(
        lambda a: bool(getattr(a, "reset_attention_mask", False)),
        lambda a: "reset_attention_mask=True",
        "attention is causal over the whole row and reads no mask, so documents would see each other",
        "drop --reset-attention-mask, or pack documents (packed_seq_params), which keeps them apart",
    ),
    Rule(
        lambda a: not getattr(a, "padded_vocab_size", None) and _padding(a) != VOCABULARY_UNIT,
        lambda a: (
            f"make_vocab_size_divisible_by={getattr(a, 'make_vocab_size_divisible_by', None)} at "
            f"tensor_model_parallel_size={a.tensor_model_parallel_size}"
        ),
        f"Megatron pads the vocabulary to a multiple of their product, which must be {VOCABULARY_UNIT} at every degree",
        lambda a: (
            f"pass --make-vocab-size-divisible-by {VOCABULARY_UNIT // int(a.tensor_model_parallel_size)}"
        ),
    ),
    Rule(
        lambda a: not getattr(a, "untie_embeddings_and_output_weights", True),
        lambda a: "untie_embeddings_and_output_weights=False",
        "the two gradients of a tied weight are owned by different ranks",
        "pass --untie-embeddings-and-output-weights",
    ),
    Rule(
        lambda a: int(getattr(a, "data_parallel_size", 1)) not in SUM_WORLDS,
        lambda a: f"data_parallel_size={a.data_parallel_size}",
        "gradients are added over data-parallel ranks by a balanced tree over 1, 2, 4, 8, … of them",
        "choose a number of ranks that makes it a power of two",
    ),
    Rule(
        lambda a: getattr(a, "optimizer", "adam") not in ELEMENTWISE,
        lambda a: f"optimizer={a.optimizer!r}",
        "an update must be elementwise, and reviewed",
        "pass --optimizer adam",
    ),
    Rule(
        lambda a: bool(_scaled_states(a)),
        lambda a: ", ".join(_scaled_states(a)),
        "TransformerEngine scales such a state by the largest value of its shard, which depends on the layout",
        "keep optimizer states in fp32 or bf16 and main parameters in fp32",
    ),
    Rule(
        lambda a: bool(getattr(a, "optimizer_cpu_offload", False)),
        lambda a: "optimizer_cpu_offload=True",
        "which parameters are updated by another Adam on the CPU depends on the layout",
        "drop --optimizer-cpu-offload",
    ),
    Rule(
        lambda a: bool(getattr(a, "use_torch_fsdp2", False) or getattr(a, "use_megatron_fsdp", False)),
        lambda a: "FSDP",
        "its sharding of gradients is not part of the contract yet",
        "use Megatron's DistributedDataParallel",
    ),
)


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse contradictions after Megatron has validated the arguments; changes nothing.

    Raises:
        NotCoveredError: every broken rule in one message.
    """
    if args.deterministic_rocm != "invariant":
        return
    view = argparse.Namespace(**vars(args))
    view.num_moe_experts = getattr(args, "num_experts", None)
    if not getattr(args, "group_query_attention", False):
        view.num_query_groups = args.num_attention_heads
    broken = refusals(view) + refusals(view, ARGUMENT_RULES)
    if broken:
        raise NotCoveredError("--deterministic-rocm=invariant refuses these arguments. " + " ".join(broken))
