"""pie-xla: a model server that serves programs, not prompts."""

from __future__ import annotations

__version__ = "0.1.0"
