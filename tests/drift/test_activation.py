"""`enable` makes flag and variable work in every process of an environment, or ends the interpreter in words."""

from __future__ import annotations

import os
import shutil
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
        (["--deterministic-rocm", "stable", "--lr", "1"], {}, "stable"),
        ([], {"DETERMINISTIC_ROCM": "stable"}, "stable"),
        (["--deterministic-rocm"], {"DETERMINISTIC_ROCM": "invariant"}, "invariant"),
    ],
    ids=["off", "bare flag", "flag with mode", "mode as a word", "variable", "both"],
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


ON = {"DETERMINISTIC_ROCM": "invariant"}
WHOSE = (
    "import sys, patches; from patches.arming import armed_mode; "
    "print('RAN with', patches.__file__, 'mode', armed_mode())"
)
OURS = f"RAN with {ROOT / 'patches' / '__init__.py'} mode invariant"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder that holds somebody else's package `patches`, as a command and as a library, and two scripts."""
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "__init__.py").write_text("print('FOREIGN')\n")
    (tmp_path / "patches" / "__main__.py").write_text("print('FOREIGN')\n")
    (tmp_path / "train.py").write_text(WHOSE + "\n")
    return tmp_path


@pytest.mark.parametrize("kind", ["package", "module"])
def test_a_foreign_patches_package_on_pythonpath_stops_the_job(
    python: str, foreign: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    if kind == "module":
        shutil.rmtree(foreign / "patches")
        (foreign / "patches.py").write_text("print('FOREIGN')\n")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    said = call(python, "-c", "print('RAN')", cwd=elsewhere, PYTHONPATH=str(foreign), **ON)
    assert "another package named patches" in said and str(foreign) in said and len(said.splitlines()) == 1, (
        said
    )


@pytest.mark.parametrize(
    "arguments", [["train.py"], ["-c", WHOSE], ["-m", "train"]], ids=["script beside it", "-c", "-m"]
)
def test_beside_a_foreign_patches_package_the_armed_one_is_imported(
    python: str, foreign: Path, arguments: list[str]
) -> None:
    """Python puts the folder of a script, or the working directory, first only after the layer has been loaded."""
    assert call(python, *arguments, cwd=foreign, **ON).splitlines() == [OURS]


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["-m", "patches", "run", "train.py"], {}),
        (["-mpatches", "run", "train.py"], {}),
        (["-um", "patches", "run", "train.py"], ON),
        (["-m", "patches", "run", "train.py", "--deterministic-rocm"], {}),
        (["-m", "patches", "status"], ON),
    ],
    ids=["run", "-mpatches", "with the variable", "with the flag", "another command with the variable"],
)
def test_our_commands_refuse_to_start_beside_a_foreign_patches_package(
    python: str, foreign: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    """`-m` would run the foreign package's `__main__`, and what follows would look armed."""
    said = call(python, *arguments, cwd=foreign, **environment)
    assert len(said.splitlines()) == 1 and "another package named patches" in said, said
    assert str(foreign) in said and "start from another folder" in said


def test_off_leaves_a_foreign_patches_package_alone(python: str, foreign: Path) -> None:
    assert call(python, "-m", "patches", "build", cwd=foreign).splitlines() == ["FOREIGN", "FOREIGN"]


def test_run_takes_a_script_that_lies_beside_a_foreign_patches_package(python: str, foreign: Path) -> None:
    assert call(python, "-m", "patches", "run", str(foreign / "train.py"), cwd=ROOT).splitlines() == [OURS]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P exists from Python 3.11 on")
def test_run_without_the_working_directory_on_the_path(python: str, foreign: Path) -> None:
    """-P keeps the foreign package out; `run` then adds no folder either, and drops none."""
    script = foreign / "train.py"
    script.write_text(f"{WHOSE}; print(sys.path[0])\n")
    path = f"{ROOT}{os.pathsep}{foreign.parent}"
    said = call(python, "-P", "-m", "patches", "run", "train.py", cwd=foreign, PYTHONPATH=path)
    assert said.splitlines() == [OURS, str(ROOT)]


def test_a_script_with_an_argument_like_our_command_is_armed(python: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WHOSE)
    assert call(python, "train.py", "-m", "patches", cwd=tmp_path, **ON).splitlines() == [OURS]


@pytest.mark.parametrize("beside", ["nothing", "foreign"])
def test_the_start_file_of_newer_pythons_arms_or_stops_as_well(
    python: str, foreign: Path, beside: str
) -> None:
    """PEP 829: beside a .start file the .pth line is not run; a name that does not resolve is printed and ignored."""
    program = (
        "import pkgutil, sys; sys.path.append({folder!r}); "
        "pkgutil.resolve_name(open({folder!r} + '/deterministic_rocm.start').read().strip())(); " + WHOSE
    )
    folder = call(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    if beside == "nothing":
        shutil.rmtree(foreign / "patches")
    program = program.format(folder=folder)
    said = call(python, "-S", "-c", program, cwd=foreign.parent, PYTHONPATH=str(foreign), **ON)
    if beside == "nothing":
        assert said.splitlines() == [OURS]
    else:
        assert len(said.splitlines()) == 1 and "another package named patches" in said


def test_a_package_that_is_gone_stops_the_job(tmp_path: Path) -> None:
    """A checkout that was enabled and then moved: Python would print the line's error and go on unarmed."""
    shutil.copytree(ROOT / "patches", tmp_path / "checkout" / "patches")
    for package in ("te_overrides", "megatron_plugins"):
        (tmp_path / "checkout" / package).symlink_to(ROOT / package)
    venv.create(tmp_path / "env", symlinks=True)
    python = str(tmp_path / "env" / "bin" / "python")
    assert "wrote" in call(python, "-m", "patches", "enable", cwd=tmp_path / "checkout")
    (tmp_path / "checkout").rename(tmp_path / "moved")
    said = call(python, "-c", "print('RAN')", cwd=tmp_path, **ON)
    assert (
        len(said.splitlines()) == 1 and "may not start" in said and "`enable` the package in use" in said
    ), said
    assert str(tmp_path / "checkout" / "patches" / "startup.py") in said and "FileNotFoundError" in said
    assert call(python, "-c", "print('RAN')", cwd=tmp_path) == "RAN\n"
    assert "wrote" in call(python, "-m", "patches", "enable", cwd=tmp_path / "moved")
    assert "mode invariant" in call(python, "-c", SHOW, cwd=tmp_path, **ON)


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


MEASURE = """
import os, sys, time
line = open(sys.argv[1]).read()
for _ in range(7):
    if os.fork() == 0:
        # CPU time: what other processes do meanwhile does not count.
        before = time.process_time()
        exec(line)
        used = time.process_time() - before
        layer = sys.modules.get("patches")
        print(used, layer and layer.armed_mode(), "torch" in sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize(
    ("environment", "mode", "promised"),
    [({}, "None", 0.001), (ON, "invariant", 0.050)],
    ids=["off: 1 ms", "armed: 50 ms"],
)
def test_start_up_takes_no_longer_than_promised(
    python: str, environment: dict[str, str], mode: str, promised: float
) -> None:
    """The fastest of seven fresh processes, each of which has imported nothing that the layer needs."""
    folder = call(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    path = str(Path(folder) / "deterministic_rocm.pth")
    runs = [line.split() for line in call(python, "-S", "-c", MEASURE, path, **environment).splitlines()]
    assert [run[1:] for run in runs] == [[mode, "False"]] * 7
    fastest = min(float(run[0]) for run in runs)
    print(f"{fastest * 1e3:.3f} ms")
    assert fastest < promised


def test_arming_imports_nothing_that_only_applying_needs(python: str) -> None:
    """What every start of an armed interpreter pays for: these cost as much as all the rest together."""
    folder = call(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    heavy = {"ast", "dataclasses", "hashlib", "inspect", "pathlib", "tokenize", "patches.applying"}
    show = (
        "import sys; exec(open(sys.argv[1]).read()); from patches.arming import armed_mode; print(armed_mode(), "
        f"*sorted({heavy} & {{*sys.modules}}))"
    )
    path = str(Path(folder) / "deterministic_rocm.pth")
    assert call(python, "-S", "-c", show, path, **ON).split() == ["invariant"]


def test_disable_removes_what_enable_wrote(python: str, tmp_path: Path) -> None:
    assert call(python, "-m", "patches", "disable", cwd=ROOT).count("removed") == 3
    assert "mode None" in call(python, "-c", SHOW, cwd=tmp_path, DETERMINISTIC_ROCM="invariant")
    assert "enabled at interpreter start: no" in call(python, "-m", "patches", "status", cwd=ROOT)
    call(python, "-m", "patches", "enable", cwd=ROOT)
    assert "enabled at interpreter start: yes" in call(python, "-m", "patches", "status", cwd=ROOT)


@pytest.fixture
def locked(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, Path]:
    """An environment whose site-packages refuses every new file, also for root, who ignores permissions."""
    venv.create(tmp_path / "env", symlinks=True)
    executable = str(tmp_path / "env" / "bin" / "python")
    folder = Path(call(executable, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    shutil.rmtree(folder)
    if request.param == "read-only":
        folder.symlink_to("/sys/kernel")  # the kernel lets nobody make a file there
    else:
        folder.write_text("")
    return executable, folder


@pytest.mark.parametrize(
    ("locked", "found"),
    [("read-only", "Permission denied"), ("a file", "Not a directory")],
    ids=["read-only", "no folder"],
    indirect=["locked"],
)
def test_a_folder_that_cannot_be_written_is_told_and_another_way_named(
    locked: tuple[str, Path], found: str
) -> None:
    python, folder = locked
    (sentence,) = call(python, "-m", "patches", "enable", cwd=ROOT).splitlines()
    for words in (f"sought to write into {folder}", found, "virtual environment", "python -m patches run"):
        assert words in sentence, sentence
    assert "enabled at interpreter start: no" in call(python, "-m", "patches", "status", cwd=ROOT)
    # The way that the sentence names works there.
    (folder.parent / "train.py").write_text(SHOW)
    said = call(python, "-m", "patches", "run", str(folder.parent / "train.py"), cwd=ROOT)
    assert "mode invariant" in said


def test_a_file_that_cannot_be_removed_is_told(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    python = str(tmp_path / "bin" / "python")
    folder = call(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    (Path(folder) / "deterministic_rocm.pth").mkdir()
    (sentence,) = call(python, "-m", "patches", "disable", cwd=ROOT).splitlines()[-1:]
    assert (
        sentence.startswith(f"sought to remove files from {folder}, found ") and "stays enabled" in sentence
    )
