"""The shape of the repository: what lies where, and that the few lists in it agree with the tree."""

import fnmatch
import importlib.util
import re
import subprocess
import sys
from collections import Counter

import pytest
from tree import ROOT, TOP_PACKAGES, configuration, listed, shown, sources

TOP_LEVEL = {
    *TOP_PACKAGES,
    *("scripts", "tests", "docs", "setup.cfg"),
    *("pyproject.toml", "README.md", "LICENSE", ".gitignore", ".pre-commit-config.yaml", ".ci", ".git"),
}


def test_the_top_level_holds_what_the_owner_laid_down_and_small_root_files():
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    found = {path.name for path in ROOT.iterdir()}
    kept = {name for name in found if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)}
    assert kept - TOP_LEVEL == set()
    assert TOP_LEVEL - {".git"} - found == set()


def test_every_package_directory_is_listed_in_setup_cfg():
    folders = {path.parent for path in sources(*TOP_PACKAGES)}
    for folder in folders:
        assert (folder / "__init__.py").is_file(), f"{shown(folder)} holds Python files and no __init__.py"
    want = sorted(shown(folder).replace("/", ".") for folder in folders)
    assert listed("options", "packages") == want, (
        "setup.cfg [options] packages should be:\n    " + "\n    ".join(want)
    )


def test_tests_scripts_and_docs_are_no_packages():
    for folder in ("tests", "scripts", "docs"):
        assert list((ROOT / folder).rglob("__init__.py")) == []


def test_no_two_test_modules_share_a_name():
    names = Counter(path.name for path in sources("tests"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_test_helper_hides_a_module_that_tests_import():
    helpers = {path.stem for path in sources("tests")} | {path.stem for path in sources("scripts")}
    assert (
        helpers & (set(sys.stdlib_module_names) | {"torch", "numpy", "rich", "triton", "megatron"}) == set()
    )


def test_the_readme_names_exactly_two_set_up_commands():
    text = (ROOT / "README.md").read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    commands = [line.split("#")[0].strip() for line in blocks.splitlines()]
    assert [line for line in commands if "scripts/" in line] == [
        "bash scripts/quickstart.sh",
        "bash scripts/test.sh",
    ]
    assert not re.search(r"pip3? install|apt(-get)? install|conda ", blocks)


def test_ci_calls_the_test_command_and_installs_nothing_itself():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    assert commands[-1] == "exec bash scripts/test.sh"
    assert not any(re.search(r"\b(pip3?|apt|apt-get|conda)\b", line) for line in commands)


def test_what_the_extras_name_is_what_the_setup_installs():
    requirements = [
        line
        for line in (ROOT / "scripts" / "requirements.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    shell = (ROOT / "scripts" / "setup_env.sh").read_text()
    extras = configuration()["options.extras_require"]
    assert set(listed("options.extras_require", "megatron")) <= set(requirements)
    assert set(listed("options.extras_require", "dev")) - {"pre-commit"} <= set(requirements)
    assert f"TRITON_REQUIREMENT='{extras['gpu'].strip()}'" in shell


@pytest.mark.parametrize("section", ["mypy", "tool:pytest"])
def test_setup_cfg_configures_the_tools(section):
    assert configuration().has_section(section)


def test_links_between_documents_resolve():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)# ]+)[^)]*\)", page.read_text())]
    files = [(page, link) for page, link in links if "://" not in link]
    assert len(files) > 10
    assert [f"{shown(page)} -> {link}" for page, link in files if not (page.parent / link).exists()] == []


def test_the_local_bans_hold():
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "local_bans.py")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def _bans():
    spec = importlib.util.spec_from_file_location("local_bans", ROOT / "scripts" / "local_bans.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["local_bans"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("te_overrides/k.py", "@triton.autotune(configs=[], key=[])\ndef k(): ...", "@triton.autotune"),
        ("te_overrides/k.py", "@autotune\ndef k(): ...", "@triton.autotune"),
        ("te_overrides/k.py", "def k(p):\n    tl.atomic_add(p, 1)", "tl.atomic_add"),
        ("patches/x.py", "def f():\n    import torch.nn as nn", "torch is imported under patches/"),
        ("patches/x.py", "from torch import nn", "torch is imported under patches/"),
        ("scripts/x.py", "try:\n    f()\nexcept:\n    pass", "broad except"),
        ("scripts/x.py", "try:\n    f()\nexcept Exception as e:\n    print(e)", "broad except"),
        ("scripts/x.py", "try:\n    f()\nexcept (ValueError, BaseException):\n    pass", "broad except"),
    ],
)
def test_each_ban_finds_what_it_bans(path, source, rule):
    bans = _bans()
    found = [str(finding) for finding in bans.findings(bans.Path(path), source)]
    assert len(found) == 1
    assert rule in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("te_overrides/k.py", "import torch"),
        ("patches/x.py", "import torch_like\nfrom .torch import x\nsys.modules.get('torch')"),
        ("scripts/x.py", "try:\n    f()\nexcept BaseException:\n    tell()\n    raise"),
        ("scripts/x.py", "try:\n    f()\nexcept (OSError, ValueError):\n    pass"),
        ("scripts/x.py", "s = '@triton.autotune tl.atomic_add'"),
    ],
)
def test_no_ban_finds_what_is_allowed(path, source):
    bans = _bans()
    assert list(bans.findings(bans.Path(path), source)) == []
