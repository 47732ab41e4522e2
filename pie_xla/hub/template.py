"""Chat templates: untrusted jinja text, run in jinja's immutable sandbox with the semantics of transformers.

Follows `transformers.utils.chat_template_utils` (5.24), so that what is rendered is equal to `apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from pie_xla.errors import PieError, UsageError

Message = Mapping[str, Any]
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    special: Mapping[str, str],
    now: Callable[[], datetime] = datetime.now,
) -> str:
    """The text of a conversation.

    Args:
        template: jinja text.
        messages: {"role", "content", ...} as in the OpenAI API.
        tools: JSON schemas, or None.
        special: {"bos_token": "<bos>", ...}.
        now: the clock of `strftime_now`.

    Raises:
        PieError: the template is broken, or refuses the conversation; its own words are in the message.
    """
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError

    try:
        return str(
            _compile(template, now).render(
                messages=[_normal(message) for message in messages],
                tools=None if tools is None else _plain(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **special,
            )
        )
    except SecurityError as error:
        raise PieError(
            f"the chat template was stopped by its sandbox: {error}", "do not trust this model's template"
        ) from error
    except TemplateError as error:
        raise PieError(
            f"the chat template refuses the conversation: {error.message or type(error).__name__}"
        ) from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, LookupError, RecursionError) as error:
        raise PieError(
            f"the chat template fails on the conversation: {error}", "is a message not of the shape it expects?"
        ) from error


def _normal(message: Message) -> dict[str, Any]:
    """Without None values; the reasoning under every name that templates read."""
    kept = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in _REASONING if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """The value out of JSON types alone: objects would bring their methods into the sandbox."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            raise UsageError(f"a chat message holds a {type(value).__name__}", "messages are made of JSON values")


@lru_cache(maxsize=32)
def _compile(template: str, now: Callable[[], datetime]) -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.utils
    from jinja2.exceptions import SecurityError, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant wrote, for training masks; here it is its content."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    class Namespace(jinja2.utils.Namespace):
        """Without underscore names: the sandbox guards attribute reads, not these writes."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, rest = args[0], args[1:]
            attributes = dict(*rest, **kwargs)
            for name in attributes:
                _guard(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _guard(name)
            super().__setitem__(name, value)

    def _guard(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace attribute may not start with an underscore: {name!r}")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja's own filter escapes HTML characters
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now, "namespace": Namespace}
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise PieError(f"the model's chat template is broken: line {error.lineno}: {error.message}") from error
