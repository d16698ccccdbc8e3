"""A TransformerEngine that mended its merge is recognised, and left alone."""

import types

from te_overrides.mended import native_lse_correction

NAME = "flash_attn_fwd_softmax_lse_correction"
NATIVE = f"""
def {NAME}(softmax_lse, softmax_lse_per_step):
    if IS_HIP_EXTENSION:
        tex.lse_correction(softmax_lse, softmax_lse_per_step, False)
        return
    softmax_lse.copy_(softmax_lse_per_step)
"""


def _module(source: str, **names: object) -> types.ModuleType:
    module = types.ModuleType("context_parallel")
    module.__dict__.update(names)
    exec(source, module.__dict__)
    return module


def test_the_native_kernel_on_rocm_needs_no_override() -> None:
    """ROCm/TransformerEngine#708 routes the merge through tex.lse_correction where IS_HIP_EXTENSION."""
    reason = native_lse_correction(_module(NATIVE, IS_HIP_EXTENSION=True, tex=None), NAME)
    assert reason is not None and "#708" in reason and NAME in reason


def test_the_same_source_elsewhere_and_upstreams_formula_need_one() -> None:
    assert native_lse_correction(_module(NATIVE, IS_HIP_EXTENSION=False, tex=None), NAME) is None
    formula = NATIVE.replace("tex.lse_correction", "softmax_lse.copy_")
    assert native_lse_correction(_module(formula, IS_HIP_EXTENSION=True), NAME) is None
