"""THE op table: every op of the language, by name."""

from __future__ import annotations

from pie_xla.eta.op import Op
from pie_xla.eta.ops import elementwise, index, keyed, order, random, reduce, shape

KINDS: dict[str, tuple[Op, ...]] = {
    "elementwise": elementwise.OPS,
    "reduce": reduce.OPS,
    "shape": shape.OPS,
    "index": index.OPS,
    "order": order.OPS,
    "random": random.OPS,
    "keyed": keyed.OPS,
}
TABLE: dict[str, Op] = {op.rule.name: op for ops in KINDS.values() for op in ops}
