"""Which module classes may stand in a deterministic model, and why (docs/operations.md).

Everything under ``megatron_plugins`` is ours. Upstream's containers only call their children and move data. A class
that is in neither list is refused by name: nobody answers for its bits.
"""

from __future__ import annotations

from typing import Any

CONTAINERS = {
    "megatron.core.models.gpt.gpt_model.GPTModel": "calls embedding, decoder, output layer and the loss",
    "megatron.core.models.hybrid.hybrid_model.HybridModel": "calls embedding, decoder, output layer and the loss",
    "megatron.core.models.mamba.mamba_model.MambaModel": "a HybridModel; before 0.18 its stack is in no list",
    "megatron.core.ssm.mlp_layer.MLPLayer": "a TransformerLayer without attention",
    "megatron.core.transformer.transformer_block.TransformerBlock": "calls its layers and the final norm",
    "megatron.core.transformer.transformer_layer.TransformerLayer": "norm, attention, residual, norm, MLP, residual",
    "megatron.core.transformer.attention.SelfAttention": "splits and reshapes Q, K and V, calls RoPE (override)",
    "megatron.core.models.common.embeddings.language_model_embedding.LanguageModelEmbedding": "transposes",
    "torch.nn.modules.container.ModuleList": "holds",
}
EXACT = {
    "megatron.core.transformer.identity_op.IdentityOp": "the identity",
    "megatron.core.transformer.identity_op.IdentityFuncOp": "the identity",
    "megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding": "one product an angle",
    "torch.nn.modules.dropout.Dropout": "probability 0 (checked)",
}

WHY_NOT = {
    "apex.": "apex's fused norms sum their weight's gradient in an order of their own",
    "megatron.core.fusions.fused_layer_norm.": "apex's LayerNorm, whose weight's gradient has an order of its own",
    "transformer_engine.": "TransformerEngine reduces in an order that follows the layout",
    "megatron.core.extensions.transformer_engine.": "TransformerEngine reduces in an order that follows the layout",
}
"""Prefix of a class that is often found -> why nobody answers for it."""


def class_name(module: Any) -> str:
    """Module path and name of an instance's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def foreign_modules(model: Any) -> list[str]:
    """``path (class)`` of every module that nobody owns; empty for a model that may run."""
    found = []
    for path, module in model.named_modules():
        name = class_name(module)
        if name.startswith("megatron_plugins."):
            continue
        if name in CONTAINERS or (name in EXACT and not getattr(module, "p", 0.0)):
            continue
        why = next((f": {reason}" for prefix, reason in WHY_NOT.items() if name.startswith(prefix)), "")
        found.append(f"{path or 'model'} ({name}{why})")
    return found
