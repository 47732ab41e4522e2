"""Functions that a model may call: described to its chat template, held to by a grammar, found in its text, run.

def weather(city: str, days: int = 1) -> str:
    "The weather forecast of a city."

box = tools.Toolbox([weather])
tokens = chat.render(messages, tools=box.describe())
for call in tools.parse(text): result = await box.run(call)
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from inferlet._errors import UsageError

_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_MARKED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A call that a model wrote."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tool:
    """A function, with the JSON Schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]


def tool(function: Callable[..., Any]) -> Tool:
    """A tool from a function: its name, its docstring, its annotated parameters.

    Raises:
        UsageError: a parameter without an annotation, or with one that has no JSON form here.
    """
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UsageError(f"tool {function.__name__}: {parameter} cannot be named in a call")
        if name not in hints:
            raise UsageError(f"tool {function.__name__}: parameter {name} needs an annotation, such as {name}: str")
        properties[name] = _schema(hints[name], f"tool {function.__name__}: parameter {name}")
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(function.__name__, inspect.getdoc(function) or "", schema, function)


class Toolbox:
    """Tools by name.

    Args:
        functions: tools, or functions that `tool` makes tools of.
    """

    def __init__(self, functions: Iterable[Tool | Callable[..., Any]]) -> None:
        made = [one if isinstance(one, Tool) else tool(one) for one in functions]
        self.tools = {one.name: one for one in made}
        if len(self.tools) != len(made):
            raise UsageError("two tools have the same name")

    def describe(self) -> list[dict[str, Any]]:
        """As chat templates take them: `chat.render(messages, tools=box.describe())`."""
        return [
            {
                "type": "function",
                "function": {"name": one.name, "description": one.description, "parameters": one.parameters},
            }
            for one in self.tools.values()
        ]

    def schema(self) -> dict[str, Any]:
        """JSON Schema of one call, `{"name": ..., "arguments": {...}}`, for `grammar.json_schema`."""
        return {"anyOf": [_call_schema(one) for one in self.tools.values()]}

    async def run(self, call: Call) -> Any:
        """What the tool gives; an async tool is awaited.

        Raises:
            UsageError: there is no such tool, or the arguments do not fit it. What the tool itself raises comes through.
        """
        found = self.tools.get(call.name)
        if found is None:
            raise UsageError(f"there is no tool {call.name!r:.60}; there is {', '.join(self.tools)}")
        try:
            inspect.signature(found.function).bind(**call.arguments)
        except TypeError as error:
            raise UsageError(f"tool {call.name}: {error}") from None
        result = found.function(**call.arguments)
        return await result if inspect.isawaitable(result) else result


def parse(text: str) -> list[Call]:
    """The calls in a model's text: between `<tool_call>` and `</tool_call>`, or the whole text as JSON, one or a list.

    What is no call is no error: a model may write anything.
    """
    found: list[Call] = []
    for part in _MARKED.findall(text) or [text]:
        try:
            value = json.loads(part)
        except ValueError:
            continue
        found += [made for one in (value if isinstance(value, list) else [value]) if (made := _call(one)) is not None]
    return found


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(value["name"], arguments) if isinstance(arguments, dict) else None


def _call_schema(one: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": one.name}, "arguments": one.parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _schema(hint: Any, what: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _KINDS:
        return {"type": _KINDS[hint]}
    if origin is list and len(arguments) == 1:
        return {"type": "array", "items": _schema(arguments[0], what)}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if one is type(None) else _schema(one, what) for one in arguments]}
    raise UsageError(f"{what} is {hint!r:.60}: use str, int, float, bool, list, dict, Literal or a union of them")
