"""Packed sequences (thd) under context parallelism: logits, loss and every gradient of a GPT are those of one rank.

Every sequence of a pack is cut over the ranks by itself, so a rank's rows are no part of the packed order, and a sum
over tokens that takes them for one sequence has other bits with right shapes (verl#4250, ms-swift#10071). Three
sequences of other lengths with padding behind two of them, two micro-batches; in float32, where no rounding of a
gradient hides its order, and with biases in bfloat16. A fourth sequence is empty.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bits import assert_equal_bits
from procs import run_ranks

ROOT = Path(__file__).resolve().parents[2]
ARMED: dict[str, Any] = {
    "env": {"DETERMINISTIC_ROCM": "invariant"},
    "imports": ("patches.auto", "megatron.core.models.gpt"),
}
LENGTHS, PADDED = [100, 0, 256, 77], [128, 0, 256, 128]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
BIASES = {"add_bias_linear": True}
# What each world runs: degrees of TP and CP, sequence parallelism, changes of the configuration.
CASES: dict[int, dict[str, tuple[int, int, bool, dict[str, Any]]]] = {
    1: {"plain": (1, 1, False, {}), "biases": (1, 1, False, BIASES)},
    2: {
        "CP2, layers recomputed": (1, 2, False, FULL),
        "CP2, attention recomputed": (1, 2, False, {**SELECTIVE, "recompute_modules": ["core_attn"]}),
        "CP2, biases": (1, 2, False, BIASES),
    },
    4: {"CP4": (1, 4, False, {}), "TP2xCP2+SP": (2, 2, True, {}), "TP2xCP2+SP, biases": (2, 2, True, BIASES)},
}


UNTOLD = "CP4, modules that are not told where sequences begin"


def _prepare() -> Any:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    import patches.auto  # noqa: F401
    from megatron_plugins.verify.model import on_cpu

    on_cpu.install()
    import small_model

    return small_model


def _boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _packing(**changes: Any) -> SimpleNamespace:
    values = {
        "qkv_format": "thd",
        "cu_seqlens_q": _boundaries(LENGTHS),
        "cu_seqlens_kv": _boundaries(LENGTHS),
        "cu_seqlens_q_padded": _boundaries(PADDED),
        "cu_seqlens_kv_padded": _boundaries(PADDED),
        "max_seqlen_q": max(PADDED),
        "max_seqlen_kv": max(PADDED),
        "local_cp_size": None,
        "cp_group": None,
    }
    return SimpleNamespace(**{**values, **changes})


def _pack(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, labels and mask [1, sum(PADDED)] of sequences that start one token apart in `batch` [n]."""
    ids, labels, mask = (torch.zeros(1, sum(PADDED), dtype=torch.int64) for _ in range(3))
    start = 0
    for index, (length, padded) in enumerate(zip(LENGTHS, PADDED, strict=True)):
        where = slice(start, start + length)
        ids[0, where], labels[0, where] = batch[index : index + length], batch[index + 1 : index + length + 1]
        mask[0, where] = 1
        start += padded
    return ids, labels, mask


def _model(layout: Any, changes: dict[str, Any]) -> Any:
    small_model = _prepare()
    dtype = torch.bfloat16 if "add_bias_linear" in changes else torch.float32
    config = replace(small_model.config_for(layout, dtype), **changes)
    plain, small_model.config_for = small_model.config_for, lambda *_: config
    try:
        return small_model.build(layout, dtype)
    finally:
        small_model.config_for = plain


def _held(layout: Any, rank: int) -> torch.Tensor:
    from te_overrides.kernels.zigzag.reference import packed_rank_rows

    return packed_rank_rows(_boundaries(PADDED).tolist(), layout.cp, rank, "zigzag")


def _whole(part: torch.Tensor, layout: Any) -> torch.Tensor:
    """[1, t, …] of every context-parallel rank in the order of the pack."""
    from megatron.core import parallel_state

    small_model = _prepare()
    parts = small_model.gather(part, parallel_state.get_context_parallel_group())
    out = torch.empty(1, sum(PADDED), *part.shape[2:], dtype=part.dtype)
    for rank, held in enumerate(parts):
        out[:, _held(layout, rank)] = held
    return out


