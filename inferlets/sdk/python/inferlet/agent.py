"""Agents: a model that calls tools until it has an answer. An agent can be a tool of another one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from inferlet import grammar
from inferlet._errors import InferletError, UsageError
from inferlet._generate import generate
from inferlet.sample import Sampler
from inferlet.tools import Call, Tool, Toolbox

_RULES = """You solve tasks step by step. Answer with one JSON object and nothing else, either a call of a tool,
{"thought": "...", "name": "tool", "arguments": {...}}, or the final answer, {"thought": "...", "answer": "..."}.
Tools:
"""


@dataclass(frozen=True)
class Step:
    """One turn of an agent: what it thought, the tool that it called, and what came back."""

    thought: str
    call: Call
    result: str


@dataclass(frozen=True)
class Result:
    """How an agent ended. `answer` is None if it had none within its steps."""

    answer: str | None
    steps: tuple[Step, ...] = field(default_factory=tuple)


class Agent:
    """ReAct (Yao et al. 2022, arXiv:2210.03629): think, act, observe, until there is an answer.

    A grammar holds every turn to a call that the tools take, or to an answer: whatever the model is, it parses. What a tool raises is
    told to the model.

    Args:
        tools: functions or `tools.Tool`s.
        system: what the model is told about its task, before the rules of answering.
        max_steps: calls of tools, after which only an answer is allowed.
        max_tokens: of one turn.
        longest: characters of a thought, an answer and a text argument.
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]],
        *,
        system: str = "",
        max_steps: int = 5,
        max_tokens: int = 256,
        longest: int = 200,
        sampler: Sampler | None = None,
        model: str | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        if type(max_steps) is not int or max_steps < 0:
            raise UsageError(f"Agent: max_steps {max_steps!r:.60}: an int of at least 0")
        self.tools = Toolbox(tools)
        self._system, self._max_steps, self._max_tokens, self._longest = system, max_steps, max_tokens, longest
        self._sampler, self._model, self._on_step = sampler, model, on_step
        self._turns: dict[bool, grammar.Grammar] = {}

    async def run(self, task: str) -> Result:
        """Work on a task."""
        rules = f"{self._system}\n{_RULES}{json.dumps([one['function'] for one in self.tools.describe()])}".strip()
        messages = [{"role": "system", "content": rules}, {"role": "user", "content": task}]
        steps: list[Step] = []
        while True:
            may_call = len(steps) < self._max_steps and bool(self.tools.tools)
            turn = await self._turn(messages, may_call)
            if turn is None:
                return Result(None, tuple(steps))
            text, said = turn
            if "answer" in said:
                return Result(said["answer"], tuple(steps))
            call = Call(said["name"], said["arguments"])
            try:
                result = str(await self.tools.run(call))
            except InferletError:
                raise
            except Exception as error:  # the author's tool: the model is told, and may try another way
                result = f"error: {error}"
            steps.append(Step(said["thought"], call, result))
            if self._on_step is not None:
                self._on_step(steps[-1])
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Result: {result}"}]

    async def _turn(self, messages: list[dict[str, Any]], may_call: bool) -> tuple[str, dict[str, Any]] | None:
        """One turn's text and what it says; None if it did not end within its tokens."""
        if may_call not in self._turns:
            self._turns[may_call] = await grammar.json_schema(self._schema(may_call), model=self._model)
        matcher = self._turns[may_call].matcher()
        made = generate(
            messages, sampler=self._sampler, max_tokens=self._max_tokens, grammar=matcher, model=self._model
        )
        text = await made.all_text()
        try:
            return text, json.loads(text)
        except ValueError:
            return None

    def _schema(self, may_call: bool) -> dict[str, Any]:
        text = {"type": "string", "maxLength": self._longest}
        kinds: list[dict[str, Any]] = [{"thought": text, "answer": text}]
        if may_call:
            for one in self.tools.tools.values():
                arguments = {**one.parameters, "properties": dict(one.parameters["properties"])}
                for name, schema in arguments["properties"].items():
                    if schema == {"type": "string"}:
                        arguments["properties"][name] = text
                kinds.append({"thought": text, "name": {"const": one.name}, "arguments": arguments})
        return {
            "anyOf": [
                {"type": "object", "properties": kind, "required": list(kind), "additionalProperties": False}
                for kind in kinds
            ]
        }

    def as_tool(self, name: str, description: str) -> Tool:
        """This agent as a tool of another one: it is given a task and gives its answer."""

        async def work(task: str) -> str:
            result = await self.run(task)
            return "no answer" if result.answer is None else result.answer

        parameters = {
            "type": "object",
            "properties": {"task": {"type": "string"}},
            "required": ["task"],
            "additionalProperties": False,
        }
        return Tool(name, description, parameters, work)
