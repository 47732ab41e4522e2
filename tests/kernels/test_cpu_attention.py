"""The CPU kernels against plain XLA: any shape, page, length, view, mask, window and cap; on any number of threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_xla.errors import PieError
from pie_xla.kernels import build
from pie_xla.kernels.cpu import CpuOps, load
from pie_xla.kernels.xla import XlaOps
from pie_xla.progress import SILENT
from poem.spec import Attention, Batch, View

# (rows, tokens, query heads, kv heads, head_dim, page, pages)
SHAPES = (
    (1, 1, 9, 3, 64, 16, 12),
    (5, 1, 8, 1, 32, 16, 9),
    (3, 20, 4, 2, 24, 8, 10),
    (2, 33, 6, 2, 16, 32, 5),
    (2, 3, 4, 4, 5, 4, 20),
    (1, 4, 2, 1, 8, 128, 3),
)


@pytest.fixture(scope="module", autouse=True)
def kernels(model_cache: Path) -> None:
    assert load(build.library(model_cache, SILENT)) in ("avx512", "avx2", "base")


def case(seed: int, shape: tuple[int, ...], *, viewed: bool, masked: bool) -> tuple[list[jax.Array], Batch, int]:
    """Random arguments of `attend`; the pool holds NaN wherever no row may look."""
    B, Q, H, K, d, page, N = shape
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, Q + 1, B)
    counts[rng.integers(B)] = Q
    starts = rng.integers(0, N * page - Q + 1, B)
    first, layer_pages = 3, B * N + 1
    tables = 1 + rng.permutation(B * N).reshape(B, N)
    pool = rng.standard_normal((2, first + layer_pages + 2, K, page, d)).astype(np.float32)
    bases = (np.arange(N) * page)[None] + np.cumsum(rng.integers(0, 2, (B, N)), axis=1) * page
    cells = (bases[:, :, None] + np.arange(page)).reshape(B, N * page)
    live = rng.random((B, N * page)) < 0.9
    positions = np.full((B, Q), -1)
    for b in range(B):
        end = starts[b] + counts[b]
        live[b, starts[b] : end] = True
        positions[b, : counts[b]] = (cells[b] if viewed else np.arange(N * page))[starts[b] : end]
        for n in range(N):  # beyond its end a row's pages hold anything
            after = max(0, end - n * page)
            pool[:, first + tables[b, n], :, after:] = np.nan
    pool[:, first] = np.nan
    words = -(-page // 32)
    bits = np.zeros((B, N, words * 32), bool)
    bits[:, :, :page] = live.reshape(B, N, page)
    packed = np.ascontiguousarray(np.packbits(bits, axis=-1, bitorder="little")).view(np.int32)
    mask = None
    if masked:
        wide = np.zeros((B, Q, -(-N * page // 32) * 32), bool)
        wide[:, :, : N * page] = rng.random((B, Q, N * page)) < 0.7
        mask = jnp.asarray(np.ascontiguousarray(np.packbits(wide, axis=-1, bitorder="little")).view(np.int32))
    view = View(
        jnp.asarray(bases, jnp.int32),
        jnp.asarray(packed),
        jnp.asarray(rng.choice([1 << 30, 7, 40], B), jnp.int32),
        jnp.asarray(rng.integers(0, 5, B), jnp.int32),
        mask,
    )
    batch = Batch(
        tokens=jnp.zeros((B, Q), jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        starts=jnp.asarray(starts, jnp.int32),
        counts=jnp.asarray(counts, jnp.int32),
        pages={},
        slots_in=jnp.zeros(B, jnp.int32),
        slots_out=jnp.zeros(B, jnp.int32),
        readout=jnp.zeros(B, jnp.int32),
        view=view if viewed else None,
    )
    heads = [jnp.asarray(rng.standard_normal((B, Q, n, d)).astype(np.float32)) for n in (H, K, K)]
    return [*heads, jnp.asarray(pool[0]), jnp.asarray(pool[1]), jnp.asarray(tables, jnp.int32)], batch, first


def attend(ops: CpuOps | XlaOps, arrays: list[jax.Array], batch: Batch, first: int, how: Attention):
    query, key, value, pool_key, pool_value, tables = arrays
    step = jax.jit(lambda q, k, v, pk, pv, t: ops.attend(q, k, v, {"key": pk, "value": pv}, t, first, batch, how))
    out, pool = step(query, key, value, pool_key, pool_value, tables)
    return np.asarray(out), {name: np.asarray(array) for name, array in pool.items()}


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(SHAPES),
    st.sampled_from([None, 9, 70]),
    st.sampled_from([None, 2.5]),
    st.booleans(),
    st.booleans(),
)
def test_it_is_what_plain_xla_computes(
    seed: int, shape: tuple[int, ...], window: int | None, cap: float | None, viewed: bool, masked: bool
) -> None:
    arrays, batch, first = case(seed, shape, viewed=viewed, masked=masked and viewed)
    how = Attention(0.2, window, cap)
    want, pool = attend(XlaOps(), arrays, batch, first, how)
    got, new = attend(CpuOps(), arrays, batch, first, how)
    for b, count in enumerate(np.asarray(batch.counts)):
        # sums of at most a few hundred terms of size 1, in another order
        np.testing.assert_allclose(got[b, :count], want[b, :count], atol=3e-6)
        assert (got[b, count:] == 0).all()
    rows = first + np.asarray(arrays[5]).ravel()
    for name in ("key", "value"):
        np.testing.assert_array_equal(new[name][rows], pool[name][rows])


def test_a_row_is_bit_equal_alone_and_in_company() -> None:
    arrays, batch, first = case(5, SHAPES[1], viewed=True, masked=False)
    how = Attention(0.2)
    together, _ = attend(CpuOps(), arrays, batch, first, how)
    for b in range(5):
        one = jax.tree.map(lambda x, b=b: x[b : b + 1] if x.ndim else x, batch)
        alone, _ = attend(
            CpuOps(), [*(a[b : b + 1] for a in arrays[:3]), *arrays[3:5], arrays[5][b : b + 1]], one, first, how
        )
        np.testing.assert_array_equal(alone[0], together[b])


def test_the_pool_is_not_copied() -> None:
    arrays, batch, first = case(6, SHAPES[0], viewed=True, masked=False)
    query, key, value, pool_key, pool_value, tables = arrays

    def step(pk, pv, q, k, v, t):
        return CpuOps().attend(q, k, v, {"key": pk, "value": pv}, t, first, batch, Attention(0.2))

    before = pool_key.unsafe_buffer_pointer(), pool_value.unsafe_buffer_pointer()
    _, pool = jax.jit(step, donate_argnums=(0, 1))(pool_key, pool_value, query, key, value, tables)
    assert (pool["key"].unsafe_buffer_pointer(), pool["value"].unsafe_buffer_pointer()) == before


def test_other_floats_are_plain_xlas_work() -> None:
    arrays, batch, first = case(7, SHAPES[0], viewed=True, masked=False)
    half = [array.astype(jnp.bfloat16) if array.dtype == jnp.float32 else array for array in arrays]
    want, _ = attend(XlaOps(), half, batch, first, Attention(0.2))
    got, _ = attend(CpuOps(), half, batch, first, Attention(0.2))
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_without_a_compiler_the_reason_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(PieError, match="no C\\+\\+ compiler"):
        build.build(tmp_path / "kernels.so")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(PieError, match="the C\\+\\+ compiler failed"):
        build.build(tmp_path / "kernels.so", ("-DPIE_LANES=oops", "-Werror"))
    assert not (tmp_path / "kernels.so").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["address,undefined"])
def test_under_sanitizers(tmp_path: Path, kind: str) -> None:
    """The same comparison in a process of its own, with every access checked."""
    made = build.build(tmp_path / "checked.so", (f"-fsanitize={kind}", "-g", "-fno-omit-frame-pointer"))
    names = ["libasan.so", "libubsan.so"]
    preload = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    program = (
        "import sys; sys.path[:0] = ['.', 'tests/kernels']\n"
        "from pathlib import Path\nimport numpy as np\nimport test_cpu_attention as t\n"
        f"t.load(Path({str(made)!r}))\n"
        "for seed, shape in enumerate(t.SHAPES * 2):\n"
        "    arrays, batch, first = t.case(seed, shape, viewed=True, masked=seed % 2 == 0)\n"
        "    t.attend(t.CpuOps(), arrays, batch, first, t.Attention(0.2, 9 if seed % 3 else None, 2.0 if seed % 4 else None))\n"
        "print('all checked')\n"
    )
    env = {
        "JAX_PLATFORMS": "cpu",
        "LD_PRELOAD": ":".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=600, check=False
    )
    assert "all checked" in done.stdout and "runtime error" not in done.stderr, done.stderr[-3000:]
