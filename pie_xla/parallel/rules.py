"""From logical axes to mesh axes: the one place that says how a model is split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pie_xla.errors import PieError
from pie_xla.parallel.mesh import MeshAxis


class Leaf(Protocol):
    """An array to be, with a logical axis name (or None) per dimension; `poem.spec.Leaf` is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def axes(self) -> tuple[str | None, ...]: ...


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axis, or None: every device holds that axis whole.

    The defaults are the tensor parallelism of Megatron-LM (arXiv 1909.08053): the first matrix of a block is split by
    its output (heads, ffn) and the second by its input, so a block needs one sum over devices at its end and its inner
    values never travel. The model width (`embed`) is therefore whole, and so is head_dim: a head's scores need all of
    it. `kv_heads` follows `heads`, so that a query head finds its key head on its own device; the pool is split like
    them, and pages and slots are not: any row may use any page. `channels` are the joined query, key and value channels
    of a linear attention's convolution, where each stands alone. For another strategy,
    `dataclasses.replace(rules, ffn=None)`.
    """

    vocab: MeshAxis | None = MeshAxis.TENSOR
    embed: MeshAxis | None = None
    heads: MeshAxis | None = MeshAxis.TENSOR
    kv_heads: MeshAxis | None = MeshAxis.TENSOR
    head_dim: MeshAxis | None = None
    ffn: MeshAxis | None = MeshAxis.TENSOR
    channels: MeshAxis | None = MeshAxis.TENSOR
    layers: MeshAxis | None = None
    pages: MeshAxis | None = None
    slots: MeshAxis | None = None

    def mesh_axis(self, logical: str) -> MeshAxis | None:
        """The mesh axis of a logical axis; PieError when the rules do not know its name."""
        known = {field.name for field in dataclasses.fields(self)}
        if logical not in known:
            raise PieError(
                f"no sharding rule for the logical axis {logical!r}",
                f"known axes: {', '.join(sorted(known))}; add it to ShardingRules with a reason",
            )
        axis: MeshAxis | None = getattr(self, logical)
        return axis


@dataclass(frozen=True)
class Replicated:
    """An axis that its rule would split, but whose size does not divide: every device holds it whole."""

    leaf: str
    axis: str
    size: int
    mesh_axis: MeshAxis
    devices: int

    def __str__(self) -> str:
        where = f"{self.devices} devices ({self.mesh_axis})"
        return f"{self.leaf}: {self.axis} of {self.size} does not divide over {where}, replicated"


def sharding_for(leaf: Leaf, mesh: Mesh, rules: ShardingRules) -> NamedSharding:
    """Where `leaf` lives on `mesh`. An axis that does not divide is replicated, the rest split.

    Raises:
        PieError: an unknown logical axis, or two axes of this array on one mesh axis.
    """
    return NamedSharding(mesh, _resolve("array", leaf, mesh, rules)[0])


def placement(mesh: Mesh, rules: ShardingRules) -> Callable[[Leaf], NamedSharding]:
    """`sharding_for` with mesh and rules bound: what Poem's lowering is handed."""
    return lambda leaf: sharding_for(leaf, mesh, rules)


def replicated(leaves: Mapping[str, Leaf], mesh: Mesh, rules: ShardingRules) -> tuple[Replicated, ...]:
    """Every axis of `leaves` (by name) that a rule would split and the mesh cannot: the report to print at load."""
    return tuple(found for name, leaf in leaves.items() for found in _resolve(name, leaf, mesh, rules)[1])


def _resolve(name: str, leaf: Leaf, mesh: Mesh, rules: ShardingRules) -> tuple[PartitionSpec, tuple[Replicated, ...]]:
    taken: dict[MeshAxis, str] = {}
    spec: list[str | None] = []
    whole: list[Replicated] = []
    for size, logical in zip(leaf.shape, leaf.axes, strict=True):
        axis = None if logical is None else rules.mesh_axis(logical)
        if logical is None or axis is None:
            spec.append(None)
            continue
        if axis in taken:
            raise PieError(
                f"{name} of shape {leaf.shape} has two logical axes on the mesh axis {axis.value!r}: "
                f"{taken[axis]!r} and {logical!r}",
                f"map one of them to None, as in dataclasses.replace(rules, {logical}=None)",
            )
        taken[axis] = logical
        devices = mesh.shape[axis.value]
        if size % devices:
            whole.append(Replicated(name, logical, size, axis, devices))
            spec.append(None)
        else:
            spec.append(axis.value)
    return PartitionSpec(*spec), tuple(whole)  # type: ignore[no-untyped-call]
