"""A Gluon kernel compiled for Hopper without a GPU, and what its machine code needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource


def compiled(
    function: Any, signature: dict[str, str], constants: dict[str, Any], aligned: tuple[str, ...] = ()
) -> Any:
    """The kernel as it is launched; pointers and the integers in `aligned` are multiples of 16."""
    source = GluonASTSource(
        fn=function,
        signature=signature,
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(function.arg_names)
            if signature[name].startswith("*") or name in aligned
        },
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def stack(kernel: Any) -> int:
    """Bytes of a thread's stack: what does not fit into its registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", report)[1])  # type: ignore[index]
