"""`enable` makes flag and variable work in every process of an environment, or ends the interpreter in words."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOW = (
    "import sys; p = sys.modules.get('patches'); "
    "print('mode', p and p.armed_mode(), 'torch', 'torch' in sys.modules)"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An empty environment in which the layer is enabled."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, symlinks=True)
    executable = str(folder / "bin" / "python")
    said = call(executable, "-m", "patches", "enable", cwd=ROOT)
    assert "deterministic_rocm.pth" in said
    return executable


def call(python: str, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("DETERMINISTIC_ROCM", "PYTHONPATH")}
    done = subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "mode"),
    [
        ([], {}, "None"),
        (["--deterministic-rocm"], {}, "invariant"),
        (["--lr", "1", "--deterministic-rocm=stable"], {}, "stable"),
        ([], {"DETERMINISTIC_ROCM": "stable"}, "stable"),
        (["--deterministic-rocm"], {"DETERMINISTIC_ROCM": "invariant"}, "invariant"),
    ],
    ids=["off", "bare flag", "flag with mode", "variable", "both"],
)
def test_the_flag_and_the_variable_arm_any_command_line(
    python: str, tmp_path: Path, arguments: list[str], environment: dict[str, str], mode: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHOW)
    assert f"mode {mode} torch False" in call(python, str(script), *arguments, cwd=tmp_path, **environment)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--deterministic-rocm=fast"], {}, ["may not start", "ModeError", "'fast'"]),
        ([], {"DETERMINISTIC_ROCM": "yes"}, ["may not start", "ModeError", "'yes'"]),
        (
            ["--deterministic-rocm"],
            {"DETERMINISTIC_ROCM": "stable"},
            ["may not start", "=invariant", "=stable"],
        ),
    ],
    ids=["unknown mode", "unknown variable", "contradiction"],
)
def test_what_is_wrong_ends_the_interpreter_in_one_sentence(
    python: str, tmp_path: Path, arguments: list[str], environment: dict[str, str], words: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('RAN')")
    said = call(python, str(script), *arguments, cwd=tmp_path, **environment)
    assert "RAN" not in said and len(said.strip().splitlines()) == 1, said
    for word in words:
        assert word in said


@pytest.mark.parametrize("where", ["PYTHONPATH", "working directory"])
def test_a_foreign_patches_package_stops_the_job(python: str, tmp_path: Path, where: str) -> None:
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "__init__.py").write_text("")
    environment = {"PYTHONPATH": str(tmp_path)} if where == "PYTHONPATH" else {}
    arguments = ["-c", "print('RAN')"] if where == "PYTHONPATH" else ["-m", "site"]
    said = call(python, *arguments, cwd=tmp_path, DETERMINISTIC_ROCM="invariant", **environment)
    if where == "working directory":
        # `-m` puts the working directory first only after start-up: the armed package is already in place.
        said = call(
            python,
            "-c",
            "import patches; print(patches.__file__)",
            cwd=tmp_path,
            DETERMINISTIC_ROCM="invariant",
        )
        assert str(ROOT) in said or "may not start" in said
        return
    assert "another package named patches" in said and str(tmp_path) in said and "RAN" not in said


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_every_start_method_are_armed(python: str, tmp_path: Path, method: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, sys\n"
        f"def child():\n    {SHOW}\n"
        "if __name__ == '__main__':\n"
        f"    p = multiprocessing.get_context({method!r}).Process(target=child); p.start(); p.join()\n"
    )
    assert "mode invariant torch False" in call(python, str(script), "--deterministic-rocm", cwd=tmp_path)


def test_start_up_is_free_when_off_and_cheap_when_armed(python: str, tmp_path: Path) -> None:
    """Off: the line adds less than 1 ms; armed: below 50 ms without torch (loose bounds; figures are printed)."""
    measure = (
        "import time, os, sys; t = time.perf_counter(); "
        "exec(open({path!r}).read()); print('seconds', time.perf_counter() - t)"
    )
    folder = call(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    path = str(Path(folder) / "deterministic_rocm.pth")
    off = float(call(python, "-S", "-c", measure.format(path=path)).split()[-1])
    armed = float(
        call(python, "-S", "-c", measure.format(path=path), DETERMINISTIC_ROCM="invariant").split()[-1]
    )
    print(f"off {off * 1e3:.3f} ms, armed {armed * 1e3:.1f} ms")
    assert off < 0.005 and armed < 0.3


def test_disable_removes_what_enable_wrote(python: str, tmp_path: Path) -> None:
    assert "removed" in call(python, "-m", "patches", "disable", cwd=ROOT)
    assert "mode None" in call(python, "-c", SHOW, cwd=tmp_path, DETERMINISTIC_ROCM="invariant")
    assert "enabled at interpreter start: no" in call(python, "-m", "patches", "status", cwd=ROOT)
    call(python, "-m", "patches", "enable", cwd=ROOT)
    assert "enabled at interpreter start: yes" in call(python, "-m", "patches", "status", cwd=ROOT)


def test_a_folder_that_cannot_be_written_is_told_and_another_way_named(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from patches import activation, __main__\n"
        "def refuse(): raise PermissionError('read-only')\n"
        "activation.enable = refuse\n"
        "raise SystemExit(__main__.main(['enable']))"
    )
    said = call(sys.executable, "-c", program, str(ROOT), cwd=tmp_path)
    assert "read-only" in said and "python -m patches run" in said
