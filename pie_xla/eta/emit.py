"""Writes what other rooms and languages take from the op table: `python -m pie_xla.eta.emit`.

The SDK's `_rules.py`, `_table.py` and `_ops/`; `docs/ops.md`; `tests/eta/golden/table.json`. A test asserts that
all are current.
"""

from __future__ import annotations

import ast
import builtins
import json
import keyword
from pathlib import Path
from textwrap import wrap

from pie_xla.eta import rules
from pie_xla.eta.op import Op
from pie_xla.eta.rules import Attr, Pattern, Rule
from pie_xla.eta.table import KINDS, TABLE

ROOT = Path(__file__).resolve().parents[2]
SDK = "inferlets/sdk/python/inferlet/eta"
KEYED = "keyed_"  # before the name of the draw whose function takes a key
_MADE = "Written by `python -m pie_xla.eta.emit` from pie_xla/eta; do not edit."


def python_name(name: str) -> str:
    """The op's function in Python: `abs_`, `and_` where the name is taken by the language."""
    return f"{name}_" if keyword.iskeyword(name) or name in dir(builtins) else name


def _attr(attr: Attr) -> str:
    return f"Attr({attr.name!r}, {attr.kind!r}, {attr.doc!r}, {attr.low}, {attr.high}, {attr.default})"


def _strings(texts: tuple[str, ...]) -> str:
    return "(" + "".join(f"{text!r}, " for text in texts) + ")"


def table_text() -> str:
    """`_table.py` of the Python SDK."""
    lines = [f'"""The op table. {_MADE}"""', "", "from __future__ import annotations", ""]
    lines += ["from inferlet.eta._rules import Attr, Rule", ""]
    lines += ["TABLE: dict[str, Rule] = {", "    rule.name: rule", "    for rule in ("]
    for op in TABLE.values():
        rule = op.rule
        attrs = "(" + "".join(f"{_attr(attr)}, " for attr in rule.attrs.values()) + ")"
        lines.append(
            f"        Rule({rule.name!r}, {rule.signature!r}, {rule.doc!r}, {attrs}, {_strings(rule.where)}, "
            f"{rule.cost!r}, {rule.random}),"
        )
    return "\n".join([*lines, "    )", "}", ""])


def rules_text() -> str:
    """`_rules.py` of the Python SDK: the interpreter itself."""
    source = Path(rules.__file__).read_text(encoding="utf-8")
    return source.replace('"""\n\nfrom __future__', f'\n{_MADE}\n"""\n\nfrom __future__', 1)


def _parameters(rule: Rule) -> str:
    parts = [f"{'*' * pattern.many}{pattern.name}: Value" for pattern in rule.operands]
    hints = {"int": "int", "axis": "int", "axes": "tuple[int, ...]", "dtype": "str", "shape": "int | tuple[int, ...]"}
    for attr in rule.attrs.values():
        if attr.name == "stream":
            parts.append("stream: int | None = None")
        else:
            parts.append(f"{attr.name}: {hints[attr.kind]}" + ("" if attr.default is None else f" = {attr.default}"))
    if KEYED + rule.name in TABLE:
        parts.append("key: Value = None")
    return ", ".join(parts)


def _typed(patterns: list[Pattern]) -> str:
    return ", ".join(
        f"{'*' * pattern.many}{pattern.name}: {pattern.text}" if pattern.name else pattern.text for pattern in patterns
    )


def _functions(ops: tuple[Op, ...]) -> dict[str, Rule]:
    """Those of one module that have a function of their own."""
    return {op.rule.name: op.rule for op in ops if not op.rule.name.startswith(KEYED)}


def _function(rule: Rule) -> list[str]:
    name, keyed = rule.name, TABLE.get(KEYED + rule.name)
    many = len(rule.results) > 1
    result = f"tuple[{', '.join(['Tensor'] * len(rule.results))}]" if many else "Tensor"
    operands = "".join(f"{pattern.name}, " for pattern in rule.operands)
    operands = f"parts({rule.operands[0].name})" if rule.many else f"({operands})"
    lines = ["", f"def {python_name(name)}({_parameters(rule)}) -> {result}:"]
    lines += [f'    """{wrap(rule.doc, 112)[0]}', *(f"    {part}" for part in wrap(rule.doc, 112)[1:]), ""]
    lines += [f"    {_typed(rule.operands)} -> {_typed(rule.results)}".replace("  ->", " ->")]
    lines += [f"    {attr.name}: {attr.doc}." for attr in rule.attrs.values()]
    if keyed is not None:
        lines += ["    key: u32[2], from `random_key` and its like; without it the draw follows the pass."]
    lines += ['    """']
    if keyed is not None:
        given = "".join(f"{pattern.name}, " for pattern in keyed.rule.operands)
        attrs = ", ".join(f"{attr!r}: {attr}" for attr in keyed.rule.attrs)
        lines += ["    if key is not None:"]
        lines += [f"        return recorder({name!r}).apply({keyed.rule.name!r}, ({given}), {{{attrs}}})"]
    attrs = ", ".join(f"{attr!r}: {attr}" for attr in rule.attrs)
    return [*lines, f"    return recorder({name!r}).apply({name!r}, {operands}, {{{attrs}}})", ""]


