"""What the layer spec's core attention takes from a configuration and a batch, and what it refuses by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_plugins import batches
from megatron_plugins.modules import core_attention
from megatron_plugins.modules.core_attention import DeterministicCoreAttention, look_once_a_model
from patches.errors import NotCoveredError
from te_overrides.kernels.zigzag.reference import rank_positions

LAYERS = 6
GROUPS = SimpleNamespace(tp=None, cp=None)


@pytest.fixture(autouse=True)
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an armed process: what is not covered is judged by the module itself here."""
    monkeypatch.setattr(core_attention, "require_supported", lambda config: None)
    monkeypatch.setattr(
        core_attention,
        "layout_of",
        lambda *_: SimpleNamespace(cp_size=1, cp_rank=0, cp_group=None, cp_layout="zigzag"),
    )


def _config(**changes: Any) -> TransformerConfig:
    values = {"num_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16, **changes}
    return TransformerConfig(**values)


def _core(config: Any = None, layer: int = 1, kind: str = "causal", **changes: Any) -> Any:
    values = {
        "attention_type": "self",
        "attn_mask_type": AttnMaskType[kind],
        "pg_collection": GROUPS,
        **changes,
    }
    return DeterministicCoreAttention(config if config is not None else _config(), layer, **values)


@pytest.mark.parametrize("frequency", [None, 2, 3, [1, 0, 0, 1, 1, 0]], ids=str)
@pytest.mark.parametrize("window", [None, (16, 0)], ids=str)
def test_a_layer_has_the_window_that_upstream_gives_it(window: Any, frequency: Any) -> None:
    config = _config(window_size=window, window_attn_skip_freq=frequency)
    windows = []
    for layer in range(1, LAYERS + 1):
        upstream = DotProductAttention(config, layer, AttnMaskType.causal, "self", pg_collection=SimpleNamespace(
            tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        )).scale_mask_softmax.window_size  # fmt: skip
        assert _core(config, layer).window == upstream, f"layer {layer}"
        windows.append(upstream)
    assert (None in windows) is (window is None or frequency is not None)


def test_a_megatron_without_the_field_gives_every_layer_the_window() -> None:
    old = SimpleNamespace(kv_channels=16, window_size=[16, 0])
    assert [_core(old, layer).window for layer in (1, 2)] == [(16, 0)] * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_type": "cross"}, "attention_type='cross' in layer 3"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 in layer 3"),
        ({"config": SimpleNamespace(kv_channels=16, softmax_type="learnable")}, "softmax_type='learnable'"),
        (
            {"config": SimpleNamespace(kv_channels=16, apply_query_key_layer_scaling=True)},
            "apply_query_key_layer_scaling=True",
        ),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_the_contract_does_not_cover_is_refused_when_the_layer_is_built(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(NotCoveredError) as refusal:
        _core(layer=3, **changes)
    assert words in str(refusal.value)


def test_a_bias_another_mask_and_padding_that_only_a_mask_knows_are_refused_when_called() -> None:
    q, mask = torch.zeros(4, 1, 4, 16), torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    for kind, call, words in (
        ("causal", {"attention_bias": torch.zeros(1)}, "attention_bias"),
        ("arbitrary", {}, "attn_mask_type=arbitrary"),
        ("padding", {}, "attn_mask_type=padding"),
        ("padding_causal", {"attention_mask": mask}, "padding_causal with an attention mask"),
    ):
        with pytest.raises(NotCoveredError) as refusal:
            _core(kind=kind)(q, q, q, **call)
        assert words in str(refusal.value)
    with_mask, without = _core()(q, q, q, mask), _core(kind="padding_causal")(q, q, q)
    assert torch.equal(with_mask, without), "the type of the mask decides"


class _Model(torch.nn.Module):
    """What a hook reads of a GPTModel."""

    def __init__(self, kind: str = "causal", cp: tuple[int, int] = (1, 0)) -> None:
        super().__init__()
        self.core = _core(kind=kind)
        self.core.layout = SimpleNamespace(cp_size=cp[0], cp_rank=cp[1], cp_layout="zigzag")
        self.register_forward_pre_hook(batches.checker_of(self), with_kwargs=True)

    def forward(
        self,
        input_ids: Any,
        position_ids: Any,
        attention_mask: Any,
        packed_seq_params: Any = None,
        inference_context: Any = None,
    ) -> str:
        return "ran"


def _documents(length: int, starts: list[int]) -> torch.Tensor:
    """Upstream's mask [1, 1, length, length]: True where a query must not look; documents begin at 0 and `starts`."""
    mask = torch.ones(length, length).tril()
    for start in starts:
        mask[start:, :start] = 0
    return (mask < 0.5)[None, None]


@pytest.mark.parametrize("cp", [(1, 0), (2, 0), (2, 1), (4, 2)], ids=str)
def test_a_mask_that_keeps_documents_apart_is_no_causal_mask(cp: tuple[int, int]) -> None:
    """Megatron's --reset-attention-mask: the answer would be one in which documents see each other."""
    rows = rank_positions(16, *cp, "zigzag")
    causal, apart = (_documents(16, starts)[:, :, rows] for starts in ([], [5]))
    model = _Model(cp=cp)
    assert model(None, None, causal.expand(3, -1, -1, -1)) == "ran"
    differ = int((causal != apart).sum())
    if not differ:
        return
    with pytest.raises(NotCoveredError, match=rf"{differ} of {apart.numel()} elements differ"):
        model(None, None, attention_mask=apart)
    assert model(None, None, apart, packed_seq_params=object()) == "ran", "a pack's boundaries decide"
    assert _Model("no_mask", cp)(None, None, apart) == "ran", "that type has no mask at all"


def test_a_mask_is_compared_once_a_shape_and_only_where_it_has_a_row_a_token() -> None:
    model, apart = _Model(), _documents(16, [5])
    for mask in (None, apart[0, 0], apart.float(), apart[..., :1, :], apart[:, :, 5:]):
        assert model(None, None, mask) == "ran"
    for _ in range(2):
        with pytest.raises(NotCoveredError, match="query 5 of this rank, key 0"):
            model(None, None, apart)
    assert model(None, None, _documents(16, [])) == "ran"
    assert model(None, None, apart) == "ran", "a shape that was looked at is not looked at again (documented)"


@pytest.mark.parametrize(("static", "fused"), [(False, True), (False, False), (True, True)])
def test_dynamic_batching_with_fused_rope_is_refused(static: bool, fused: bool) -> None:
    context = SimpleNamespace(use_flashinfer_fused_rope=fused, is_static_batching=lambda: static)
    if static or not fused:
        assert _Model()(None, None, None, inference_context=context) == "ran"
        return
    with pytest.raises(NotCoveredError, match="use_flashinfer_fused_rope=False"):
        _Model()(None, None, None, inference_context=context)


def test_the_first_attention_of_a_stage_looks_at_block_tables_whatever_its_number() -> None:
    """Layers are numbered over all stages, and a hybrid's first layer may be an MLP."""
    stage = torch.nn.ModuleList([torch.nn.Linear(1, 1), _core(layer=4), _core(layer=5)])
    assert [core.looks_at_tables for core in stage[1:]] == [True, True], "before a model is told, each looks"
    look_once_a_model(stage)
    assert [core.looks_at_tables for core in stage[1:]] == [True, False]
    core, missing = stage[1], torch.full((1, 1), 7, dtype=torch.int32)
    cache = torch.zeros(2, 16, 4, 16)
    with pytest.raises(ValueError, match="7"):
        core.forward_paged(
            torch.zeros(1, 1, 4, 16), cache, cache, block_table=missing, seqused_k=torch.tensor([3])
        )
