"""One op: its rule, its JAX lowering and its independent NumPy oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pie_xla.eta.rules import Attr, Rule


@dataclass(frozen=True)
class Op:
    """A row of the table.

    `lower(*operands, **attrs)` and `oracle(*operands, **attrs)` return one array or a tuple, in result order; those of
    a random op take the pass's draw first (`rng.Draw`, `rng.OracleDraw`). `lower` may be vmapped any number of times.
    """

    rule: Rule
    family: str
    lower: Callable[..., Any]
    oracle: Callable[..., Any]


def family(name: str) -> Callable[..., Op]:
    """A constructor of the ops of one family."""

    def op(
        op_name: str,
        signature: str,
        doc: str,
        lower: Callable[..., Any],
        oracle: Callable[..., Any],
        attrs: tuple[Attr, ...] = (),
        where: tuple[str, ...] = (),
        cost: str = "",
        random: bool = False,
    ) -> Op:
        return Op(Rule(op_name, signature, doc, attrs, where, cost, random), name, lower, oracle)

    return op
