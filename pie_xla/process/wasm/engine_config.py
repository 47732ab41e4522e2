"""The one wasmtime engine of the sandbox, and the fingerprint of what its compiled code depends on."""

from __future__ import annotations

import platform
from importlib.metadata import version

import wasmtime
from wasmtime import _ffi as ffi

# Deeply nested source overflows wasmtime's default 512 KiB before CPython's own recursion check can raise.
WASM_STACK_BYTES = 4 << 20
# The fiber's whole stack: wasm frames, and above them the host functions in Python.
FIBER_STACK_BYTES = 8 << 20
# Address space per guest memory; the default of 4 GiB makes a thousand guests look like terabytes.
MEMORY_RESERVATION_BYTES = 512 << 20


def new_engine() -> wasmtime.Engine:
    config = wasmtime.Config()
    config.epoch_interruption = True
    config.max_wasm_stack = WASM_STACK_BYTES
    config.memory_reservation = MEMORY_RESERVATION_BYTES
    ffi.wasmtime_config_async_stack_size_set(config.ptr(), FIBER_STACK_BYTES)
    # Off: with it wasmtime 50 traps a host function that borrows two resources; the world has no async functions.
    ffi.wasmtime_config_concurrency_support_set(config.ptr(), False)
    return wasmtime.Engine(config)


def fingerprint() -> str:
    """What compiled code depends on besides the component: wasmtime, its settings, the machine."""
    settings = f"epoch,stack={WASM_STACK_BYTES},fiber={FIBER_STACK_BYTES},reserve={MEMORY_RESERVATION_BYTES},noconc"
    return f"wasmtime-{version('wasmtime')};{settings};{platform.system()}-{platform.machine()}"
