"""Sharding rules on four virtual CPU devices."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec as P

from pie_xla.errors import PieError, UsageError
from pie_xla.parallel import MeshAxis, Replicated, ShardingRules, make_mesh, placement, replicated, sharding_for
from poem.spec import Leaf

RULES = ShardingRules()


def leaf(*dims: tuple[int, str | None]) -> Leaf:
    return Leaf(tuple(n for n, _ in dims), "float32", tuple(a for _, a in dims))


def test_mesh_shapes() -> None:
    devices = jax.devices()[:4]
    assert dict(make_mesh(devices).shape) == {"data": 1, "tensor": 4}
    mesh = make_mesh(devices, tensor=2)
    assert dict(mesh.shape) == {"data": 2, "tensor": 2}
    assert [d.id for d in mesh.devices[1]] == [devices[2].id, devices[3].id]


@pytest.mark.parametrize("tensor", [0, 3, 8])
def test_mesh_refuses_what_does_not_divide(tensor: int) -> None:
    with pytest.raises(UsageError, match=f"4 devices cannot be split into tensor groups of {tensor}") as failure:
        make_mesh(jax.devices()[:4], tensor=tensor)
    assert "1, 2, 4" in str(failure.value)


def test_mesh_refuses_no_devices() -> None:
    with pytest.raises(UsageError, match="at least one device"):
        make_mesh([])


def test_axes_that_divide_are_split() -> None:
    mesh = make_mesh(jax.devices()[:4])
    q = leaf((576, "embed"), (8, "heads"), (64, "head_dim"))
    assert sharding_for(q, mesh, RULES).spec == P(None, "tensor", None)
    assert sharding_for(leaf((49152, "vocab"), (576, "embed")), mesh, RULES).spec == P("tensor", None)
    assert placement(mesh, RULES)(leaf((10, "pages"), (4, "kv_heads"), (16, None))).spec == P(None, "tensor", None)


def test_an_axis_that_does_not_divide_is_replicated_and_reported() -> None:
    mesh = make_mesh(jax.devices()[:4])
    up = leaf((576, "embed"), (1536, "ffn"))
    leaves = {"q": leaf((576, "embed"), (9, "heads")), "up": up, "k": leaf((3, "kv_heads"))}
    assert sharding_for(leaves["q"], mesh, RULES).spec == P(None, None)
    assert replicated(leaves, mesh, RULES) == (
        Replicated("q", "heads", 9, MeshAxis.TENSOR, 4),
        Replicated("k", "kv_heads", 3, MeshAxis.TENSOR, 4),
    )
    assert str(replicated(leaves, mesh, RULES)[0]) == (
        "q: heads of 9 does not divide over 4 devices (tensor), replicated"
    )
    assert replicated(leaves, make_mesh(jax.devices()[:3]), RULES) == ()


def test_two_logical_axes_on_one_mesh_axis_are_refused_by_name() -> None:
    mesh = make_mesh(jax.devices()[:4])
    both = leaf((8, "heads"), (1536, "ffn"))
    with pytest.raises(PieError, match="'heads' and 'ffn'"):
        sharding_for(both, mesh, RULES)
    # Also where one of them would not divide: the rules are wrong, not the sizes.
    with pytest.raises(PieError, match="'heads' and 'ffn'"):
        sharding_for(leaf((9, "heads"), (1536, "ffn")), mesh, RULES)
    assert sharding_for(both, mesh, dataclasses.replace(RULES, ffn=None)).spec == P("tensor", None)


def test_an_unknown_logical_axis_is_refused_by_name() -> None:
    with pytest.raises(PieError, match="'experts'"):
        sharding_for(leaf((8, "experts")), make_mesh(jax.devices()[:4]), RULES)
