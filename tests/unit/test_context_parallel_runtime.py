"""Arguments of TransformerEngine's context-parallel entry point: bound by name, and refused in words."""

from __future__ import annotations

import ast
import enum
from pathlib import Path
from typing import Any

import pytest
import torch

from patches.errors import NotCoveredError
from te_overrides import context_parallel_runtime as runtime
from te_overrides import single_rank_attention as single_rank
from te_overrides.context_parallel_runtime import build
from te_overrides.kernels.attention.context_parallel import context_parallel_attention
from upstream_wheels import TRANSFORMER_ENGINE, sources


class Strategy(enum.Enum):
    DUAL_CHUNK_SWAP = "dual"
    NO_LOAD_BALANCE = "none"


def attn_forward_func_with_cp(
    is_training, q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, cu_seqlens_q_padded,
    cu_seqlens_kv_padded, dropout_p, cp_group, cp_global_ranks, cp_stream, cp_comm_type, softmax_scale=None,
    qkv_format="bshd", attn_mask_type="causal", attn_bias_type="no_bias", attn_bias=None, deterministic=False,
    use_fused_attention=False, window_size=None, softcap=0.0, fp8=False, fp8_meta=None, quantizers=None,
    pad_between_seqs=False, use_flash_attn_3=False, use_flash_attn_4=False, softmax_type="vanilla",
    softmax_offset=None, fp8_output=False, layer_number=1, return_max_logit=False,
    load_balancing_strategy=Strategy.DUAL_CHUNK_SWAP, a_parameter_of_tomorrow=0,
):  # fmt: skip
    """Upstream's signature in 2.20.2, and one more parameter."""
    raise AssertionError("the original must not run")


ENTRY = build(attn_forward_func_with_cp)


def _operands() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 6, heads, 8, generator=generator) for heads in (4, 2, 2))


def _call(**changes: Any) -> Any:
    q, k, v = _operands()
    arguments = {
        "is_training": True, "q": q, "k": k, "v": v, "cu_seqlens_q": None, "cu_seqlens_kv": None, "max_seqlen_q": 6,
        "max_seqlen_kv": 6, "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None, "dropout_p": 0.0,
        "cp_group": None, "cp_global_ranks": [0], "cp_stream": None, "cp_comm_type": "p2p",
    }  # fmt: skip
    return ENTRY(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"attn_bias_type": "alibi"}, "attn_bias_type='alibi'"),
        ({"attn_bias": torch.zeros(1)}, "attn_bias=tensor"),
        ({"softcap": 30.0}, "softcap=30.0"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable'"),
        ({"softmax_offset": torch.zeros(4)}, "softmax_offset=tensor"),
        ({"fp8": True}, "fp8=True"),
        ({"fp8_output": True}, "fp8_output=True"),
        ({"return_max_logit": True}, "return_max_logit=True"),
        ({"load_balancing_strategy": Strategy.NO_LOAD_BALANCE}, "NO_LOAD_BALANCE"),
        ({"a_parameter_of_tomorrow": 1}, "a_parameter_of_tomorrow=1"),
        (
            {"cp_group": [None, None, None], "cp_comm_type": "a2a+p2p"},
            "a hierarchical context-parallel group of 3 levels",
        ),
        ({"qkv_format": "sbdh"}, "qkv_format='sbdh'"),
        ({"attn_mask_type": "padding_causal"}, "attn_mask_type='padding_causal' with qkv_format='bshd'"),
        ({"attn_mask_type": "causal_bottom_right"}, "causal_bottom_right"),
        ({"attn_mask_type": "arbitrary"}, "arbitrary"),
        ({"k": torch.zeros(2, 12, 2, 8), "v": torch.zeros(2, 12, 2, 8)}, "self-attention"),
        (
            {
                "qkv_format": "thd",
                "attn_mask_type": "padding_causal",
                "cu_seqlens_q": torch.tensor([0, 6]),
                "cu_seqlens_kv": torch.tensor([0, 5]),
            },
            "cu_seqlens_q different from cu_seqlens_kv",
        ),
    ],
)
def test_what_the_contract_does_not_cover_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(NotCoveredError, match="Either|are covered") as error:
        _call(**changes)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"deterministic": True, "use_fused_attention": True, "use_flash_attn_3": True, "layer_number": 7},
        {"cp_comm_type": "all_gather", "quantizers": {"scaling_fwd": None}, "fp8_meta": {}},
        {"window_size": (-1, 0), "is_training": False},
        {"window_size": [-1, 0]},
    ],
)
def test_choices_among_upstreams_kernels_do_not_enter(changes: dict[str, Any]) -> None:
    assert torch.equal(_call(**changes), _call())


def test_arguments_reach_the_attention_and_the_output_is_shaped_like_the_query() -> None:
    q, k, v = _operands()
    for qkv_format, mask, window in (
        ("bshd", "causal", None),
        ("sbhd", "no_mask", (-1, -1)),
        ("sbhd", "causal", (2, 0)),
    ):
        s_first = [x.transpose(0, 1) if qkv_format == "bshd" else x for x in (q, k, v)]
        want, _ = context_parallel_attention(
            *s_first, causal=mask == "causal", softmax_scale=0.2, window=window
        )
        got = _call(qkv_format=qkv_format, attn_mask_type=mask, window_size=window, softmax_scale=0.2)
        assert got.shape == q.shape and got.is_contiguous()
        assert torch.equal(got, want.transpose(0, 1) if qkv_format == "bshd" else want)


def test_a_missing_argument_is_an_error_of_the_call_as_upstream() -> None:
    with pytest.raises(TypeError, match="missing a required argument"):
        ENTRY(True)


@pytest.mark.parametrize("version", TRANSFORMER_ENGINE)
def test_every_parameter_of_upstreams_entry_points_has_a_rule(version: str) -> None:
    """Each is read, required to have one value, or said to be without effect; a newer one must keep its default."""
    folder = sources(version) / "transformer_engine/pytorch/attention/dot_product_attention"
    entry = _parameters(folder / "context_parallel.py", "attn_forward_func_with_cp")
    assert entry <= runtime._USED | runtime._WITHOUT_EFFECT | set(runtime._REQUIRED)
    module = _parameters(folder / "dot_product_attention.py", "forward", "DotProductAttention")
    # Each of these must keep its default.
    refused = {
        "alibi_slopes", "inference_params", "score_mod", "score_mod_bprop", "score_mod_tensors",
        "score_mod_bprop_tensors", "qkv_layer", "kv_layer", "thd_attention_policies",
    }  # fmt: skip
    assert module <= set(single_rank._PASSED) | single_rank._WITHOUT_EFFECT | refused


def _parameters(path: Path, function: str, cls: str | None = None) -> set[str]:
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    if cls is not None:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == cls)
    (found,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    return {argument.arg for argument in found.args.args + found.args.kwonlyargs}
