"""Named prefixes: state that is computed once and shared by every program of the same tenant."""

from __future__ import annotations

from inferlet._generate import Prompt, tokens_of
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet


def load(key: str, prompt: Prompt, *, model: str | None = None) -> WorkingSet:
    """A set that holds the prompt: a fork of the one published as `key`, or a new one, which is published then.

    The name stands for the prompt: whoever changes the prompt must change the name. A published set of another length than the prompt
    is replaced.
    """
    tokens = tokens_of(prompt, model)
    found = WorkingSet.open(key, model)
    if found is not None and len(found) == len(tokens):
        return found
    made = WorkingSet(model)
    Pipeline().submit(ForwardPass(model).embed(tokens).state([made], StateGeometry.folding()))
    made.publish(key)
    return made
