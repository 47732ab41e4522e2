"""Checkpoint tensors by name -> stored parameters, by a family's rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from poem.spec import Leaf, PoemError, Transform, WeightRule


@dataclass(frozen=True)
class Assignment:
    """One stored parameter: `transform.apply(tensor named source, leaf.shape, source)` is its value."""

    target: str
    source: str
    transform: Transform
    leaf: Leaf


@dataclass(frozen=True)
class Assignments:
    """A whole checkpoint's assignment.

    Args:
        used: one per stored parameter, in the model's order.
        unused: checkpoint tensors that are known and not used, with the reason.
    """

    used: tuple[Assignment, ...]
    unused: Mapping[str, str]


def assign(rules: Sequence[WeightRule], stored: Mapping[str, Leaf], names: Iterable[str]) -> Assignments:
    """Which checkpoint tensor becomes which parameter.

    A tensor no rule knows, a tensor for a parameter the config does not have, and a parameter without a tensor are
    refused by name.
    """
    patterns = [(_pattern(rule.source), rule) for rule in rules]
    sources: dict[str, tuple[str, Transform]] = {}
    unused: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        for pattern, rule in patterns:
            if (match := pattern.fullmatch(name)) is None:
                continue
            if rule.target is None:
                unused[name] = rule.reason or "not used"
                break
            target = rule.target.replace("{i}", match.groupdict().get("i") or "")
            if target in stored:
                sources[target] = (name, rule.transform)
                break
        else:
            unknown.append(name)
    if unknown:
        raise PoemError(f"the checkpoint has tensors this model does not know: {_some(unknown)}", "wrong config.json?")
    missing = [target for target in stored if target not in sources]
    if missing:
        raise PoemError(
            f"the checkpoint lacks the tensors of {_some(missing)}", "an incomplete download, or a wrong config.json"
        )
    return Assignments(tuple(Assignment(target, *sources[target], leaf) for target, leaf in stored.items()), unused)


def _pattern(source: str) -> re.Pattern[str]:
    text = re.escape(source).replace(re.escape("{i}"), r"(?P<i>\d+)").replace(re.escape("*"), ".*")
    return re.compile(text)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
