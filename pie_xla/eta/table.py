"""THE op table: every op of the language, by name."""

from __future__ import annotations

from pie_xla.eta.op import Op
from pie_xla.eta.ops import elementwise, index, order, random, reduce, shape

TABLE: dict[str, Op] = {
    op.rule.name: op for module in (elementwise, reduce, shape, index, order, random) for op in module.OPS
}
