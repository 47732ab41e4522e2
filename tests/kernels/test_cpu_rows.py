"""Rope and norms in C++ against plain XLA."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pie_xla.kernels import build
from pie_xla.kernels.cpu import CpuOps, load
from pie_xla.kernels.xla import XlaOps
from pie_xla.progress import SILENT
from poem.spec import NormScale


@pytest.fixture(scope="module", autouse=True)
def kernels(model_cache: Path) -> None:
    load(build.library(model_cache, SILENT))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize(
    ("shape", "half"), [((1, 1, 9, 64), 32), ((3, 20, 2, 24), 6), ((2, 5, 1, 7), 3), ((4, 2, 3, 8), 0)]
)
def test_rope(shape: tuple[int, ...], half: int) -> None:
    x = normal(1, *shape)
    angle = 3 * normal(2, *shape[:2], half)
    table = jnp.cos(angle), jnp.sin(angle)
    found = jax.jit(CpuOps().rotate)(x, table)
    np.testing.assert_allclose(found, XlaOps().rotate(x, table), rtol=1e-6, atol=1e-6)
    assert "ffi" in str(jax.make_jaxpr(CpuOps().rotate)(x, table))
    assert (found[..., 2 * half :] == x[..., 2 * half :]).all()


@pytest.mark.parametrize("shape", [(1, 1, 576), (3, 7, 33), (2, 4, 3, 31), (5, 640), (2, 1)])
@pytest.mark.parametrize("scale", list(NormScale))
def test_norm(shape: tuple[int, ...], scale: NormScale) -> None:
    x, weight = 30 * normal(3, *shape), normal(4, shape[-1])
    found = jax.jit(CpuOps().rms_norm, static_argnums=(2, 3))(x, weight, 1e-5, scale)
    np.testing.assert_allclose(found, XlaOps().rms_norm(x, weight, 1e-5, scale), rtol=3e-6, atol=3e-6)
    alone = jax.jit(CpuOps().rms_norm, static_argnums=(2, 3))(x[:1], weight, 1e-5, scale)
    assert (alone == found[:1]).all()  # a row does not depend on its company


def test_other_types_are_left_to_xla() -> None:
    x, weight = normal(5, 2, 3, 4, 8).astype(jnp.bfloat16), normal(6, 8).astype(jnp.bfloat16)
    table = (normal(7, 2, 3, 4), normal(8, 2, 3, 4))
    for mine, reference in (
        (CpuOps().rotate(x, table), XlaOps().rotate(x, table)),
        (
            CpuOps().rms_norm(x, weight, 1e-6, NormScale.WEIGHT),
            XlaOps().rms_norm(x, weight, 1e-6, NormScale.WEIGHT),
        ),
    ):
        assert mine.dtype == jnp.bfloat16 and (mine == reference).all()


def test_nothing_is_hidden() -> None:
    x = normal(9, 2, 64).at[1, 3].set(jnp.nan)
    found = CpuOps().rms_norm(x, jnp.ones(64), 1e-6, NormScale.WEIGHT)
    assert jnp.isfinite(found[0]).all() and jnp.isnan(found[1]).all()
