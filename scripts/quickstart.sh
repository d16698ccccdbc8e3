#!/usr/bin/env bash
# Shows the fault and its absence on this machine: real megatron-core, one checkpoint, several parallel layouts.
# Options are those of scripts/quickstart.py (--help lists them); results go to out/.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
exec "$VENV_PYTHON" scripts/quickstart.py "$@"
