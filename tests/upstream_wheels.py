"""Unpacked sources of upstream releases, downloaded once, for tests that run against the real thing.

The cache is `.cache/wheels` in the repository, or $DETERMINISTIC_ROCM_CACHE. A release that cannot be had fails the
test in words: a check against upstream that did not run must not read as a pass.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRANSFORMER_ENGINE = ("2.4.0", "2.10.0", "2.16.0", "2.19.0", "2.20.2")
"""Releases the overrides are proved against: a change of formula, of signature or of a name lies between any two."""


class UpstreamUnavailable(AssertionError):
    """An upstream release could not be downloaded, so what the test claims was not checked."""


def cache_folder() -> Path:
    """Where unpacked releases are kept."""
    return Path(os.environ.get("DETERMINISTIC_ROCM_CACHE") or ROOT / ".cache") / "wheels"


MEGATRON_CORE = ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Releases the modules and overrides are proved against."""


def _for_newer_python() -> list[str]:
    """pip options that take a wheel built for Python 3.12: its Python sources run on older ones as well."""
    machine = platform.machine()
    return [
        *("--python-version", "3.12", "--implementation", "cp"),
        *(
            word
            for glibc in ("2_28", "2_24", "2_17")
            for word in ("--platform", f"manylinux_{glibc}_{machine}")
        ),
    ]


def sources(version: str, distribution: str = "transformer-engine") -> Path:
    """The folder with the packages of one release whose Python sources are wanted, and its `.dist-info`.

    Raises:
        UpstreamUnavailable: pip cannot download it; the message ends with what pip said.
    """
    folder = cache_folder() / f"{distribution}-{version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        download = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            + (_for_newer_python() if distribution == "megatron-core" else [])
            + ["--only-binary=:all:", "--dest", name, f"{distribution}=={version}"],
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = sorted(Path(name).glob("*.whl"))
        if download.returncode or not wheels:
            raise UpstreamUnavailable(
                f"sought the wheel of {distribution} {version}, to test against upstream's own source; pip ended with "
                f"status {download.returncode}: {download.stderr.strip()[-600:]}\nEither give pip a package index "
                f"(PIP_INDEX_URL), or unpack the wheel into {folder}."
            )
        unpacked = Path(name) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(unpacked)
        try:
            unpacked.rename(folder)
        except OSError:
            # Another test process was faster; its copy is the same.
            if not folder.is_dir():
                raise
    return folder
