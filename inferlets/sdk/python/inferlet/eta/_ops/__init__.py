"""One function per op of the table, by kind. Written by `python -m pie_xla.eta.emit` from pie_xla/eta; do not edit."""

from __future__ import annotations

from inferlet.eta._ops import elementwise, index, keyed, order, random, reduce, shape
from inferlet.eta._ops.elementwise import *  # noqa: F403
from inferlet.eta._ops.index import *  # noqa: F403
from inferlet.eta._ops.keyed import *  # noqa: F403
from inferlet.eta._ops.order import *  # noqa: F403
from inferlet.eta._ops.random import *  # noqa: F403
from inferlet.eta._ops.reduce import *  # noqa: F403
from inferlet.eta._ops.shape import *  # noqa: F403

__all__ = [
    *elementwise.__all__,
    *index.__all__,
    *keyed.__all__,
    *order.__all__,
    *random.__all__,
    *reduce.__all__,
    *shape.__all__,
]
