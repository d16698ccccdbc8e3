"""The ways to mend the LSE merge, measured side by side, and the table of docs/evidence/lse-merge.md made from it.

    python scripts/lse_options.py measure {cpu,gpu,compiled} [--te-sources DIR] [--json [FILE]]
    python scripts/lse_options.py page [--check]

Options (ROCm/TransformerEngine#693, #695, #708):

    upstream   TransformerEngine's function as it compiles itself
    eager      the same function without a compiler (NVTE_TORCH_COMPILE=0)
    dynamic    compiled with dynamic=True from the first call on
    library    one kernel of its own with the library's exp and log1p, at one fixed launch
    ours       te_overrides.kernels.lse_merge

`cpu` and `gpu` run the real functions: one operand pair after 0, 1, … 10 other shapes, which is past the recompile
limit; how many different results come out, how many elements differ from ours at worst, the error.
`compiled` needs no device: the code for gfx942 and gfx950 over 48 launches, by the audit tool; a function of PyTorch's
own (eager) has no code there. `page` writes what the JSON files say and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from megatron_plugins.verify.outputs import add_json, write_json  # noqa: E402
from te_overrides.kernels.bits import differing  # noqa: E402
from te_overrides.kernels.lse_merge import ops  # noqa: E402

OPTIONS = ("upstream", "eager", "dynamic", "library", "ours")
PAGE = ROOT / "docs" / "evidence" / "lse-merge.md"
RESULTS = ROOT / "docs" / "evidence" / "results"
PLACES = {
    "cpu": "lse-options-cpu.json",
    "gpu": "lse-options-h200.json",
    "compiled": "lse-options-compiled.json",
}
BEGIN, END = "<!-- options: made by scripts/lse_options.py page -->", "<!-- end of options -->"
ELEMENTS = 225_280
# More shapes than Dynamo compiles before it drops to eager (8).
OTHER_SHAPES = (
    (2, 4, -1), (1, 8, -1), (-1, 8, 1), (4, -1), (-1, 1), (-1,), (2, 2, 2, -1), (1, 2, 4, -1), (2, 4, -1, 1),
    (8, -1),
)  # fmt: skip
ROW_KEYS = {"option", "place", "tries", "groups", "differ_from_ours", "total", "max_ulp", "ms"}


def library_kernel() -> Any:
    """What a compiler emits for upstream's formula, and what a kernel of one's own with library functions is."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    @triton.jit
    def library_merge(lse_ptr, step_ptr, n, XBLOCK: tl.constexpr):
        i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
        lse, step = tl.load(lse_ptr + i), tl.load(step_ptr + i)
        high, low = tl.maximum(lse, step), tl.minimum(lse, step)
        tl.store(lse_ptr + i, high + libdevice.log1p(libdevice.exp(low - high)))

    return library_merge


