"""A library product serves where it was seen equal, under the exact key, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from te_overrides.kernels.gemm import certified, reference
from te_overrides.kernels.gemm.certified import SPLIT, Certificates


class FakeLibrary:
    """The reference, or the reference with K split in two; counts its calls."""

    name = "fake"

    def __init__(
        self, split: bool = False, release: str = "1", names: tuple[str, ...] = ("sgemm_128x64",)
    ) -> None:
        self.split, self.release, self.names = split, release, names
        self.profiler_at_work = False
        self.calls, self.graph, self.timing, self.setting = 0, False, False, "ws=8"

    def version(self) -> str:
        return self.release

    def workspace(self) -> str:
        return self.setting

    def device(self, device: torch.device) -> tuple[str, int]:
        return "fake GPU", 132

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if not self.split:
            return reference.one_lane(a, b)
        half = a.shape[1] // 2
        return (reference.chain(a[:, :half], b[:, :half]) + reference.chain(a[:, half:], b[:, half:])).to(
            a.dtype
        )

    def kernels(self, a: torch.Tensor, b: torch.Tensor) -> tuple[str, ...]:
        if self.profiler_at_work:
            raise RuntimeError("profiler is already enabled")
        return self.names

    def capturing(self) -> bool:
        return self.graph

    def picks_by_timing(self) -> bool:
        return self.timing


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


A, B = randn(24, 64), randn(16, 64, seed=1)


def made(library: FakeLibrary, folder: Path | None) -> Certificates:
    return Certificates(library, reference.one_lane, folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_equal_library_serves_and_is_tried_once(tmp_path: Path, dtype: torch.dtype) -> None:
    library = FakeLibrary()
    found = made(library, tmp_path)
    a, b = A.to(dtype), B.to(dtype)
    assert found.certificate(a, b).compared == len(certified.KINDS) * 24 * 16
    tried = library.calls
    assert torch.equal(found.product(a, b, dtype), reference.one_lane(a, b))
    assert library.calls == tried + 1
    # Another process reads the file.
    later = FakeLibrary()
    assert made(later, tmp_path).product(a, b, dtype) is not None
    assert later.calls == 1


def test_a_library_that_splits_k_never_serves(tmp_path: Path) -> None:
    found = made(FakeLibrary(split=True), tmp_path)
    assert found.product(A, B, A.dtype) is None
    certificate = found.certificate(A, B)
    assert certificate.mismatched > 0 and "differ" in str(certificate.refused)
    assert made(FakeLibrary(split=True), tmp_path).product(A, B, A.dtype) is None


@pytest.mark.parametrize(
    "name",
    ["cublasLt::splitKreduce_kernel<32>", "nvjet_64x8_splitK_TNT", "Cijk_GSU4_SK0", "Cijk_GSU1_SK3_x", "StreamK"],
)  # fmt: skip
def test_kernels_that_share_a_sum_are_refused_by_name_although_equal(tmp_path: Path, name: str) -> None:
    certificate = made(FakeLibrary(names=("fill", name)), tmp_path).certificate(A, B)
    assert (certificate.equal, certificate.mismatched) == (False, 0)
    assert name in str(certificate.refused)


@pytest.mark.parametrize("at_work", [True, False])
def test_kernels_that_could_not_be_named_never_serve_although_equal(tmp_path: Path, at_work: bool) -> None:
    """A profiler that fails, or sees nothing, must not pass for a library that does not split K."""
    library = FakeLibrary(names=())
    library.profiler_at_work = at_work
    found = made(library, tmp_path)
    why = "profiler is already enabled" if at_work else "saw none"
    with pytest.warns(UserWarning, match=f"not used.*could not be named.*{why}"):
        assert found.product(A, B, A.dtype) is None
    certificate = found.certificate(A, B)
    assert (certificate.equal, certificate.mismatched) == (False, 0) and why in str(certificate.refused)
    # Neither kept for later processes nor believed where an older release kept it.
    assert not list(tmp_path.glob("*.json"))
    made(FakeLibrary(), tmp_path).certificate(A, B)
    (file,) = tmp_path.glob("*.json")
    body = json.loads(file.read_text())
    body["certificate"]["kernels"] = []
    del body["sum"]
    file.write_text(json.dumps({**body, "sum": certified._sum(body)}))
    with pytest.warns(UserWarning, match="without a name.*|not used"):
        assert made(library, tmp_path).product(A, B, A.dtype) is None


@pytest.mark.parametrize(
    "name", ["nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "Cijk_Ailk_GSU1_SK0_x", "Cijk_GSU0_MT16"]
)
def test_kernels_with_one_owner_of_a_sum_are_not_refused(name: str) -> None:
    assert not SPLIT.search(name)


def test_every_part_of_the_key_that_changes_makes_a_new_trial(tmp_path: Path) -> None:
    made(FakeLibrary(), tmp_path).certificate(A, B)
    wide = torch.zeros(24, 128, dtype=A.dtype)
    shifted = torch.zeros(24 * 64 + 8, dtype=A.dtype)[8:].view(24, 64)
    for release, setting, a in (
        ("2", "ws=8", A), ("1", "ws=0", A), ("1", "ws=8", A[:23]), ("1", "ws=8", wide[:, :64]), ("1", "ws=8", shifted),
        ("1", "ws=8", A.t().contiguous().t()),
    ):  # fmt: skip
        library = FakeLibrary(release=release)
        library.setting = setting
        made(library, tmp_path).certificate(a, B)
        assert library.calls == len(certified.KINDS), (release, setting, a.shape, a.stride())


def test_trial_operands_lie_as_the_product_does() -> None:
    base = torch.zeros(4096, dtype=torch.bfloat16)
    for offset in (0, 8, 24, 64):
        for x in (
            base[offset:].as_strided((8, 16), (32, 1), offset),
            base[offset:].as_strided((8, 16), (1, 32), offset),
        ):
            trial = certified._like(x).fill_(1.0)
            assert trial.stride() == x.stride()
            assert certified._alignment(trial) == certified._alignment(x), offset
            assert torch.equal(trial, torch.ones_like(trial))


def test_a_graph_under_capture_odd_strides_and_timing_are_left_to_our_kernel(tmp_path: Path) -> None:
    library = FakeLibrary()
    found = made(library, tmp_path)
    found.certificate(A, B)
    wide = torch.zeros(24, 67, dtype=A.dtype)[:, :64]
    assert found.product(wide, B, A.dtype) is None
    assert found.product(A.float(), B.float(), torch.float32) is None
    assert found.product(A, B, torch.float32) is None
    library.graph = True
    assert found.product(A, B, A.dtype) is None
    library.graph, library.timing = False, True
    assert found.product(A, B, A.dtype) is None
    library.timing = False
    assert found.product(A, B, A.dtype) is not None


@pytest.mark.parametrize("damage", ["cut", "flipped", "renamed", "not json", "other key"])
def test_a_damaged_certificate_is_made_anew(tmp_path: Path, damage: str) -> None:
    made(FakeLibrary(split=True), tmp_path).certificate(A, B)
    (file,) = tmp_path.glob("*.json")
    text = file.read_text()
    if damage == "cut":
        file.write_text(text[:-40])
    elif damage == "flipped":
        assert '"equal": false' in text
        file.write_text(text.replace('"equal": false', '"equal": true'))
    elif damage == "renamed":
        file.write_text(text.replace('"mismatched"', '"mismatches"'))
    elif damage == "not json":
        file.write_bytes(b"\x00\xff")
    else:
        made(FakeLibrary(), tmp_path).certificate(A[:8], B)
        (other,) = (path for path in tmp_path.glob("*.json") if path != file)
        file.write_text(other.read_text())
    library = FakeLibrary(split=True)
    if damage == "other key":
        assert made(library, tmp_path).product(A, B, A.dtype) is None
    else:
        with pytest.warns(UserWarning, match="made anew"):
            assert made(library, tmp_path).product(A, B, A.dtype) is None
    assert library.calls == len(certified.KINDS)
    assert certified.read(file)[0].shape == (24, 16, 64)


def test_a_folder_that_cannot_be_written_is_told_and_the_process_remembers(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    library = FakeLibrary()
    found = made(library, blocked / "below")
    with pytest.warns(UserWarning, match="not kept"):
        found.certificate(A, B)
    found.certificate(A, B)
    assert library.calls == len(certified.KINDS)


def test_trying_again_finds_a_library_that_has_changed_without_a_new_version(tmp_path: Path) -> None:
    made(FakeLibrary(), tmp_path).certificate(A, B)
    made(FakeLibrary(release="old"), tmp_path).certificate(A, B)
    changed = made(FakeLibrary(split=True), tmp_path)
    ((key, before, now),) = list(changed.recheck(torch.device("cpu")))
    assert (key.version, before.equal, now.equal) == ("1", True, False)
    assert changed.product(A, B, A.dtype) is None
    assert made(FakeLibrary(), tmp_path).product(A, B, A.dtype) is None


def test_the_setting_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, want in ((None, False), ("off", False), ("certified", True)):
        certified.enabled.cache_clear()
        monkeypatch.delenv(certified.SETTING, raising=False)
        if value is not None:
            monkeypatch.setenv(certified.SETTING, value)
        assert certified.enabled() is want
    certified.enabled.cache_clear()
    monkeypatch.setenv(certified.SETTING, "yes")
    with pytest.raises(certified.SettingError, match="'yes'"):
        certified.enabled()
    certified.enabled.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trials_show_a_split_at_any_place_of_k_in_a_single_tile(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for at in (8, 40, 64, 120):
        seen = 0
        for kind in certified.KINDS:
            a, b = torch.empty(2, 16, 128, dtype=dtype)
            certified._fill(a, b, generator, kind)
            parts = reference.chain(a[:, :at], b[:, :at]) + reference.chain(a[:, at:], b[:, at:])
            want = reference.one_lane(a, b)
            assert want.isfinite().all()
            seen += int((parts.to(dtype) != want).sum())
        assert seen >= 64, f"split at {at}: {seen} of {4 * 16 * 16}"


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes in another dtype than the operands'."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype is not torch.bfloat16:
            self.largest = max(self.largest, out.numel())
        return out


def test_trials_are_made_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "CHUNK", 1 << 10)
    a, b = torch.full((2, 256, 128), float("nan"), dtype=torch.bfloat16)
    with Sizes() as sizes:
        certified._fill(a, b, torch.Generator().manual_seed(0), certified.KINDS[-1])
    assert sizes.largest == 1 << 10, f"{sizes.largest} numbers beside operands of {a.numel()}"
    assert a.isfinite().all() and b.isfinite().all()
    assert len(a[:, 0].unique()) > 128, "rows repeat"


def test_trials_span_many_exponents() -> None:
    a, b = torch.empty(2, 64, 64, dtype=torch.bfloat16)
    certified._fill(a, b, torch.Generator().manual_seed(0), "many exponents")
    exponents = torch.frexp(a.float())[1]
    assert int(exponents.max() - exponents.min()) >= 30


def test_a_certificate_holds_the_whole_key(tmp_path: Path) -> None:
    made(FakeLibrary(), tmp_path).certificate(A, B)
    (file,) = tmp_path.glob("*.json")
    key = json.loads(file.read_text())["key"]
    assert key["shape"] == [24, 16, 64] and key["strides"] == [64, 1, 64, 1] and key["units"] == 132
    assert {key["library"], key["version"], key["device"], key["workspace"]} == {
        "fake",
        "1",
        "fake GPU",
        "ws=8",
    }


def test_the_environment_contract_knows_the_setting() -> None:
    from megatron_plugins.env_contract import VARIABLES, violations

    (variable,) = [v for v in VARIABLES if v.name == certified.SETTING]
    assert set(variable.accepted) == {certified.OFF, certified.ON}
    assert len(violations("invariant", {certified.SETTING: "yes"})) == 1
    assert violations("invariant", {certified.SETTING: certified.ON}) == []
