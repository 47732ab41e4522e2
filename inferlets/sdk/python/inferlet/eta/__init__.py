"""Passes, their state, and the language of their epilogues.

`ForwardPass`, `Pipeline`, `WorkingSet`, `StateGeometry`, `Channel` and `Output` drive the model. Everything else is
for epilogues: `intrinsics.output(row, name)` reads what the model gave, and each op is a function (`softmax`,
`top_k`, `categorical`, ...).
"""

from __future__ import annotations

from inferlet.eta import _compose, _ops
from inferlet.eta import _intrinsics as intrinsics
from inferlet.eta._channel import Channel
from inferlet.eta._compose import (
    argsort,
    cummass_le,
    entropy,
    entropy_from_logprobs,
    fori,
    gumbel_max,
    l2norm,
    masked_argmax,
    nucleus_sample,
    param,
    pivot_threshold,
    prob_ge,
    random_key,
    rank_le,
    row_membership,
    scalar_gather,
    stack,
    where,
    while_loop,
)
from inferlet.eta._errors import EtaError
from inferlet.eta._ops import *  # noqa: F403
from inferlet.eta._output import Output
from inferlet.eta._pass import ForwardPass
from inferlet.eta._pipeline import Pipeline
from inferlet.eta._state import StateGeometry, WorkingSet

mask_apply = _compose.mask_apply  # takes packed masks too; `_ops` has the plain one

EtaError.__module__ = __name__

# Element types, as the ops and `Channel` spell them.
f32, i32, u32, boolean = "f32", "i32", "u32", "bool"

__all__ = [
    "Channel",
    "EtaError",
    "ForwardPass",
    "Output",
    "Pipeline",
    "StateGeometry",
    "WorkingSet",
    "argsort",
    "boolean",
    "cummass_le",
    "entropy",
    "entropy_from_logprobs",
    "f32",
    "fori",
    "gumbel_max",
    "i32",
    "intrinsics",
    "l2norm",
    "mask_apply",
    "masked_argmax",
    "nucleus_sample",
    "param",
    "pivot_threshold",
    "prob_ge",
    "random_key",
    "rank_le",
    "row_membership",
    "scalar_gather",
    "stack",
    "u32",
    "where",
    "while_loop",
    *(name for name in _ops.__all__ if name != "mask_apply"),
]