def pair(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, 8, s] accumulated and step LSE, float32."""
    generator = torch.Generator().manual_seed(0)
    lse, step = (torch.randn(2, 8, ELEMENTS // 16, generator=generator) * 3 for _ in range(2))
    return lse.to(device), step.to(device)


def ulp(got: np.ndarray, lse: np.ndarray, step: np.ndarray) -> float:
    """Largest error of a float32 merge in units of its last place."""
    exact = np.logaddexp(lse.astype(np.float64), step.astype(np.float64))
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return float((np.abs(got.astype(np.float64) - exact) / unit).max())


def functions(place: str, sources: Path) -> dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]:
    """Option -> merge in place; options that a place does not have are left out."""
    from megatron_plugins.verify.model import te_on_cpu

    upstream = te_on_cpu.load(sources).flash_attn_fwd_softmax_lse_correction
    plain = upstream.__wrapped__
    found = {
        "upstream": upstream,
        "eager": plain,
        "dynamic": torch.compile(plain, dynamic=True),
        "ours": ops.merge_lse_,
    }
    if place == "gpu":
        kernel = library_kernel()

        def library(lse: torch.Tensor, step: torch.Tensor) -> None:
            kernel[(lse.numel() // 256,)](lse, step, lse.numel(), XBLOCK=256, num_warps=4)

        found["library"] = library
    return found


def milliseconds(function: Callable[[], Any], place: str) -> float:
    """Median of one call."""
    if place == "gpu":
        from triton.testing import do_bench

        return float(do_bench(function, warmup=20, rep=100, return_mode="median"))
    function()
    times = []
    for _ in range(21):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def run(place: str, sources: Path) -> list[dict[str, Any]]:
    """Every option on this device over shape histories."""
    device = "cuda" if place == "gpu" else "cpu"
    lse, step = pair(device)
    ours = lse.clone()
    ops.merge_lse_(ours, step)
    rows = []
    for option, function in functions(place, sources).items():
        moments = []
        for count in range(len(OTHER_SHAPES) + 1):
            # As good as a fresh process: Dynamo forgets every variant it has compiled.
            torch._dynamo.reset()
            for shape in OTHER_SHAPES[:count]:
                function(lse.clone().view(shape), step.view(shape))
            moments.append(lse.clone())
            function(moments[-1], step)
        groups: list[torch.Tensor] = []
        for result in moments:
            if all(bool(differing(result, other).any()) for other in groups):
                groups.append(result)
        timed = lse.clone()

        def call(function: Callable[..., Any] = function, timed: torch.Tensor = timed) -> None:
            function(timed, step)

        rows.append(
            {
                "option": option,
                "place": place,
                "tries": f"{len(moments)} shape histories",
                "groups": len(groups),
                "differ_from_ours": max(int(differing(result, ours).sum()) for result in groups),
                "total": lse.numel(),
                "max_ulp": max(ulp(x.cpu().numpy(), lse.cpu().numpy(), step.cpu().numpy()) for x in groups),
                "ms": milliseconds(call, place),
            }
        )
    return rows


def compiled() -> list[dict[str, Any]]:
    """Code for AMD GPUs over 48 launches. Upstream's and `dynamic` are the compiler's kernel at whatever launch."""
    from te_overrides.audit.api import audit, execute
    from te_overrides.audit.compile import Kernel, launch_grid
    from te_overrides.kernels.lse_merge.lse_kernel import merge_kernel

    lse, step = (x.flatten().numpy() for x in pair("cpu"))
    grid = {"num_warps": (1, 2, 4, 8, 16, 32)}
    blocks = (32, 64, 128, 256, 512, 1024, 2048, 4096)
    library = Kernel(library_kernel(), {"lse_ptr": "*fp32", "step_ptr": "*fp32", "n": "i32"})
    strides = {f"{name}_stride_{i}": int(i == 2) for name, i in itertools.product(("lse", "step"), range(3))}
    ours = Kernel(
        merge_kernel,
        {"lse_ptr": "*fp32", "step_ptr": "*fp32"}
        | dict.fromkeys((*strides, "size_1", "size_2", "blocks"), "i32"),
        block="BLOCK",
        scalars=strides | {"size_1": 1, "blocks": lambda launch, n: -(-n // int(launch.constexpr("BLOCK")))},
    )
    want = torch.from_numpy(lse.copy())
    ops.merge_lse_(want, torch.from_numpy(step))
    rows = []
    for arch in ("gfx942", "gfx950"):
        results: dict[str, Any] = {
            "upstream": (library, launch_grid(grid | {"XBLOCK": blocks})),
            "library": (library, launch_grid({"XBLOCK": (256,), "num_warps": (4,)})),
            "ours": (ours, launch_grid(grid | {"BLOCK": blocks, "enable_fp_fusion": (False,)})),
        }
        results["dynamic"] = results["upstream"]
        for option, (kernel, launches) in results.items():
            print(f"  {arch} {option}: {len(launches)} launches", file=sys.stderr, flush=True)
            found = audit(kernel, arch, launches, elements=max(blocks))
            if found.unknown:
                raise SystemExit(f"{option} on {arch}: not understood: {next(iter(found.unknown.values()))}")
            got = [
                execute(kernel, arch, group.launches[0], {"lse_ptr": lse.copy(), "step_ptr": step}, ELEMENTS)[
                    "lse_ptr"
                ]
                for group in found.groups
            ]
            rows.append(
                {
                    "option": option,
                    "place": arch,
                    "tries": f"{len(launches)} launch" + "es" * (len(launches) > 1),
                    "groups": len(found.groups),
                    "differ_from_ours": max(int(differing(torch.from_numpy(x), want).sum()) for x in got),
                    "total": ELEMENTS,
                    "max_ulp": max(ulp(x, lse, step) for x in got),
                    "ms": None,
                }
            )
    return rows


def measure(place: str, sources: Path | None) -> dict[str, Any]:
    """One JSON document: where it ran, and its rows.

    Raises:
        SystemExit: no GPU for `gpu`, no sources of TransformerEngine for `cpu` and `gpu`.
    """
    about: dict[str, Any] = {"schema": 1, "torch": torch.__version__}
    if place == "compiled":
        import triton

        return about | {"device": "none: compiled code", "triton": triton.__version__, "rows": compiled()}
    if sources is None or not sources.is_dir():
        raise SystemExit(
            f"sought an unpacked TransformerEngine wheel in --te-sources, found {sources}. Unpack one: "
            "pip download --no-deps transformer-engine==2.20.2 && python -m zipfile -e *.whl DIR"
        )
    if place == "gpu" and not torch.cuda.is_available():
        raise SystemExit("not run: sought a GPU that torch can use, found none")
    device = torch.cuda.get_device_name() if place == "gpu" else "CPU"
    return about | {"device": device, "transformer_engine": sources.name, "rows": run(place, sources)}


def load() -> list[dict[str, Any]]:
    """Every result file.

    Raises:
        SystemExit: a file is missing, or a row has other keys than the known ones.
    """
    documents = []
    for place, name in PLACES.items():
        path = RESULTS / name
        if not path.is_file():
            raise SystemExit(f"sought {path}, found nothing: run `measure {place} --json {path}` first")
        document = json.loads(path.read_text())
        for row in document["rows"]:
            if set(row) != ROW_KEYS or row["option"] not in OPTIONS:
                raise SystemExit(f"{path}: a row with keys {sorted(row)}; expected {sorted(ROW_KEYS)}")
        documents.append(document)
    return documents


def table(documents: list[dict[str, Any]]) -> str:
    """The options as a Markdown table; places that never ran an option say so."""
    places: dict[str, str] = {}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for document in documents:
        for row in document["rows"]:
            what = document.get("triton") and f"compiled, Triton {document['triton']}"
            places[row["place"]] = what or f"{document['device']}, torch {document['torch']}"
            rows[row["option"], row["place"]] = row
    lines = [
        "| option | where | tried | different results | elements unlike ours | max ULP | ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for option, place in itertools.product(OPTIONS, places):
        where = f"{place} ({places[place]})"
        found = rows.get((option, place))
        if found is None:
            lines.append(f"| {option} | {where} | does not exist there | | | | |")
            continue
        ms = "no device" if found["ms"] is None else f"{found['ms']:.3f}"
        unlike = f"{found['differ_from_ours']:,} of {found['total']:,}"
        lines.append(
            f"| {option} | {where} | {found['tries']} | {found['groups']} | {unlike} | {found['max_ulp']:.3f} | {ms} |"
        )
    return "\n".join(lines)


def page(check: bool) -> None:
    """Write the table into the evidence page, or (check) exit with 1 if it is not what the results say."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    made = f"{before}{BEGIN}\n{table(load())}\n{END}{rest.split(END)[1]}"
    if check and made != text:
        raise SystemExit(f"{PAGE} is not what the results say: run `python scripts/lse_options.py page`")
    if not check:
        PAGE.write_text(made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("place", choices=list(PLACES))
    measuring.add_argument("--te-sources", type=Path, metavar="DIR")
    add_json(measuring)
    paging = commands.add_parser("page")
    paging.add_argument("--check", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if args.command == "page":
        page(args.check)
        return
    write_json(args.json or "-", measure(args.place, args.te_sources))


if __name__ == "__main__":
    main()
