# Sourced by quickstart.sh and test.sh: makes .venv at the root of the repository what both need, or stops in words.
#
# Nothing outside .venv is changed. An installed torch (ROCm, CUDA or CPU build) is used; only a machine without one
# gets a copy. When the stamp in .venv matches this file, the requirement list and the Python in use, nothing runs.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
VENV_PYTHON=$VENV/bin/python
SETUP_LOG=$VENV/setup.log
TORCH_REQUIREMENT='torch==2.13.0'
TRITON_REQUIREMENT='triton>=3.4'
TE_REQUIREMENT='transformer-engine==2.20.2'

say() { printf 'setup: %s\n' "$*" >&2; }

die() {
    say "FAILED"
    printf '  %s\n' "$@" >&2
    exit 1
}

# Import a module for real: a spec alone would accept a torch whose libraries are missing.
imports() { "$1" -c "import $2" >/dev/null 2>&1; }

describe() { "$1" -c 'import platform, sys; print(platform.python_version(), sys.executable)' 2>/dev/null; }

# Sets BASE_PYTHON and BASE_HAS_TORCH: of the Pythons that can make a virtual environment, the first that has torch,
# else the first.
find_python() {
    local candidate found='' report=() candidates=(python3 python3.12 python3.11 python3.10)
    BASE_PYTHON='' BASE_HAS_TORCH=no
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if ! found=$(describe "$candidate"); then
            report+=("$candidate: not found")
        elif ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            report+=("$candidate: is $found, too old")
        elif ! imports "$candidate" 'venv, ensurepip'; then
            report+=("$candidate: is $found, without venv and ensurepip (Debian and Ubuntu: install python3-venv)")
        else
            if imports "$candidate" torch; then
                BASE_PYTHON=$candidate BASE_HAS_TORCH=yes
                return
            fi
            BASE_PYTHON=${BASE_PYTHON:-$candidate}
        fi
    done
    [ -n "$BASE_PYTHON" ] || die \
        "Sought: Python 3.10 or newer with the modules venv and ensurepip." \
        "Found:" "${report[@]/#/  }" \
        "What to do: install one, or name yours: PYTHON=/path/to/python3 bash $0"
}

make_venv() {
    find_python
    local options=()
    say "1/4 making .venv with Python $(describe "$BASE_PYTHON"), torch there: $BASE_HAS_TORCH"
    [ "$BASE_HAS_TORCH" = no ] || options+=(--system-site-packages)
    "$BASE_PYTHON" -m venv ${options[@]+"${options[@]}"} "$VENV" || die \
        "Sought: a virtual environment at $VENV." \
        "Found: $BASE_PYTHON -m venv failed, see above." \
        "What to do: free disk space or permissions, remove $VENV, run again."
    # A virtual environment made from another one sees the base Python's packages, not that other one's.
    if [ "$BASE_HAS_TORCH" = yes ] && ! imports "$VENV_PYTHON" torch; then
        "$BASE_PYTHON" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)' \
            >"$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base_site.pth"
    fi
}

# pip_install WHAT ARGUMENTS...: pip with its output in the log, a sign of life every ten seconds, and a message
# that shows the end of the log when it fails.
pip_install() {
    local what=$1 pid seconds=0 status=0
    shift
    say "$what"
    "$VENV_PYTHON" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@" \
        >>"$SETUP_LOG" 2>&1 </dev/null &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        seconds=$((seconds + 1))
        [ $((seconds % 50)) -ne 0 ] || say "    $((seconds / 5)) s: $(tail -n 1 "$SETUP_LOG" | cut -c 1-90)"
    done
    wait "$pid" || status=$?
    [ "$status" -eq 0 ] || {
        tail -n 15 "$SETUP_LOG" >&2
        die "Sought: pip install $*, for Python $(describe "$VENV_PYTHON")." \
            "Found: pip ended with status $status; the end of $SETUP_LOG is above." \
            "What to do: see that pip reaches a package index that has these versions for this Python" \
            "  (pip config list; PIP_INDEX_URL; a proxy), or choose another with PYTHON=… after removing .venv."
    }
}

stamp_of() {
    { "$VENV_PYTHON" -V && cat "$ROOT/scripts/requirements.txt" "$ROOT/scripts/setup_env.sh"; } 2>/dev/null | cksum
}

set_up() {
    if [ -f "$VENV/setup.stamp" ] && [ "$(cat "$VENV/setup.stamp")" = "$(stamp_of)" ]; then
        return
    fi
    local started=$SECONDS
    if [ ! -e "$VENV" ]; then
        make_venv
    elif ! describe "$VENV_PYTHON" >/dev/null; then
        die "Sought: a Python that runs at $VENV_PYTHON." \
            "Found: none (an interrupted set-up, or its base Python has been removed)." \
            "What to do: rm -r $VENV, then run again."
    elif ! "$VENV_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        die "Sought: Python 3.10 or newer in $VENV." \
            "Found: Python $(describe "$VENV_PYTHON")." \
            "What to do: remove or rename $VENV, then run again."
    else
        say "1/4 using the .venv that is there, Python $(describe "$VENV_PYTHON")"
    fi

    if imports "$VENV_PYTHON" torch; then
        say "2/4 using the installed torch"
    else
        pip_install "2/4 installing $TORCH_REQUIREMENT (the largest part; some minutes on a slow line)" \
            "$TORCH_REQUIREMENT"
        imports "$VENV_PYTHON" torch || die \
            "Sought: a torch that can be imported, after installing $TORCH_REQUIREMENT." \
            "Found: $("$VENV_PYTHON" -c 'import torch' 2>&1 | tail -n 1)" \
            "What to do: mend what the line above names, or install a torch yourself, then run again."
    fi
    # Whatever comes next must live with this torch; pip would otherwise feel free to replace it.
    "$VENV_PYTHON" -c 'import torch; print(f"torch=={torch.__version__}")' >"$VENV/constraints.txt"

    pip_install "3/4 installing megatron-core, the tests' tools and what draws the report" \
        --constraint "$VENV/constraints.txt" --requirement "$ROOT/scripts/requirements.txt"
    imports "$VENV_PYTHON" triton || pip_install "    installing $TRITON_REQUIREMENT" --no-deps "$TRITON_REQUIREMENT"
    # Beside site-packages and without dependencies: megatron-core imports a transformer_engine that it finds, and
    # without its compiled half that fails. Only its Python sources are wanted here, by those who ask for this folder.
    if imports "$VENV_PYTHON" transformer_engine; then
        say "4/4 using the installed transformer-engine"
    else
        pip_install "4/4 unpacking the sources of $TE_REQUIREMENT beside the environment" \
            --no-deps --upgrade --target "$VENV/transformer-engine-sources" "$TE_REQUIREMENT"
    fi
    stamp_of >"$VENV/setup.stamp"
    say "done in $((SECONDS - started)) s"
}

set_up
