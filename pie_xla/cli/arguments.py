"""The words after `--` become the inferlet's input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from pie_xla.config import MODEL_NAME
from pie_xla.errors import UsageError


def parse_input(words: Sequence[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--flag` (True) and `--no-flag` (False) as a dict.

    Dashes in a key become underscores. A value that is JSON (a number, true, false, null, a quoted text, a list or an
    object) is that JSON value; anything else is text as it stands. So `--n 3` is the number 3, `--n '"3"'` the text.

    Raises:
        UsageError: a word that belongs to no key, an empty key, or a key given twice.
    """
    result: dict[str, Any] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--"):
            raise UsageError(f"'{word}' belongs to no key", "write the inferlet's input as `-- --key value`")
        key, equals, text = word[2:].partition("=")
        value: Any
        if equals:
            value = _value(text)
        elif position < len(words) and not words[position].startswith("--"):
            value = _value(words[position])
            position += 1
        elif key.startswith("no-"):
            key, value = key[3:], False
        else:
            value = True
        name = key.replace("-", "_")
        if not name.isidentifier():
            raise UsageError(f"'{word}' has no usable key", "keys are letters, digits, dashes and underscores")
        if name in result:
            raise UsageError(f"--{key} is given twice", f"give a list instead: --{key} '[1, 2]'")
        result[name] = value
    return result


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return text


def _not_json(text: str) -> NoReturn:
    raise ValueError(text)


def parse_models(words: tuple[str, ...]) -> dict[str, str]:
    """NAME=MODEL words as name -> model of the store; MODEL alone is its own name.

    Raises:
        UsageError: a word of another form, or a name given twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, model = word.partition("=")
        model = model if equals else name
        if not MODEL_NAME.fullmatch(name) or not model:
            raise UsageError(f"'{word}' is not NAME=MODEL", "as in --with draft=smollm2-135m-instruct")
        if name in found:
            raise UsageError(f"--with {name} is given twice", "each name stands for one model")
        found[name] = model
    return found