def _results(model: Any, layout: Any, tokens: torch.Tensor) -> dict[str, Any]:
    from megatron.core import parallel_state

    from megatron_plugins.loss import mean_loss
    from megatron_plugins.modules.embedding import DeterministicVocabParallelEmbedding

    small_model = _prepare()
    rows = _held(layout, parallel_state.get_context_parallel_rank())
    (embedding,) = (m for m in model.modules() if isinstance(m, DeterministicVocabParallelEmbedding))
    bounds = tuple(_boundaries(PADDED).tolist())
    out: dict[str, Any] = {"logits": [], "loss": [], "mean": []}
    for batch in tokens:
        ids, labels, mask = (x[:, rows] for x in _pack(batch))
        with torch.no_grad():
            logits = model(ids, None, None, packed_seq_params=_packing())
        per_token = model(ids, None, None, labels=labels, packed_seq_params=_packing())
        (per_token * mask / sum(LENGTHS)).sum().backward()
        columns = small_model.gather(logits, parallel_state.get_tensor_model_parallel_group())
        out["logits"].append(_whole(torch.cat(columns, -1), layout))
        out["loss"].append(_whole(per_token.detach(), layout))
        packed = replace(embedding.layout, cu_seqlens=bounds if layout.cp > 1 else None)
        out["mean"].append(mean_loss(per_token.detach(), mask, packed))
    stacked = {name: torch.stack(parts) for name, parts in out.items()}
    return {**stacked, "gradients": small_model.whole_gradients(model, layout)}


def run_cases(rank: int, world: int) -> dict[str, Any]:
    """Results of every case of this world; of four ranks, also with modules that are not told the boundaries."""
    small_model = _prepare()
    out = {}
    tokens = small_model.byte_tokens(ROOT / "docs", 4).view(2, -1)
    assert tokens.shape[1] > max(LENGTHS) + len(LENGTHS)
    cases = dict(CASES[world])
    if world == 4:
        cases[UNTOLD] = cases["CP4"]
    for name, (tp, cp, sp, changes) in cases.items():
        if name == UNTOLD:
            _stop_telling()
        layout = small_model.layout_of(tp, cp, sp)
        small_model.initialize(layout)
        results = _results(_model(layout, changes), layout, tokens)
        out[name] = results if rank == 0 else None
    return out


def _stop_telling() -> None:
    from megatron_plugins import packed_order
    from megatron_plugins.modules import embedding, linear, norm

    assert packed_order.of_batch is linear.of_batch is norm.of_batch is embedding.of_batch
    linear.of_batch = norm.of_batch = embedding.of_batch = lambda layout: layout


@pytest.fixture(scope="module")
def results() -> dict[int, dict[str, Any]]:
    """What every world found, by its number of ranks."""
    return {world: run_ranks(world, run_cases, timeout=240, **ARMED)[0] for world in CASES}


@pytest.mark.parametrize("world", [2, 4])
def test_a_pack_has_the_bits_of_one_rank(world: int, results: dict[int, dict[str, Any]]) -> None:
    for name in CASES[world]:
        got, want = results[world][name], results[1]["biases" if "biases" in name else "plain"]
        for what in ("logits", "loss", "mean"):
            assert_equal_bits(got[what], want[what], f"{name}: {what}")
        assert got["gradients"].keys() == want["gradients"].keys()
        for parameter, gradient in want["gradients"].items():
            assert_equal_bits(got["gradients"][parameter], gradient, f"{name}: gradient of {parameter}")


def test_without_the_boundaries_the_forward_is_right_and_gradients_are_not(
    results: dict[int, dict[str, Any]],
) -> None:
    """What a sum over tokens in a rank's own order would give, so that the test above is known to see it."""
    got, want = results[4][UNTOLD], results[1]["plain"]
    assert_equal_bits(got["logits"], want["logits"], "logits")
    wrong = {
        name for name, grad in want["gradients"].items() if not torch.equal(got["gradients"][name], grad)
    }
    print(sorted(wrong))
    for kind in ("linear_qkv", "linear_fc2", "layernorm", "output_layer", "embedding"):
        assert any(kind in name for name in wrong), f"{kind}: not among {sorted(wrong)}"


