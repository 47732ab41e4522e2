"""Strict reading of a checkpoint's config.json into a family's frozen `Config`."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from poem.spec import PoemError

WINDOW_TYPES = {"full_attention": "full", "sliding_attention": "window"}

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
            raise PoemError(f"config.json has no {field.name!r}", "the checkpoint's config is incomplete")
    return cls(**values)


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of a head, given or derived."""
    width = config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    return int(width)


def window_groups(config: Mapping[str, Any], derived: Sequence[str]) -> tuple[str, ...]:
    """State group of each layer, from `layer_types` or, in older files, from the derived types."""
    types = config.get("layer_types") or derived[: config.get("num_hidden_layers", 0)]
    if unknown := sorted(set(types) - WINDOW_TYPES.keys()):
        raise PoemError(f"layer type {unknown[0]!r} is not supported", f"supported: {', '.join(WINDOW_TYPES)}")
    if len(types) != config.get("num_hidden_layers", len(types)):
        raise PoemError(f"layer_types names {len(types)} layers, num_hidden_layers is {config['num_hidden_layers']}")
    return tuple(WINDOW_TYPES[kind] for kind in types)


def _check(name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            supported = ", ".join(repr(a) for a in get_args(hint))
            raise PoemError(f"config field {name}: {value!r} is not supported", f"supported: {supported}")
        return value
    if isinstance(hint, type) and issubclass(hint, Enum):
        known = [member.value for member in hint]
        if value not in known:
            raise PoemError(f"config field {name}: {value!r} is not supported", f"supported: {', '.join(known)}")
        return hint(value)
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    for kind in kinds:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(kind, type) and isinstance(value, kind) and (kind is bool) == isinstance(value, bool):
            return value
    raise PoemError(f"config field {name}: {value!r} is not a {hint if isinstance(hint, str) else _name(hint)}")


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
