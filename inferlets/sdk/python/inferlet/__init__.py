"""The guest side of pie-xla: what an inferlet imports.

`inferlet.eta` drives the model pass by pass, `inferlet.model` and `inferlet.chat` turn text into tokens and back,
`inferlet.session` talks to whoever launched the program, `inferlet.sample` holds ready epilogues, `generate` continues a prompt.
Pure Python: the same files run in the sandbox's CPython and natively.
"""

from __future__ import annotations

from inferlet._errors import InferletError, PassError, ProcessError, RefusedError, UsageError
from inferlet._generate import Generation, Item, Reason, generate, generate_many
from inferlet._version import version, world

for _public in (InferletError, PassError, ProcessError, RefusedError, UsageError, Generation, Item, Reason):
    _public.__module__ = __name__  # tracebacks show the name that authors import

__all__ = [
    "Generation",
    "InferletError",
    "Item",
    "PassError",
    "ProcessError",
    "Reason",
    "RefusedError",
    "UsageError",
    "generate",
    "generate_many",
    "version",
    "world",
]
__version__ = version
