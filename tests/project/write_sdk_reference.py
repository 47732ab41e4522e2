"""Writes docs/sdk-reference.md from the SDK's code: `PYTHONPATH=. python tests/project/write_sdk_reference.py`.

A test asserts that it is current.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from pie_xla.process.sdk import load_sdk

FILE = Path(__file__).parents[2] / "docs" / "sdk-reference.md"
HEAD = """# SDK reference

Written by `tests/project/write_sdk_reference.py` from the code; do not edit.
How the parts go together is in [sdk.md](sdk.md), the ops are in [ops.md](ops.md).
"""


def modules() -> Iterator[ModuleType]:
    """The public modules, the package itself first."""
    package = load_sdk()
    yield package
    for found in pkgutil.iter_modules(package.__path__, "inferlet."):
        if not found.name.rpartition(".")[2].startswith("_"):
            yield importlib.import_module(found.name)


def public(module: ModuleType) -> dict[str, Any]:
    """What the module offers: its `__all__`, else what it defines."""
    if module.__name__ == "inferlet.eta":  # the rest are ops
        names = [name for name in module.__all__ if inspect.isclass(getattr(module, name))]
    else:
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return {name: getattr(module, name) for name in names if callable(getattr(module, name))}


def signature(name: str, value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, Enum):
        return f"{name}: {', '.join(one.name for one in value)}"
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [one.replace(annotation=one.empty) for one in found.parameters.values() if one.name != "self"]
    text = f"{name}{found.replace(parameters=parameters, return_annotation=found.empty)}"
    return re.sub(r"<[^>]* object at 0x[0-9a-f]+>|<function [^>]*>", "...", text)


def members(owner: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if name.startswith("_") or not inspect.getdoc(value):
            continue
        if isinstance(value, (classmethod, staticmethod)):
            yield name, value.__func__
        elif inspect.isfunction(value) or isinstance(value, property):
            yield name, value


def described(value: Any) -> str:
    doc = value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)
    if not doc or doc.startswith(f"{getattr(value, '__name__', '')}("):  # a dataclass without one
        return ""
    return inspect.cleandoc(doc)


def block(text: str) -> str:
    """A docstring as Markdown: its sections become lists."""
    lines, inside = [], False
    for line in text.split("\n"):
        section = re.fullmatch(r"(Args|Attributes|Returns|Raises):(.*)", line)
        if section:
            lines += ["", f"*{section[1]}*:{section[2]}", ""]
            inside = True
        elif inside and line.startswith("    ") and not line.startswith("     "):
            name, colon, rest = line.strip().partition(": ")
            lines.append(f"- `{name}`: {rest}" if colon else f"- {line.strip()}")
        elif inside and line.strip():
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines).strip()


def text() -> str:
    parts = [HEAD]
    for module in modules():
        parts.append(f"## {module.__name__}\n\n{block(described(module))}\n")
        for name, value in public(module).items():
            parts.append(f"### `{signature(name, value)}`\n\n{block(described(value))}\n")
            if inspect.isclass(value):
                for member, found in members(value):
                    shown = (
                        member if isinstance(found, property) else re.sub(r"\(cls(, )?", "(", signature(member, found))
                    )
                    parts.append(f"**`{shown}`** {block(described(found))}\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
