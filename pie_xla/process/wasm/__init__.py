"""The sandbox: inferlets as WebAssembly components, all of them on one thread."""

from pie_xla.process.wasm.hostapi import HostApi, Pending
from pie_xla.process.wasm.limits import ExitKind, GuestExit, Limits
from pie_xla.process.wasm.sandbox import GuestHandle, Sandbox

__all__ = ["ExitKind", "GuestExit", "GuestHandle", "HostApi", "Limits", "Pending", "Sandbox"]
