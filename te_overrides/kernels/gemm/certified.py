"""A product of the vendor's library in place of ours, where it was seen to have the same bits.

A one-lane contraction is one chain over K. A library that does not split K computes the same chain with the same matrix
instruction; whether it does depends on its version, the device and the shape. So it is tried: when a product of some
shape, layout and alignment is first wanted, library and kernel multiply fresh random numbers that span many exponents
and cancel. Equal in every bit: the library serves that product from then on, in this process and in later ones. Not
equal, or not to be tried, and our kernel does.

**Tested equal, not proved.** A library may hold a second algorithm for one shape. Therefore: off unless
``DETERMINISTIC_ROCM_LIBRARY_GEMM=certified``; split-K and stream-K are refused by kernel name as well; the key of a
certificate holds all that is known to choose an algorithm; `verify ffn` tries every certificate again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
import triton

from te_overrides.kernels.bits import count_mismatches

SETTING = "DETERMINISTIC_ROCM_LIBRARY_GEMM"
OFF, ON = "off", "certified"
FOLDER_SETTING = "DETERMINISTIC_ROCM_CACHE"
FORMAT = 1
CHAIN = "chain-1"
"""Raised when our own kernels change their bits."""
ALIGNMENT = 256
"""Bytes beyond which an address is as good as any to a library."""
ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "HIPBLASLT_WORKSPACE_SIZE", "ROCBLAS_DEFAULT_ATOMICS_MODE",
    "TORCH_BLAS_PREFER_HIPBLASLT", "TENSILE_STREAMK_DYNAMIC_GRID", "TENSILE_SOLUTION_SELECTION_METHOD",
)  # fmt: skip
"""Variables that choose the library or its algorithm: part of the key."""
SPLIT = re.compile(r"split_?k|stream_?k|_GSU(?!0_|1_|[01]$)\d+|_SK[1-9]", re.IGNORECASE)
"""In the name of a kernel whose programs share one element's sum."""


class SettingError(ValueError):
    """The setting has a value that means nothing."""


@dataclass(frozen=True)
class Key:
    """All that is known to decide a library's algorithm, and what ours was.

    Attributes:
        library, version: which and which release, torch's own included.
        device, units: its name; streaming multiprocessors or compute units.
        workspace: settings of workspace and precision.
        ours: our numerics class and the compiler that made it.
        dtype: of operands and result.
        shape: (M, N, K).
        strides: of the operands, (a's two, b's two), in elements.
        alignment: of the operands' addresses, in bytes, at most `ALIGNMENT`.
    """

    library: str
    version: str
    device: str
    units: int
    workspace: str
    ours: str
    dtype: str
    shape: tuple[int, int, int]
    strides: tuple[int, int, int, int]
    alignment: tuple[int, int]


@dataclass(frozen=True)
class Certificate:
    """What a trial found.

    Attributes:
        equal: whether the library may serve the product.
        mismatched, compared: elements.
        kernels: names of the library's kernels; without any the library does not serve.
        refused: why not, or None.
    """

    equal: bool
    mismatched: int
    compared: int
    kernels: tuple[str, ...]
    refused: str | None


class Library(Protocol):
    """A vendor's product, and what chooses its algorithm."""

    name: str

    def version(self) -> str: ...
    def workspace(self) -> str: ...
    def device(self, device: torch.device) -> tuple[str, int]: ...
    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: ...
    def kernels(self, a: torch.Tensor, b: torch.Tensor) -> tuple[str, ...]: ...
    def capturing(self) -> bool: ...
    def picks_by_timing(self) -> bool: ...


@functools.cache
def _version() -> str:
    found = [f"torch {torch.__version__}", f"cuda {torch.version.cuda}", f"hip {torch.version.hip}"]
    for name in ("nvidia-cublas", "nvidia-cublas-cu12"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


class Torch:
    """``torch.mm``: cuBLAS, hipBLASLt or rocBLAS."""

    name = "hipblaslt" if torch.version.hip else "cublas"

    def version(self) -> str:
        """torch's release and, where it is a distribution of its own, the library's."""
        return _version()

    def workspace(self) -> str:
        """Variables and switches of torch."""
        switches = torch.backends.cuda
        found = [f"{name}={os.environ.get(name)}" for name in ENVIRONMENT]
        found.append(f"library={switches.preferred_blas_library()}")
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
            found.append(f"{name}={getattr(switches.matmul, name, None)}")
        found.append(f"deterministic={torch.are_deterministic_algorithms_enabled()}")
        return " ".join(found)

    def device(self, device: torch.device) -> tuple[str, int]:
        properties = torch.cuda.get_device_properties(device)
        return properties.name, properties.multi_processor_count

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b.t())

    def kernels(self, a: torch.Tensor, b: torch.Tensor) -> tuple[str, ...]:
        """Names by the profiler, of what ran on the device.

        Raises:
            RuntimeError: another profiler is at work.
        """
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.multiply(a, b)
            torch.cuda.synchronize(a.device)
        ran = {event.key for event in profiler.key_averages() if event.device_type is DeviceType.CUDA}
        return tuple(sorted(ran))

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def picks_by_timing(self) -> bool:
        """Whether TunableOp is on."""
        return bool(torch.cuda.tunable.is_enabled())


