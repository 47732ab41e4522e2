"""Programs with layer stages are recorded as the guest records them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "inferlets" / "sdk" / "python"))
