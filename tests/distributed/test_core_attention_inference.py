"""Inference through real megatron-core modules: decode over a cache has the bits of prefill, or says why it will not.

`Attention.flash_decode_and_prefill` is upstream's, replaced in its class; the core attention behind it is the layer's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import fake_aiter
from bits import assert_equal_bits
from procs import run_ranks

ROOT = Path(__file__).resolve().parents[2]
ARMED: dict[str, Any] = {
    "env": {"DETERMINISTIC_ROCM": "invariant"},
    "imports": ("patches.auto", "megatron.core.models.gpt"),
}
LENGTHS, PAGE, HEADS, GROUPS, D = (37, 0, 80, 5), 16, 8, 4, 16


def _cache() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[torch.Tensor]]]:
    """Shuffled pages of all requests, the block table, and each request's own query, key, value."""
    generator = torch.Generator().manual_seed(3)
    pages = sum(-(-length // PAGE) for length in LENGTHS)
    order = torch.randperm(pages, generator=generator)
    keys, values = (torch.full((pages, PAGE, GROUPS, D), torch.nan).bfloat16() for _ in range(2))
    table = torch.full((len(LENGTHS), 8), -7, dtype=torch.int32)
    requests, taken = [], 0
    for row, length in enumerate(LENGTHS):
        tokens = [torch.randn(length, n, D, generator=generator).bfloat16() for n in (HEADS, GROUPS, GROUPS)]
        requests.append(tokens)
        for page in range(-(-length // PAGE)):
            at = int(order[taken])
            table[row, page], taken = at, taken + 1
            part = slice(page * PAGE, min(length, (page + 1) * PAGE))
            keys[at, : part.stop - part.start] = tokens[1][part]
            values[at, : part.stop - part.start] = tokens[2][part]
    return keys, values, table, requests


def _attention(cp_size: int = 1) -> Any:
    """Upstream's self-attention module as the deterministic spec has it."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    from megatron_plugins.layer_specs import get_deterministic_gpt_layer_spec

    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * D, ffn_hidden_size=256, num_attention_heads=HEADS, num_query_groups=GROUPS,
        kv_channels=D, normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=True, context_parallel_size=cp_size,
        calculate_per_token_loss=True,
    )  # fmt: skip
    spec = get_deterministic_gpt_layer_spec().submodules.self_attention
    return build_module(spec, config=config, layer_number=1).eval()


def _decode(rank: int, world_size: int) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_plugins.modules.aiter_core_attention import AiterCoreAttention
    from patches.errors import NotCoveredError

    module = _attention()
    core = module.core_attention
    keys, values, table, requests = _cache()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    prefill = [
        core(*(x.unsqueeze(1) for x in tokens)).view(-1, HEADS, D) if tokens[0].numel() else tokens[0]
        for tokens in requests
    ]
    # Dynamic batching, decode: one token a request, none of an empty slot's keys.
    last = [
        tokens[0][-1:] if tokens[0].numel() else torch.zeros(1, HEADS, D).bfloat16() for tokens in requests
    ]
    query = torch.stack(last)
    got = module.flash_decode_and_prefill(query, keys, values, 1, 80, None, None, lengths, table, True)
    assert got.shape == query.shape
    for row, whole in enumerate(prefill):
        want = whole[-1] if len(whole) else torch.zeros(HEADS, D).bfloat16()
        assert_equal_bits(got[row, 0], want, f"decode of request {row}")
    # Mixed: chunks of several lengths, nothing of the second request.
    chunks = (20, 0, 80, 1)
    starts = torch.tensor([0, 20, 20, 100, 101], dtype=torch.int32)
    tokens = torch.cat([x[0][len(x[0]) - n :] for x, n in zip(requests, chunks, strict=True)]).unsqueeze(1)
    got = module.flash_decode_and_prefill(tokens, keys, values, 80, 80, starts, None, lengths, table, False)
    want = torch.cat([x[len(x) - n :] for x, n in zip(prefill, chunks, strict=True)]).unsqueeze(1)
    assert_equal_bits(got, want, "chunks of prefill over pages")
    # Static batching: the last queries over all keys, one of them without saying causal.
    q, k, v = (x.unsqueeze(1) for x in requests[2])
    step = core(q[-1:], k, v, attn_mask_type=AttnMaskType.no_mask).view(HEADS, D)
    assert_equal_bits(step, prefill[2][-1], "one token over contiguous keys")
    chunk = core(q[-30:], k, v).view(30, HEADS, D)
    assert_equal_bits(chunk, prefill[2][-30:], "a chunk over contiguous keys")

    # What is declared and what is dispatched are one: flip each condition, and back.
    def dispatched() -> bool:
        try:
            module.flash_decode_and_prefill(query, keys, values, 1, 80, None, None, lengths, table, True)
        except NotCoveredError as error:
            assert "dynamic batching asked" in str(error) and core.paged_kv_refusal() in str(error), error
            try:
                core.forward_paged(query, keys, values, block_table=table, seqused_k=lengths)
            except NotCoveredError:
                return False
            raise
        return True

    assert core.supports_paged_kv and dispatched()
    for attribute, value in (
        ("attn_mask_type", AttnMaskType.no_mask),
        ("__class__", AiterCoreAttention),
        ("layout", type("Layout", (), {"cp_size": 2})()),
    ):
        before = getattr(core, attribute)
        setattr(core, attribute, value)
        assert core.supports_paged_kv is dispatched() is False, attribute
        setattr(core, attribute, before)
        assert core.supports_paged_kv is dispatched() is True, attribute
    module.core_attention = torch.nn.Identity()
    try:
        module.flash_decode_and_prefill(query, keys, values, 1, 80, None, None, lengths, table, True)
        raise AssertionError("a core that declares nothing was called")
    except NotCoveredError as error:
        assert "Identity" in str(error) and "does not declare it" in str(error)


def test_decode_over_pages_has_the_bits_of_prefill_and_capability_is_dispatch() -> None:
    run_ranks(1, _decode, **ARMED)


def _aiter_model(
    rank: int, world_size: int, folder: str, tp: int, cp: int
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Whole results of a GPT whose spec takes the AITER core, after its gate; and what rank 0 gets asked to compute."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from megatron_plugins.verify.model import on_cpu

    on_cpu.install()
    fake_aiter.core_over(folder)
    import small_model
    from megatron_plugins.layer_specs import deterministic_aiter_gpt_layer_spec

    layout = small_model.layout_of(tp, cp)
    small_model.initialize(layout)
    model = small_model.build(layout, torch.bfloat16, deterministic_aiter_gpt_layer_spec)
    results = small_model.run_model(model, layout, small_model.byte_tokens(ROOT / "docs", 1))
    assert model.deterministic_gate_passed
    launched = [call[0] for call in sys.modules["aiter.ops.mha"].CALLS]
    gradients = results.pop("gradients")
    return {**results, **gradients}, launched


def test_a_model_on_the_aiter_core_passes_the_gate_and_has_the_bits_of_one_rank(tmp_path: Path) -> None:
    folder = fake_aiter.write(tmp_path)
    ((want, launched),) = run_ranks(1, _aiter_model, folder, 1, 1, **ARMED)
    assert {"forward", "backward"} <= set(launched)
    got = run_ranks(4, _aiter_model, folder, 2, 2, **ARMED)[0][0]
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_equal_bits(got[name], tensor, f"AITER core, TP2xCP2: {name}")