def _alignment(x: torch.Tensor) -> int:
    address = x.data_ptr()
    return min(address & -address, ALIGNMENT) if address else ALIGNMENT


def _lying(
    shape: tuple[int, ...], strides: tuple[int, ...], alignment: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Memory for a matrix with these strides at an address of exactly this alignment."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    buffer = torch.empty(span + ALIGNMENT, dtype=dtype, device=device)
    at = (alignment - buffer.data_ptr()) % ALIGNMENT // buffer.element_size()
    return buffer.as_strided(shape, strides, at)


def _like(x: torch.Tensor) -> torch.Tensor:
    """Memory that lies as `x` does."""
    return _lying(tuple(x.shape), x.stride(), _alignment(x), x.dtype, x.device)


KINDS = ("plain", "many exponents", "cancelling", "cancelling, many exponents")
"""Numbers of a trial. Sums that cancel leave nothing but the roundings of the chain, so that a result in 16 bits shows
every one of them; of plain numbers it shows one in thousands."""


CHUNK = 1 << 22
"""Numbers that are made at a time: beside operands as large as a model's there is little room."""


def _fill(a: torch.Tensor, b: torch.Tensor, generator: torch.Generator, kind: str) -> None:
    """Random numbers into the operands [M, K], [N, K], some rows at a time.

    Cancelling: the second half of K holds the first half's terms negated, in another order.
    """
    device, k = generator.device, a.shape[1]
    # Terms of float16 must be finite, and what is left of a sum large enough for it.
    spread = 4 if a.dtype == torch.float16 else 20
    half = k // 2
    order = torch.randperm(half, generator=generator, device=device)
    for operand, sign in ((a, -1.0), (b, 1.0)):
        for rows in operand.split(max(1, CHUNK // k)):
            values = torch.randn(rows.shape, generator=generator, device=device).mul_(8.0)
            if "exponents" in kind:
                exponents = torch.randint(
                    -spread, spread // 2, rows.shape, generator=generator, device=device, dtype=torch.int16
                )
                values = torch.ldexp(values, exponents)
            if "cancelling" in kind:
                values[:, k - half :] = values[:, :half][:, order] * sign
            rows.copy_(values)


class Certificates:
    """Certificates of one process, kept in a folder.

    Args:
        library: the vendor's.
        ours: the kernel it must equal, ``(a, b) -> product``.
        folder: where certificates lie, or None for nowhere.
    """

    def __init__(
        self,
        library: Library,
        ours: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        folder: Path | None,
    ) -> None:
        self.library, self.ours, self.folder = library, ours, folder
        self._known: dict[Key, Certificate] = {}

    def key(self, a: torch.Tensor, b: torch.Tensor) -> Key:
        """The key of a product."""
        device, units = self.library.device(a.device)
        return Key(
            library=self.library.name,
            version=self.library.version(),
            device=device,
            units=units,
            workspace=self.library.workspace(),
            ours=f"{CHAIN}, triton {triton.__version__}",
            dtype=str(a.dtype).removeprefix("torch."),
            shape=(a.shape[0], b.shape[0], a.shape[1]),
            strides=(*a.stride(), *b.stride()),
            alignment=(_alignment(a), _alignment(b)),
        )

    def obstacle(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> str | None:
        """Why a product cannot be certified, or None."""
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or a.device != b.device:
            return "not two matrices with one K on one device"
        if a.dtype not in (torch.bfloat16, torch.float16) or b.dtype != a.dtype or dtype != a.dtype:
            return f"{a.dtype} with {b.dtype} to {dtype}: 16-bit operands and result alone"
        if 0 in (*a.shape, *b.shape):
            return "an empty operand"
        for x in (a, b):
            if 1 not in x.stride() or max(x.stride()) % 8 or min(x.stride()) < 1:
                return f"strides {x.stride()}"
        if self.library.picks_by_timing():
            return "the library picks algorithms by timing"
        if self.library.capturing():
            return "a graph is being captured"
        return None

    def product(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """``A @ B^T`` by the library where that is certified, else None."""
        if self.obstacle(a, b, dtype) is not None:
            return None
        return self.library.multiply(a, b) if self.certificate(a, b).equal else None

    def certificate(self, a: torch.Tensor, b: torch.Tensor) -> Certificate:
        """The certificate of a product that has no obstacle: known, from the folder, or by a trial now."""
        key = self.key(a, b)
        found = self._known.get(key) or self._read(key)
        if found is None:
            found = self._try(a, b)
            self._write(key, found)
            if not found.kernels:
                warnings.warn(f"a library product of {key.shape} is not used: {found.refused}", stacklevel=2)
        self._known[key] = found
        return found

    def _try(self, a: torch.Tensor, b: torch.Tensor) -> Certificate:
        """Both multiply fresh numbers of each kind."""
        generator = torch.Generator(a.device).manual_seed(int.from_bytes(os.urandom(7), "little"))
        mismatched = compared = 0
        names: tuple[str, ...] = ()
        why = "the profiler saw none"
        x, y = _like(a), _like(b)
        for kind in KINDS:
            _fill(x, y, generator, kind)
            found = count_mismatches(self.library.multiply(x, y), self.ours(x, y))
            mismatched, compared = mismatched + found[0], compared + found[1]
            try:
                names = names or self.library.kernels(x, y)
            except RuntimeError as error:
                why = str(error)
        split = [name for name in names if SPLIT.search(name)]
        refused = f"{mismatched} of {compared} elements differ" if mismatched else None
        if split:
            refused = f"K is split, by its name: {split[0]}"
        elif not names and not mismatched:
            refused = f"its kernels could not be named, so that none says whether K is split: {why}"
        return Certificate(refused is None, mismatched, compared, names, refused)

    def _file(self, key: Key) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / (hashlib.sha256(_text(asdict(key)).encode()).hexdigest()[:32] + ".json")

    def _read(self, key: Key) -> Certificate | None:
        file = self._file(key)
        if file is None or not file.is_file():
            return None
        found = read(file)
        return found[1] if found is not None and found[0] == key else None

    def _write(self, key: Key, certificate: Certificate) -> None:
        file = self._file(key)
        # What another profiler kept from being named may be certified by a later process.
        if file is None or not (certificate.kernels or certificate.mismatched):
            return
        body = {"format": FORMAT, "key": asdict(key), "certificate": asdict(certificate)}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=file.parent, suffix=".partial", delete=False
            ) as partial:
                partial.write(_text({**body, "sum": _sum(body)}) + "\n")
            # Another process may write the same file: whole files alone take its place.
            os.replace(partial.name, file)
        except OSError as error:
            warnings.warn(
                f"certificate of a library product not kept in {file.parent}: {error}", stacklevel=2
            )

    def recheck(self, device: torch.device) -> Iterator[tuple[Key, Certificate, Certificate]]:
        """Try again every certificate in the folder that speaks of this library, device and setting.

        Yields:
            (key, what the file said, what was found now). The file then says what was found.
        """
        name, units = self.library.device(device)
        here = (self.library.name, self.library.version(), name, units, self.library.workspace())
        for file in sorted(self.folder.glob("*.json")) if self.folder is not None else ():
            kept = read(file)
            if kept is None:
                continue
            said = kept[0]
            if (said.library, said.version, said.device, said.units, said.workspace) != here:
                continue
            key, before = kept
            dtype: torch.dtype = getattr(torch, key.dtype)
            m, n, k = key.shape
            a = _lying((m, k), key.strides[:2], key.alignment[0], dtype, device)
            b = _lying((n, k), key.strides[2:], key.alignment[1], dtype, device)
            now = self._try(a, b)
            self._known[key] = now
            self._write(key, now)
            yield key, before, now


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _sum(body: Any) -> str:
    return hashlib.sha256(_text(body).encode()).hexdigest()


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def read(file: Path) -> tuple[Key, Certificate] | None:
    """A certificate's file, or None (with a warning) where it is damaged or of another format."""
    try:
        body = json.loads(file.read_text())
        kept = body.pop("sum")
        parts = [
            {name: _tuples(value) for name, value in body[part].items()} for part in ("key", "certificate")
        ]
        if kept != _sum(body) or body["format"] != FORMAT:
            raise ValueError("its sum or format is not as written")
        for part, kind in zip(parts, (Key, Certificate), strict=True):
            if set(part) != {field.name for field in fields(kind)}:
                raise ValueError(f"keys {sorted(part)}")
        certificate = Certificate(**parts[1])
        if certificate.equal and not certificate.kernels:
            raise ValueError("it says equal of kernels without a name")
        return Key(**parts[0]), certificate
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"the certificate {file} is not used and will be made anew: {error!r}", stacklevel=2)
        return None


@functools.cache
def enabled() -> bool:
    """Whether library products were asked for. The variable is read once a process.

    Raises:
        SettingError: a value that means nothing.
    """
    value = os.environ.get(SETTING, OFF)
    if value not in (OFF, ON):
        raise SettingError(f"{SETTING}={value!r}: it is {OFF!r} (the default) or {ON!r}")
    return value == ON


def folder() -> Path:
    """Where certificates are kept."""
    root = os.environ.get(FOLDER_SETTING)
    return (Path(root) if root else Path.home() / ".cache" / "deterministic-rocm") / "certified-gemm"


@functools.cache
def certificates() -> Certificates:
    """Those of this process, against our own kernels."""
    from te_overrides.kernels.gemm import ops

    return Certificates(Torch(), ops.own_one_lane, folder())


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """``A @ B^T`` by the vendor's library where asked for and certified, else None."""
    return certificates().product(a, b, dtype) if enabled() else None
