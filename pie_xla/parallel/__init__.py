"""Meshes and sharding rules: which device holds which part of which array."""

from pie_xla.parallel.mesh import MeshAxis, make_mesh
from pie_xla.parallel.rules import Replicated, ShardingRules, placement, replicated, sharding_for

__all__ = ["MeshAxis", "Replicated", "ShardingRules", "make_mesh", "placement", "replicated", "sharding_for"]
