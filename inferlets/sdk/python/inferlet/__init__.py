"""The guest side of pie-xla: what an inferlet imports.

`inferlet.eta` drives the model pass by pass, `inferlet.model` and `inferlet.chat` turn text into tokens and back,
`inferlet.session` talks to whoever launched the program, `inferlet.sample` holds ready epilogues.
Pure Python: the same files run in the sandbox's CPython and natively.
"""

from __future__ import annotations

from inferlet._errors import InferletError, PassError, ProcessError, RefusedError, UsageError
from inferlet._version import version, world

for _error in (InferletError, PassError, ProcessError, RefusedError, UsageError):
    _error.__module__ = __name__  # tracebacks show the name that authors import

__all__ = ["InferletError", "PassError", "ProcessError", "RefusedError", "UsageError", "version", "world"]
__version__ = version
