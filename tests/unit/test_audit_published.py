"""The published measurement of ROCm/TransformerEngine#693, from the code and without the GPU.

On MI355X (Triton 3.6.0), 225,280 uniform float32 samples of log1p: 37,933 elements differ between one and four
elements per thread, largest distance 5.960e-08, mean error 0.2211 and 0.2594 ULP. The two assemblies are what
Triton 3.6.0 compiles for gfx950, so that the check does not depend on the installed version.
"""

from pathlib import Path

import numpy as np
import pytest

from te_overrides.audit.api import execute, expressions
from te_overrides.audit.compile import launch_grid
from te_overrides.audit.samples import count_differences, count_errors, uniform_inputs

pytest.importorskip("triton")
from te_overrides.audit.ops import op_kernel, reference  # noqa: E402

DATA = Path(__file__).parent / "audit_data"
LAUNCHES = launch_grid({"XBLOCK": (256, 1024), "num_warps": (4,)})
SAMPLES = 225280


@pytest.fixture(scope="module")
def assemblies():
    return [
        (DATA / f"log1p-gfx950-triton-3.6.0-{launch.constexpr('XBLOCK')}x4.s").read_text()
        for launch in LAUNCHES
    ]


def test_the_published_counts_come_out_of_the_compiled_code(assemblies):
    kernel = op_kernel("log1p")
    arrays = uniform_inputs(kernel, SAMPLES)
    exact = reference("log1p", arrays["in_ptr"])
    one, four = (
        execute(kernel, "gfx950", launch, arrays, SAMPLES, assembly=text)["out_ptr"]
        for launch, text in zip(LAUNCHES, assemblies, strict=True)
    )
    difference = count_differences(one, four)
    print(difference, count_errors(one, exact), count_errors(four, exact))
    assert 0.14 < difference.differing / SAMPLES < 0.18
    assert f"{difference.max_abs:.3e}" == "5.960e-08"
    assert count_errors(one, exact).mean_ulp == pytest.approx(0.2211, abs=0.001)
    assert count_errors(four, exact).mean_ulp == pytest.approx(0.2594, abs=0.001)


def test_the_two_are_different_expressions_in_every_element(assemblies):
    kernel = op_kernel("log1p")
    one, four = (
        expressions(kernel, "gfx950", launch, 2048, assembly=text)
        for launch, text in zip(LAUNCHES, assemblies, strict=True)
    )
    differing = (one != four).any(axis=0)
    assert differing[:2048].all()


def test_one_changed_constant_is_seen_where_the_element_uses_it(assemblies):
    """Mutation: the tool can tell a single bit of a coefficient, symbolically and by numbers."""
    kernel, launch = op_kernel("log1p"), LAUNCHES[0]
    changed = assemblies[0].replace("0x3e9b6dac", "0x3e9b6dad")
    assert changed != assemblies[0]
    before, after = (
        expressions(kernel, "gfx950", launch, 2048, assembly=text) for text in (assemblies[0], changed)
    )
    assert (before != after).any(axis=0).all()
    # One bit of so small a coefficient hides behind rounding; more of the first one does not.
    changed = assemblies[0].replace("0x3f2aaada", "0x3f2aabda")
    arrays = uniform_inputs(kernel, 4096)
    got = [
        execute(kernel, "gfx950", launch, arrays, 4096, assembly=text)["out_ptr"]
        for text in (assemblies[0], changed)
    ]
    assert np.any(got[0] != got[1])
