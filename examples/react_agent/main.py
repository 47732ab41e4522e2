"""ReAct: a model that thinks, calls tools and answers; a grammar holds each turn to what the tools take."""

import ast
import operator

from inferlet import session
from inferlet.agent import Agent

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
FACTS = {"france": "Capital: Paris. Inhabitants: 68000000.", "italy": "Capital: Rome. Inhabitants: 59000000."}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression such as 3 * (4 + 5)."""

    def value(node):
        match node:
            case ast.Constant(value=int() | float()):
                return node.value
            case ast.BinOp():
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp():
                return OPERATORS[type(node.op)](value(node.operand))
        raise ValueError(f"{expression!r} is no arithmetic expression")

    return str(value(ast.parse(expression, mode="eval").body))


def lookup(country: str) -> str:
    """Facts about a country."""
    return FACTS.get(country.lower(), "nothing known")


async def main(input: dict) -> dict:
    agent = Agent(
        [calculate, lookup],
        max_steps=int(input.get("max_steps", 3)),
        max_tokens=int(input.get("max_tokens", 128)),
        longest=int(input.get("longest", 80)),
        on_step=lambda step: session.send(
            f"{step.thought} -> {step.call.name}({step.call.arguments}) = {step.result}\n"
        ),
    )
    result = await agent.run(input.get("task", "What is the capital of France?"))
    session.send(f"{result.answer}\n")
    return {
        "answer": result.answer,
        "steps": [[step.call.name, step.call.arguments, step.result] for step in result.steps],
    }