def ops_text(kind: str) -> str:
    """One module of the Python SDK's `_ops`: a function per op of a kind."""
    rules = _functions(KINDS[kind])
    lines = [f'"""{KINDS[kind][0].family.capitalize()}: one function per op. {_MADE}"""', ""]
    lines += ["from __future__ import annotations", "", "from typing import Any", ""]
    if any(rule.many for rule in rules.values()):
        lines += ["from inferlet.eta._parts import parts"]
    lines += ["from inferlet.eta._recorder import recorder", "from inferlet.eta._tensor import Tensor", ""]
    lines += ["Value = Any  # a tensor, a number, or a nested list of numbers", "", "__all__ = ["]
    lines += [*(f'    "{python_name(name)}",' for name in sorted(rules)), "]", ""]
    for rule in rules.values():
        lines += _function(rule)
    return "\n".join(lines)


def package_text() -> str:
    """`_ops/__init__.py` of the Python SDK."""
    lines = [f'"""One function per op of the table, by kind. {_MADE}"""', "", "from __future__ import annotations", ""]
    kinds = sorted(KINDS)
    lines += ["from inferlet.eta._ops import " + ", ".join(kinds)]
    lines += [f"from inferlet.eta._ops.{kind} import *  # noqa: F403" for kind in kinds]
    lines += ["", "__all__ = ["]
    lines += [*(f"    *{kind}.__all__," for kind in kinds), "]", ""]
    return "\n".join(lines)


def _arguments(args: ast.arguments) -> str:
    names = [arg.arg for arg in args.args] + ([f"*{args.vararg.arg}"] if args.vararg else [])
    keywords = [arg.arg for arg in args.kwonlyargs]
    return ", ".join([*names, *(["*"] if keywords and not args.vararg else []), *keywords])


def docs_text() -> str:
    """`docs/ops.md`: the op reference."""
    lines = ["# eta: op reference", "", f"_{_MADE}_", ""]
    about = (
        f"{len(TABLE)} ops over `f32`, `i32`, `u32` and `bool`; rank 0 to {rules.MAX_RANK}; shapes are fixed when "
        "recorded; nothing is promoted. A class `num` (f32, i32, u32), `int` (i32, u32) or `any` is one dtype per op. "
        "`*s` is any number of dimensions; `*s~` may be left out, so that a scalar meets any shape; `*xs` stands for one or more operands, "
        "`+n` for the sum of an extent over them; `fits(v, s)`: v broadcasts to s as in NumPy. A Python number "
        "takes the dtype of the tensor beside it and is sent with each submit: changing it never recompiles. Cost is "
        f"in element operations (`elements`: of the largest operand or result), at least {rules.OP_COST} per op; a "
        f"pass may cost {rules.MAX_COST}."
    )
    lines += [*wrap(about, 118), ""]
    for family in dict.fromkeys(op.family for op in TABLE.values()):
        lines += [f"## {family.capitalize()}", "", "| op | signature | meaning | cost |", "|---|---|---|---|"]
        for name, op in TABLE.items():
            if op.family != family:
                continue
            rule = op.rule
            attrs = "".join(f" `{attr.name}`: {attr.doc}." for attr in rule.attrs.values())
            where = "".join(f" Needs `{text}`." for text in rule.where)
            signature = f"{_typed(rule.operands)} -> {_typed(rule.results)}".strip()
            cost = rule.cost or "elements"
            shown = f"{name.removeprefix(KEYED)}(..., key=key)" if name.startswith(KEYED) else python_name(name)
            lines.append(f"| `{shown}` | `{signature}` | {rule.doc}{attrs}{where} | `{cost}` |")
        lines.append("")
    lines += ["## Functions made of ops", "", "| function | meaning |", "|---|---|"]
    for node in ast.parse((ROOT / SDK / "_compose.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            doc = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            lines.append(f"| `{node.name}({_arguments(node.args)})` | {doc} |")
    return "\n".join([*lines, ""])


def json_text() -> str:
    """The table as JSON, for SDKs in other languages."""
    rows = [
        {
            "name": rule.name,
            "family": op.family,
            "signature": rule.signature,
            "doc": rule.doc,
            "attrs": [vars(attr) for attr in rule.attrs.values()],
            "where": list(rule.where),
            "cost": rule.cost or "elements",
            "random": rule.random,
        }
        for op in TABLE.values()
        for rule in (op.rule,)
    ]
    limits = {"rank": rules.MAX_RANK, "elements": rules.MAX_ELEMENTS, "ops": rules.MAX_OPS, "cost": rules.MAX_COST}
    table = {"version": rules.VERSION, "limits": limits, "op_cost": rules.OP_COST, "ops": rows}
    return json.dumps(table, indent=1) + "\n"


def files() -> dict[str, str]:
    """Path from the repository's root -> text."""
    return {
        f"{SDK}/_rules.py": rules_text(),
        f"{SDK}/_table.py": table_text(),
        f"{SDK}/_ops/__init__.py": package_text(),
        **{f"{SDK}/_ops/{kind}.py": ops_text(kind) for kind in KINDS},
        "docs/ops.md": docs_text(),
        "tests/eta/golden/table.json": json_text(),
    }


def main() -> None:
    for name, text in files().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
