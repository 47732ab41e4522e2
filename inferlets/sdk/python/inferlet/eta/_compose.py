"""Functions made of ops: filters, draws, information, loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inferlet.eta._errors import EtaError
from inferlet.eta._recorder import recorder


@dataclass(frozen=True)
class Filter:
    """What `pivot_threshold` keeps."""

    op: str
    operand: Any


def rank_le(k: Any) -> Filter:
    """Top-k: an element is kept when fewer than k (a number, or an int tensor with one value per row) are greater."""
    return Filter("pivot_rank_le", k)


def cummass_le(p: Any) -> Filter:
    """Top-p on probabilities: an element is kept when the greater ones sum to less than p; the greatest always is."""
    return Filter("pivot_cummass_le", p)


def prob_ge(t: Any) -> Filter:
    """Threshold: an element is kept when it is at least t."""
    return Filter("pivot_prob_ge", t)


def pivot_threshold(x: Any, keep: Filter) -> Any:
    """bool mask of x's shape: what `rank_le(k)`, `cummass_le(p)` or `prob_ge(t)` keeps of each row, without a sort."""
    if not isinstance(keep, Filter):
        raise EtaError("pivot_threshold takes rank_le(k), cummass_le(p) or prob_ge(t) as its second argument")
    return recorder("pivot_threshold").apply(keep.op, (x, keep.operand), {})


def mask_apply(x: Any, mask: Any) -> Any:
    """x where the mask holds, else -inf. The mask is bool (x's shape or its last extent) or u32 words of 32 bits."""
    rec = recorder("mask_apply")
    packed = rec.type_of(mask)[0] == "u32"
    return rec.apply("mask_apply_packed" if packed else "mask_apply", (x, mask), {})


