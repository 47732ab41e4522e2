"""A warm start does not wait for what only an import or a cold start needs."""

from __future__ import annotations

import subprocess
import sys

KERNELS = "import sys, pie_xla.kernels.xla, pie_xla.kernels.cpu, pie_xla.engine.engine; print('flax' in sys.modules)"


def test_kernels_and_engine_do_not_import_flax() -> None:
    said = subprocess.run([sys.executable, "-c", KERNELS], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"  # 17 MiB and half a second
