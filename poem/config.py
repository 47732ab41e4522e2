"""Strict reading of a checkpoint's config.json into a family's frozen `Config`."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from poem.spec import PoemError

C = TypeVar("C")


def read_config(cls: type[C], config: Mapping[str, Any], **derived: Any) -> C:
    """`cls` from the config's fields of the same names; `derived` wins over the file, the dataclass's defaults fill in.

    A missing field, a wrong type and a value outside a `Literal` are refused by name.
    """
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in derived:
            values[field.name] = derived[field.name]
        elif config.get(field.name) is not None:
            values[field.name] = _check(field.name, config[field.name], hints[field.name])
        elif field.default is dataclasses.MISSING:
            kind = config.get("model_type")
            raise PoemError(f"config.json of this {kind} model has no {field.name!r}", "the checkpoint's config is incomplete")
    return cls(**values)


def _check(name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            supported = ", ".join(repr(a) for a in get_args(hint))
            raise PoemError(f"config field {name}: {value!r} is not supported", f"supported: {supported}")
        return value
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    for kind in kinds:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(kind, type) and isinstance(value, kind) and (kind is bool) == isinstance(value, bool):
            return value
    raise PoemError(f"config field {name}: {value!r} is not a {hint if isinstance(hint, str) else _name(hint)}")


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
