"""Entry point of `python -m te_overrides.audit`."""

import sys

from te_overrides.audit.cli import main

sys.exit(main())
