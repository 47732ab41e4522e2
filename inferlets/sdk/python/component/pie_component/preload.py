"""Import the standard library while the component is built.

Imports resolve at build time only: a module that is not in the snapshot is gone at run time. Loading all of it makes
the component larger and no slower to start (memory is copy on write).
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings

# What cannot work without processes, terminals, C libraries or a display, and what only tests use.
_SKIP = {
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "turtle",
    "ensurepip",
    "antigravity",
    "this",
    "pydoc_data",
    "curses",
}
_SKIP |= {"nturl2path", "venv", "dbm", "ctypes", "pdb", "profiling", "multiprocessing", "sqlite3", "wsgiref", "xmlrpc"}
# Packages with parts that are imported lazily.
_PACKAGES = (
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "encodings",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
)
_PACKAGES += ("os", "pathlib", "re", "string", "unittest", "urllib", "xml", "zoneinfo")
# Other platforms, and the code pages of old ones: half of the encodings' size.
_SKIP_PARTS = (
    "__main__",
    "windows",
    "proactor",
    "concurrent.interpreters",
    "mac_",
    "iso8859",
    "iso2022",
    "big5",
    "euc_",
)
_SKIP_PARTS += (".gb", "shift_", "johab", "koi8", ".hz", "ptcp", "kz1", "mbcs", "oem", "tis_")
_SKIP_PARTS += ("cp1", "cp4", "cp5", "cp6", "cp7", "cp8", "cp9")


def preload() -> None:
    """Import what the standard library has for this platform; a module that the platform lacks is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(sys.stdlib_module_names - _SKIP):
            if not name.startswith("_"):
                _try(name)
        for package in _PACKAGES:
            module = _try(package)
            for _, name, _ in pkgutil.walk_packages(getattr(module, "__path__", []), package + "."):
                if not any(part in name for part in _SKIP_PARTS):
                    _try(name)


def _try(name: str) -> object:
    try:
        return importlib.import_module(name)
    except BaseException:  # a module that wants what this platform lacks may raise anything
        return None
