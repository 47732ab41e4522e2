"""The guest's tracing half is pure Python and runs here as it does in the sandbox."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "inferlets" / "sdk" / "python"))
