"""What every test run shares: one torch thread, reproducible hypothesis, GPU tests that are told when not run.

A skipped test prints one grey letter, and a suite of grey letters reads as a pass. So tests marked `gpu` that find
no GPU are listed at the end as "not run", with the command that runs them.
"""

from __future__ import annotations

import os

# Before anything imports torch: two workers on two cores leave one thread for each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Rank 0 of every armed world writes its ledger; the repository is no place for it.
os.environ.setdefault("DETERMINISTIC_ROCM_LEDGER", os.devnull)

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

NOT_RUN = "not run: "

settings.register_profile("repository", deadline=None, derandomize=True, database=None)
settings.load_profile("repository")


# First, since xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests/distributed; a file of it, or one with a fixture for the whole file, stays on one xdist worker."""
    distributed = Path(__file__).parent / "distributed"
    for item in items:
        if item.path.is_relative_to(distributed):
            item.add_marker("distributed")
        if item.get_closest_marker("distributed") or _has_fixture_of_its_file(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _has_fixture_of_its_file(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(d.scope == "module" for found in definitions for d in found)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop where xdist ignores its groups: costly fixtures would be made once a worker."""
    if getattr(session.config.option, "loadgroup", False):
        for item in session.items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid.rpartition("]")[2]:
                raise pytest.UsageError(
                    f"xdist was to keep {item.nodeid} with its group and has not: pytest {pytest.__version__} and the "
                    "pytest-xdist here do not go together. Install what scripts/requirements.txt names."
                )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked gpu(count=n) on a machine with fewer GPUs, with a reason that the summary lists."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    import torch

    need = marker.kwargs.get("count", marker.args[0] if marker.args else 1)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < need:
        pytest.skip(f"{NOT_RUN}needs {need} GPU{'s' * (need > 1)}, found {found}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what did not run: GPU suites with the command that runs them, other skips with their reason."""
    gpu: Counter[tuple[str, str]] = Counter()
    other: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        file = report.nodeid.split("::")[0]
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason.startswith(NOT_RUN):
            gpu[file, reason.removeprefix(NOT_RUN)] += 1
        else:
            other[file, reason] += 1
    if gpu:
        terminalreporter.section("GPU suites: not run")
        for (file, reason), count in sorted(gpu.items()):
            terminalreporter.write_line(f"not run: {count} in {file} ({reason})")
            terminalreporter.write_line(
                f"         on a machine with a GPU: bash scripts/test.sh -m gpu {file}"
            )
    if other:
        terminalreporter.section("skipped")
        for (file, reason), count in sorted(other.items()):
            terminalreporter.write_line(f"skipped: {count} in {file} ({reason})")
