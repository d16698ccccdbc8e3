"""The kernels on a GPU against the references on the CPU, bit by bit."""

from __future__ import annotations

import pytest
import torch

from bits import assert_equal_bits
from te_overrides.kernels.lse_merge import ops, reference

pytestmark = pytest.mark.gpu


def _operands(seq_dim: int, dtype: torch.dtype, d: int = 128) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lse, step = (torch.randn(2, 8, 512, generator=generator) * 6 for _ in range(2))
    step[0, 0, :100], lse[0, 0, 50:150], step[1, 1, :10] = -torch.inf, -torch.inf, torch.inf
    shape = (512, 2, 8, d) if seq_dim == 0 else (2, 512, 8, d)
    return [*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)), lse, step]


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gpu_has_the_references_bits(seq_dim: int, dtype: torch.dtype) -> None:
    for d in (64, 96, 128):
        out, step_out, lse, step = _operands(seq_dim, dtype, d)
        gpu_out, gpu_step_out, gpu_lse, gpu_step = (x.cuda() for x in (out, step_out, lse, step))
        new = reference.merged_lse(lse, step)
        init = ops.out_correction_init(gpu_step_out, new.cuda(), gpu_step, seq_dim)
        want = reference.out_correction_init(step_out, new, step, seq_dim)
        assert_equal_bits(init.cpu(), want, f"out_correction_init d={d}")
        ops.merge_(gpu_out, gpu_lse, gpu_step_out, gpu_step, seq_dim)
        reference.merge_(out, lse, step_out, step, seq_dim)
        assert_equal_bits(gpu_lse.cpu(), lse, f"lse d={d}")
        assert_equal_bits(gpu_out.cpu(), out, f"out d={d}")


def test_a_side_stream_sees_the_operands_that_were_enqueued_before_it() -> None:
    """NVIDIA/TransformerEngine#1624: the LSE was read on the wrong stream. 100 repeats, 0 mismatches."""
    _, _, lse, step = _operands(1, torch.float32)
    want = reference.merged_lse(lse, step)
    stream = torch.cuda.Stream()
    busy = torch.randn(2048, 2048, device="cuda")
    for repeat in range(100):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            busy @ busy
            got, other = lse.cuda(non_blocking=True), step.cuda(non_blocking=True)
            ops.merge_lse_(got, other)
        torch.cuda.current_stream().wait_stream(stream)
        assert_equal_bits(got.cpu(), want, f"repeat {repeat}")