def masked_argmax(x: Any, mask: Any) -> Any:
    """i32: index of the largest element whose mask holds."""
    return recorder("masked_argmax").apply("reduce_argmax", (mask_apply(x, mask),), {})


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y; the same as `select`."""
    return recorder("where").apply("select", (condition, x, y), {})


def gumbel_max(logits: Any) -> Any:
    """i32: one draw per row from softmax(logits), by the Gumbel trick. `categorical` follows the same law, cheaper."""
    rec = recorder("gumbel_max")
    noise = rec.apply("gumbel", (), {"shape": rec.type_of(logits)[1]})
    return rec.apply("reduce_argmax", (rec.apply("add", (logits, noise), {}),), {})


def nucleus_sample(logits: Any, top_p: Any) -> Any:
    """i32: one draw per row from the smallest set of tokens whose probabilities sum to top_p."""
    rec = recorder("nucleus_sample")
    keep = rec.apply("pivot_cummass_le", (rec.apply("softmax", (logits,), {}), top_p), {})
    return rec.apply("categorical", (rec.apply("mask_apply", (logits, keep), {}),), {})


def entropy(probabilities: Any) -> Any:
    """-sum(p log p) of each row in nats; a probability of 0 adds nothing."""
    rec = recorder("entropy")
    logs = rec.apply("log", (rec.apply("max_elem", (probabilities, 1e-38), {}),), {})
    return entropy_from_logprobs(probabilities, logs)


def entropy_from_logprobs(probabilities: Any, logprobs: Any) -> Any:
    """-sum(p log p) of each row in nats, from p and log p."""
    rec = recorder("entropy_from_logprobs")
    terms = rec.apply("mul", (probabilities, rec.apply("max_elem", (logprobs, -1e30), {})), {})
    return rec.apply("neg", (rec.apply("reduce_sum", (terms,), {}),), {})


def l2norm(x: Any) -> Any:
    """Each row divided by its Euclidean length; a row of zeros stays zero."""
    rec = recorder("l2norm")
    squares = rec.apply("reduce_sum", (rec.apply("mul", (x, x), {}),), {})
    scale = rec.apply("rsqrt", (rec.apply("max_elem", (squares, 1e-30), {}),), {})
    return rec.apply("mul", (x, rec.apply("broadcast", (scale,), {"shape": rec.type_of(x)[1]})), {})


def random_key(*seeds: Any) -> Any:
    """u32[2]: a key for `uniform(..., key=key)` and its like, the same for the same numbers (or int tensors). Without a
    number a key of this pass. `fold_in(key, n)` and `split_key(key, n)` derive others from it.
    """
    rec = recorder("random_key")
    if not seeds:
        return rec.apply("pass_key", (), {})
    key: Any = None
    for seed in seeds:
        if isinstance(seed, int) and not isinstance(seed, bool):
            words = [seed & 0xFFFFFFFF, *([seed >> 32 & 0xFFFFFFFF] if not -(1 << 31) <= seed < 1 << 32 else [])]
        else:
            words = [seed]
        for word in words:
            x = rec.literal(word, "u32") if isinstance(word, int) else word
            key = rec.apply("seed_key", (x,), {}) if key is None else rec.apply("fold_in", (key, x), {})
    return key


def scalar_gather(src: Any, idx: Any) -> Any:
    """src[idx] of a vector, or src[i, idx[i]] of a matrix with one index per row; 0 outside."""
    rec = recorder("scalar_gather")
    rank = len(rec.type_of(src)[1])
    return rec.apply("gather_row" if rank == 2 else "gather", (src, idx), {})


def row_membership(rows: Any, keys: Any) -> Any:
    """bool [R, K]: whether row r of rows [R, D] holds keys[k] of keys [K]."""
    rec = recorder("row_membership")
    shape = (*rec.type_of(rows)[1], *rec.type_of(keys)[1])
    if len(shape) != 3:
        raise EtaError(f"row_membership takes rows [R, D] and keys [K], got {list(shape)}")
    r, d, k = shape
    have = rec.apply("broadcast", (rec.apply("reshape", (rows,), {"shape": (r, 1, d)}),), {"shape": (r, k, d)})
    want = rec.apply("broadcast", (rec.apply("reshape", (keys,), {"shape": (1, k)}),), {"shape": (r, k, d)})
    return rec.apply("reduce_any", (rec.apply("eq", (have, want), {}),), {})


def stack(parts: list[Any] | tuple[Any, ...], axis: int = 0) -> Any:
    """The parts, of one type, along a new axis of the result; a number takes the dtype of the first tensor."""
    rec = recorder("stack")
    if not isinstance(parts, list | tuple) or not parts:
        raise EtaError("stack takes a list of at least one tensor")
    dtype = next((rec.type_of(x)[0] for x in parts if not isinstance(x, int | float | list | tuple)), None)
    tensors = [rec.literal(x, dtype) if isinstance(x, int | float | list | tuple) else x for x in parts]
    shape = rec.type_of(tensors[0])[1]
    if not isinstance(axis, int) or not -len(shape) - 1 <= axis <= len(shape):
        raise EtaError(f"stack: axis {axis!r} is outside the result, which has {len(shape) + 1} dimensions")
    at = axis % (len(shape) + 1)
    for x in tensors:
        if rec.type_of(x)[1] != shape:
            raise EtaError(f"stack: the parts must have one shape, but are {list(shape)} and {list(rec.type_of(x)[1])}")
    made = [rec.apply("reshape", (x,), {"shape": (*shape[:at], 1, *shape[at:])}) for x in tensors]
    return rec.apply("concat", made, {"axis": at}) if len(made) > 1 else made[0]


def argsort(x: Any, axis: int = -1) -> Any:
    """u32: where each element of the ascending order along an axis is; lower index first on ties, NaN last."""
    return recorder("argsort").apply("sort", (x,), {"axis": axis})[1]


def fori(n: int, body: Callable[..., Any], init: Any) -> Any:
    """A loop of n iterations, n fixed when recorded: `carry = body(i, carry)` for i = 0 ... n - 1.

    Args:
        body: gets i (i32) and the carried tensor, or a tuple of them if init is one, and returns the same types.
        init: the first carried value.
    Raises:
        EtaError: when n times the body's cost is above the limit of a pass.
    """
    return recorder("fori").fori(n, body, init)


def while_loop(test: Callable[..., Any], body: Callable[..., Any], init: Any, *, bound: int) -> Any:
    """A loop that ends early: `carry = body(i, carry)` while `test(i, carry)` holds, `bound` turns at most.

    Passes of one batch wait for the slowest of them; one that has finished keeps its values.

    Args:
        test: gets i (i32, 0 at first) and the carried tensor, or a tuple of them if init is one, and returns a bool scalar.
        body: gets the same and returns the types it carries. It does not see what the test has made.
        init: the first carried value.
        bound: fixed when recorded; what the loop costs is `bound` times test and body, however early it ends.
    Raises:
        EtaError: when that cost is above the limit of a pass.
    """
    return recorder("while_loop").while_loop(bound, test, body, init)


def param(value: Any, dtype: str | None = None) -> Any:
    """A number or nested list that is sent with each submit instead of being compiled in; so is every plain number."""
    return recorder("param").literal(value, dtype)
