"""Kernels under the audit: what is one class, what is a split, what must stay unknown, and exact results."""

import json

import audit_kernels
import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from te_overrides.audit.api import audit, execute  # noqa: E402
from te_overrides.audit.cli import main  # noqa: E402
from te_overrides.audit.compile import Kernel, launch_grid  # noqa: E402
from te_overrides.audit.ops import op_kernel  # noqa: E402
from te_overrides.audit.samples import count_differences  # noqa: E402
from te_overrides.kernels.portable_math import reference as portable  # noqa: E402

LAUNCHES = launch_grid({"XBLOCK": (64, 1024), "num_warps": (1, 4), "enable_fp_fusion": (False,)})
ELEMENTS = 2000  # not a multiple of any block: the tail is part of the question
ARCHITECTURES = ("gfx942", "gfx950")
PORTABLE = ("exp", "log", "log1p", "sigmoid", "silu", "rsqrt")


def kernel(name, kind):
    fn = getattr(audit_kernels, name)
    return Kernel(fn, {arg: f"*{kind}" for arg in fn.arg_names if arg.endswith("_ptr")} | {"n": "i32"})


def random_bits(kind, count, seed):
    unsigned = {"fp32": np.uint32, "fp64": np.uint64}[kind]
    drawn = np.random.default_rng(seed).integers(0, np.iinfo(unsigned).max, count, unsigned, endpoint=True)
    return drawn.view({"fp32": np.float32, "fp64": np.float64}[kind])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", PORTABLE)
def test_portable_math_is_one_class_and_its_code_computes_the_reference(op, arch):
    subject = kernel(f"portable_{op}", "fp32")
    result = audit(subject, arch, LAUNCHES, ELEMENTS)
    assert result.one_class, (result.groups, result.unknown)
    x = random_bits("fp32", 4096, 1)
    x[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 88.5]
    x[8:2048] = np.random.default_rng(2).normal(scale=20, size=2040)
    want = getattr(portable, op)(torch.from_numpy(x)).numpy()
    # The seeds of the divisions and square roots, moved either way, must not reach the result.
    for ulps in (-1, 0, 1):
        arrays = {"x_ptr": x, "out_ptr": np.zeros_like(x)}
        got = execute(subject, arch, LAUNCHES[-1], arrays, x.size, ulps)["out_ptr"]
        assert count_differences(got, want).differing == 0


@pytest.mark.parametrize(
    ("name", "kind", "fn"),
    [
        ("divide64", "fp64", np.divide),
        ("divide32_rn", "fp32", np.divide),
        ("root64", "fp64", lambda x, y: np.sqrt(x)),
    ],
)
@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_division_and_square_root_are_correctly_rounded_whatever_the_seed(name, kind, fn, ulps):
    x, y = random_bits(kind, 6000, 3), random_bits(kind, 6000, 4)
    with np.errstate(all="ignore"):
        want = fn(x, y)
    arrays = {"x_ptr": x, "y_ptr": y, "out_ptr": np.zeros_like(x)}
    got = execute(kernel(name, kind), "gfx950", LAUNCHES[-1], arrays, x.size, ulps)["out_ptr"]
    difference = count_differences(got, want)
    print(name, ulps, difference)
    assert difference.differing == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_widening_choosing_and_rounding_to_bfloat16_is_one_class(arch):
    result = audit(kernel("widen_and_round", "bf16"), arch, LAUNCHES, ELEMENTS)
    assert result.one_class, (result.groups, result.unknown)


def test_elements_that_share_an_input_are_one_class():
    fn = audit_kernels.row_scale
    signature = {"x_ptr": "*fp32", "scale_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
    assert audit(Kernel(fn, signature, constexprs={"COLUMNS": 40}), "gfx950", LAUNCHES, ELEMENTS).one_class


def test_a_kernel_whose_result_depends_on_the_block_splits():
    result = audit(kernel("block_index_leaks", "fp32"), "gfx950", LAUNCHES, ELEMENTS)
    assert len(result.groups) == 2 and not result.one_class
    assert sorted(len(group.launches) for group in result.groups) == [2, 2]
    # All but the first block of the smaller size.
    assert result.groups[1].elements_apart == ELEMENTS - 64


def test_what_is_not_modelled_is_unknown_and_never_equal():
    signature = {"x_ptr": "*fp32", "index_ptr": "*i32", "out_ptr": "*fp32", "n": "i32"}
    result = audit(Kernel(audit_kernels.gather, signature), "gfx950", LAUNCHES, ELEMENTS)
    assert not result.one_class and not result.groups and set(result.unknown) == set(LAUNCHES)
    assert all("depends on data" in reason for reason in result.unknown.values())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_sum_over_a_block_depends_on_the_warps_it_is_spread_over(arch):
    """One block, four ways to spread it: the audit tells the trees apart, and all of them add up exactly."""
    subject = kernel("block_total", "fp32")
    launches = launch_grid({"XBLOCK": (256,), "num_warps": (1, 2, 4, 8)})
    result = audit(subject, arch, launches, ELEMENTS)
    assert not result.unknown
    together = sorted(tuple(launch.num_warps for launch in group.launches) for group in result.groups)
    # With four warps a lane holds one element; eight hold nothing more.
    assert together == [(1,), (2,), (4, 8)]
    x = np.arange(ELEMENTS, dtype=np.float32)
    want = np.concatenate([np.full(part.size, part.sum()) for part in np.split(x, range(256, ELEMENTS, 256))])
    for launch in launches:
        got = execute(subject, arch, launch, {"x_ptr": x, "out_ptr": x * 0}, ELEMENTS)["out_ptr"]
        assert count_differences(got, want.astype(np.float32)).differing == 0


def test_branches_on_data_are_followed_on_both_sides():
    """tanh branches on its argument and cosh contracts by thread: one class, or whatever the numbers say too."""
    launches = launch_grid({"XBLOCK": (64, 1024), "num_warps": (4,)})
    result = audit(op_kernel("tanh"), "gfx950", launches, 2048)
    assert result.one_class, (result.groups, result.unknown)
    x = np.random.default_rng(0).normal(size=2048).astype(np.float32)
    got = [
        execute(op_kernel("tanh"), "gfx950", launch, {"in_ptr": x, "out_ptr": x * 0}, 2048)["out_ptr"]
        for launch in launches
    ]
    assert count_differences(*got).differing == 0
    assert np.allclose(got[0], np.tanh(x), rtol=1e-6, atol=0)


def test_the_command_prints_groups_and_exits_one_on_a_split(capsys):
    target = f"{audit_kernels.__file__}:block_index_leaks"
    arguments = ["--grid", "XBLOCK=64,1024", "--grid", "num_warps=1", "--samples", "2048", "--json"]
    assert main([target, *arguments]) == 1
    report = json.loads(capsys.readouterr().out)
    assert len(report["groups"]) == 2 and report["unknown"] == []
    assert report["groups"][1]["numeric"]["against_first"]["differing"] > 0
    assert main(["--op", "exp", *arguments]) == 0
    assert len(json.loads(capsys.readouterr().out)["groups"]) == 1


def test_the_command_refuses_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        main(["--op", "nonesuch"])
    assert "known are log1p" in capsys.readouterr().err