def _refusal(act: Callable[[], Any]) -> str:
    from megatron_plugins.positions import PositionMismatchError
    from patches.errors import NotCoveredError
    from te_overrides.kernels.granules.reference import GranuleError
    from te_overrides.kernels.zigzag.reference import LayoutError

    try:
        act()
    except (NotCoveredError, LayoutError, GranuleError, PositionMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def run_refusals(rank: int, world: int) -> dict[str, str]:
    """What is said about packs that cannot have the bits of one rank; and that a refusal leaves nothing behind."""
    small_model = _prepare()
    from megatron_plugins import packed_order

    layout = small_model.layout_of(1, world)
    small_model.initialize(layout)
    model = _model(layout, {})
    rows = _held(layout, rank)
    ids = torch.arange(sum(PADDED))[None, rows] % small_model.VOCABULARY

    def call(tokens: torch.Tensor = ids, of: Any = model, backward: bool = False, **changes: Any) -> Any:
        extra = {"decoder_input": changes.pop("decoder_input")} if "decoder_input" in changes else {}
        out = of(tokens, None, None, packed_seq_params=_packing(**changes), **extra)
        return out.float().sum().backward() if backward else out

    def short_chunks() -> Any:
        bounds = _boundaries([n // 4 for n in PADDED])
        padded = {f"cu_seqlens_{side}_padded": bounds for side in ("q", "kv")}
        plain = {f"cu_seqlens_{side}": bounds for side in ("q", "kv")}
        return call(ids[:, : ids.shape[1] // 4], backward=True, **padded, **plain)

    def decoder() -> Any:
        hidden = torch.zeros(ids.shape[1], 1, 64)
        return model.decoder(hidden, None, packed_seq_params=_packing())

    apart = _model(layout, {**SELECTIVE, "recompute_modules": ["mlp"]})
    uneven = _boundaries([128, 0, 258, 126])

    def checkpoint_a_part(reentrant: bool) -> Any:
        from torch.utils.checkpoint import checkpoint

        mlp = model.decoder.layers[0].mlp
        plain = mlp.forward
        mlp.forward = lambda x, **_: checkpoint(plain, x, use_reentrant=reentrant)
        try:
            return call(backward=True)
        finally:
            del mlp.forward

    def beside() -> Any:
        weight = model.output_layer.weight
        return model.output_layer(torch.zeros(ids.shape[1], 1, weight.shape[1]), weight=weight)

    def cut_as_one_sequence() -> Any:
        from te_overrides.kernels.zigzag.reference import rank_positions

        truth = torch.cat([torch.arange(n) for n in PADDED])
        other = truth[rank_positions(len(truth), world, rank, "zigzag")].unsqueeze(0)
        return model(ids, other, None, packed_seq_params=_packing())

    said = {
        "recomputed apart": lambda: call(of=apart),
        "recomputed apart in evaluation": lambda: call(of=apart.eval()),
        "a part checkpointed": lambda: checkpoint_a_part(True),
        "a part checkpointed without reentrance": lambda: checkpoint_a_part(False),
        "a module beside the model": beside,
        "cut as one sequence": cut_as_one_sequence,
        "angles of the whole pack": lambda: call(max_seqlen_q=sum(PADDED), max_seqlen_kv=sum(PADDED)),
        "too few angles": lambda: call(max_seqlen_q=255, max_seqlen_kv=255),
        "embedded elsewhere": lambda: call(decoder_input=torch.zeros(ids.shape[1], 1, 64)),
        "a group of its own": lambda: call(local_cp_size=1),
        "another format": lambda: call(qkv_format="sbhd"),
        "other keys": lambda: call(cu_seqlens_kv_padded=_boundaries([256, 128, 128])),
        "uneven": lambda: call(
            cu_seqlens_q_padded=uneven, cu_seqlens_kv_padded=uneven, max_seqlen_q=258, max_seqlen_kv=258
        ),
        "other rows": lambda: call(ids[:, :-2]),
        "divided": lambda: call(
            cu_seqlens_q_padded=_boundaries(PADDED) // world,
            cu_seqlens_kv_padded=_boundaries(PADDED) // world,
        ),
        "batch rows": lambda: call(ids.expand(2, -1)),
        "decoder alone": decoder,
        "short chunks": short_chunks,
    }
    out = {name: _refusal(act) for name, act in said.items()}
    out["left behind"] = str(packed_order._running.scopes)
    call()  # and the next batch is served
    return out


def test_packs_that_cannot_be_summed_in_order_are_refused_by_name() -> None:
    said = run_ranks(2, run_refusals, timeout=240, **ARMED)[0]
    apart = "NotCoveredError: packed sequences at context_parallel_size=2 with recompute_modules="
    for name, pattern in {
        "recomputed apart": apart,
        "recomputed apart in evaluation": apart,
        "a part checkpointed": "a part of a layer is checkpointed by itself, with 4 packed sequences",
        "a part checkpointed without reentrance": "ran outside its model at context_parallel_size=2",
        "a module beside the model": "Call the model, not its parts",
        "cut as one sequence": "PositionMismatchError: row 64 of context-parallel rank 0 of 2 has position id",
        "angles of the whole pack": "max_seqlen=512 is the length of the whole pack of 3 sequences",
        "too few angles": "max_seqlen=255 with a sequence of 256 rows",
        "embedded elsewhere": "with decoder_input",
        "a group of its own": "carries local_cp_size=1",
        "another format": "qkv_format='sbhd'",
        "other keys": "keys 3 packed sequences at [0, 256, 384, 512]",
        "uneven": "ZigzagError: sequence 2 of the packed batch, length 258",
        "other rows": "LayoutError: the boundaries end at 512, but 2 ranks hold 254 rows",
        "divided": "LayoutError: the boundaries end at 256, but 2 ranks hold 256 rows",
        "batch rows": "packed sequences in 2 batch rows",
        "decoder alone": "Call the model, not its decoder",
        "short chunks": "GranuleError: vector gradient: a rank holds a run of 8",
    }.items():
        assert pattern in said[name], f"{name}: {said[name]}"
    assert said["left behind"] == "[]"
