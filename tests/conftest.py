"""What every test runs under: strict JAX, warnings as errors, four virtual CPU devices, a real model imported once."""

from __future__ import annotations

import os
import zlib

import pytest

# Before JAX is imported anywhere, here and in the processes that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "PIE_XLA_CONFIG", "PIE_XLA_HOME"):
    os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", help="run only share K (from 0) of N of the selected tests")


@pytest.hookimpl(trylast=True)  # after -m, so that each share gets its part of what that selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.getoption("--share")
    if share is None:
        return
    number, total = map(int, share.split("/"))
    kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % total == number]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
