"""A package that looks like apex to megatron-core and raises where anything of it computes."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "apex/__init__.py": "",
    "apex/normalization/__init__.py": "from apex.normalization.fused_layer_norm import FusedLayerNorm, FusedRMSNorm\n",
    "apex/normalization/fused_layer_norm.py": """
import torch

class _Fused(torch.nn.Module):
    def __init__(self, normalized_shape, eps=1e-5, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape))
    def forward(self, x):
        raise AssertionError(f"{type(self).__name__} of apex computed")

class FusedLayerNorm(_Fused): pass
class FusedRMSNorm(_Fused): pass

class FusedLayerNormAffineFunction:
    @staticmethod
    def apply(*_):
        raise AssertionError("FusedLayerNormAffineFunction of apex computed")
""",
    "apex/multi_tensor_apply.py": """
def multi_tensor_applier(operation, *arguments):
    return operation(*arguments)
""",
    "amp_C.py": """
def multi_tensor_l2norm(*_):
    raise AssertionError("multi_tensor_l2norm of apex computed")
def multi_tensor_scale(*_):
    raise AssertionError("multi_tensor_scale of apex computed")
""",
    "fused_weight_gradient_mlp_cuda.py": """
def wgrad_gemm_accum_fp32(*_):
    raise AssertionError("the fused weight gradient of apex computed")
wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
""",
}


def write(folder: Path) -> Path:
    """Write the package under `folder` and return it, to stand on PYTHONPATH."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
