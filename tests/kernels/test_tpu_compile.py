"""SmolLM2-135M's decode and prefill steps compile for a TPU slice, and fit, without a TPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HBM = 16 << 30  # a v5e chip
MIB = 1 << 20


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What the compiler said; libtpu lives in a process of its own."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "",
    }
    worker = Path(__file__).with_name("tpu_compile_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker)], env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loaded: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return loaded


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (test extra)")
@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_step_compiles_for_v5e(report: dict[str, Any], step: str) -> None:
    """One kernel in one loop over layers, the pool updated in place, temporaries far below one layer's pages."""
    found = report[step]
    share = report["pool"] // 4  # padded to 4 kv heads, one per device
    assert found["kernels"] == 1 and found["loops"] == 1
    assert found["sums"] > 0  # tensor-parallel: blocks end in a sum over devices
    assert share <= found["aliased"] < share + MIB
    assert found["temporary"] < 32 * MIB < share // 30
    resident = found["arguments"] + found["outputs"] - found["aliased"] + found["temporary"]
    assert resident < HBM
    # Whole on each chip: the attention projections (9 and 3 heads do not divide by 4); a quarter of all else.
    assert found["arguments"] - share < 0.5 * 2 * 134_515_008
    assert report["padding"] == "9/3 heads of 64 padded to 12/4 of 128: KV bytes x2.67, attention FLOPs x2.67"
