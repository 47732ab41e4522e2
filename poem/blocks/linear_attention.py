"""The gated delta rule and its causal convolution, with the state as an argument.

Letters: B rows, Q tokens per row, H value heads, Dk and Dv key and value head width, C channels, W convolution width.
Rows hold `counts` real tokens each, first; the rest are padding and leave the state as it was.
Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), and its chunked form (arXiv 2406.06484).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from poem.blocks.linear import Linear
from poem.blocks.mlp import Activation
from poem.blocks.norms import RMSNorm
from poem.blocks.parameter import parameter
from poem.context import Context
from poem.spec import Leaf

CHUNK = 64  # tokens solved at once; the published kernels use the same


class ShortConv(nnx.Module):
    """The filters of `causal_conv`: `kernel` [C, W]."""

    def __init__(self, dtype: str, channels: int, width: int) -> None:
        self.kernel = parameter(dtype, channels=channels, _width=width)


class GatedDeltaNet(nnx.Module):
    """Linear attention by the gated delta rule, as in Qwen3-Next and Qwen3.5.

    A convolution over the joined q, k, v channels, the rule per value head, a norm gated by a projection of the input.

    Args:
        key_heads, value_heads: each key head serves value_heads / key_heads consecutive value heads.
        key_dim, value_dim: Dk, Dv.
        conv_width: W.
        act: of the convolution and of the gate.
    """

    def __init__(
        self,
        dtype: str,
        *,
        embed: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        act: Activation,
        eps: float,
    ) -> None:
        self.sizes = (key_heads, value_heads, key_dim, value_dim)
        channels = joined_channels(key_heads, value_heads, key_dim, value_dim)
        self.in_proj_qkv = Linear(dtype, {"embed": embed}, {"channels": channels})
        self.in_proj_z = Linear(dtype, {"embed": embed}, {"heads": value_heads, "head_dim": value_dim})
        self.in_proj_b = Linear(dtype, {"embed": embed}, {"heads": value_heads})
        self.in_proj_a = Linear(dtype, {"embed": embed}, {"heads": value_heads})
        self.conv1d = ShortConv(dtype, channels, conv_width)
        self.A_log = parameter(dtype, heads=value_heads)
        self.dt_bias = parameter(dtype, heads=value_heads)
        self.norm = RMSNorm(dtype, eps, head_dim=value_dim)
        self.out_proj = Linear(dtype, {"heads": value_heads, "head_dim": value_dim}, {"embed": embed})
        self.act = act

    def __call__(self, x: Array, context: Context) -> Array:
        """x [B, Q, D] -> [B, Q, D]; reads and writes this layer's `conv` and `delta` state."""
        with jax.named_scope("linear_attn"):
            K, H, Dk, Dv = self.sizes
            B, Q = x.shape[:2]
            counts = context.batch.counts
            held = context.read()
            # A padding token may hold anything, NaN too, and 0 * NaN would reach the state.
            x = jnp.where((context.batch.positions >= 0)[:, :, None], x, jnp.zeros((), x.dtype))
            mixed, tail = causal_conv(self.in_proj_qkv(x), held["conv"], self.conv1d.kernel[...], counts)
            q, k, v = jnp.split(self.act(mixed), (K * Dk, 2 * K * Dk), axis=-1)
            q = l2_normalize(q.reshape(B, Q, K, Dk)) * jnp.float32(Dk**-0.5)
            k = l2_normalize(k.reshape(B, Q, K, Dk))
            v = v.reshape(B, Q, H, Dv).astype(jnp.float32)
            q, k, v = (
                context.constrain(part, None, None, "heads", None)
                for part in (jnp.repeat(q, H // K, axis=2), jnp.repeat(k, H // K, axis=2), v)
            )
            beta = jax.nn.sigmoid(self.in_proj_b(x)).astype(jnp.float32)
            step = self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)[None, None]
            decay = -jnp.exp(self.A_log[...].astype(jnp.float32))[None, None] * jax.nn.softplus(step)
            out, state = gated_delta_rule(q, k, v, decay, beta, held["delta"], counts)
            context.write({"conv": tail, "delta": state})
            # The norm comes before the gate, and the gate stays in float32.
            normed = self.norm(out.astype(x.dtype)).astype(jnp.float32)
            return self.out_proj((normed * self.act(self.in_proj_z(x).astype(jnp.float32))).astype(x.dtype))


def joined_channels(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    """C: the width of q, k and v side by side."""
    return 2 * key_heads * key_dim + value_heads * value_dim


def delta_state(
    dtype: str, key_heads: int, value_heads: int, key_dim: int, value_dim: int, conv_width: int
) -> dict[str, Leaf]:
    """What one GatedDeltaNet layer keeps per sequence: the convolution's last inputs, and the float32 matrix."""
    channels = joined_channels(key_heads, value_heads, key_dim, value_dim)
    return {
        "conv": Leaf((conv_width - 1, channels), dtype, (None, "channels")),
        "delta": Leaf((value_heads, key_dim, value_dim), "float32", ("heads", None, None)),
    }


def l2_normalize(x: Array, eps: float = 1e-6) -> Array:
    """x / sqrt(sum(x^2) + eps) over the last axis, computed in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def causal_conv(x: Array, tail: Array, kernel: Array, counts: Array) -> tuple[Array, Array]:
    """Depthwise causal convolution that starts from the W-1 inputs before this launch.

    Args:
        x: [B, Q, C] inputs.
        tail: [B, W-1, C] the inputs just before x (zeros at the start of a sequence).
        kernel: [C, W] one filter per channel, the newest input last.
        counts: i32[B] real tokens per row.

    Returns:
        ([B, Q, C] outputs, [B, W-1, C] the last W-1 inputs after `counts` tokens).

    Example (W=3): tail [a b], x [c d _], counts 2 -> the new tail is [c d].
    """
    width = kernel.shape[-1]
    window = jnp.concatenate([tail.astype(x.dtype), x], axis=1)  # [B, W-1+Q, C]
    length = x.shape[1]
    out = sum(window[:, w : w + length] * kernel[None, None, :, w] for w in range(width))
    last = counts[:, None] + jnp.arange(width - 1, dtype=counts.dtype)[None, :]  # [B, W-1]
    return jnp.asarray(out), jnp.take_along_axis(window, last[:, :, None], axis=1)


def gated_delta_rule(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array, counts: Array
) -> tuple[Array, Array]:
    """S_t = exp(decay_t) S_{t-1} + beta_t k_t (v_t - k_t^T exp(decay_t) S_{t-1})^T; out_t = q_t^T S_t.

    Args:
        q, k: f32[B, Q, H, Dk], already normalized (and q scaled).
        v: f32[B, Q, H, Dv].
        decay: f32[B, Q, H], log of the factor on the old state, <= 0.
        beta: f32[B, Q, H], in (0, 1): how far the state moves to the new value.
        state: f32[B, H, Dk, Dv].
        counts: i32[B] real tokens per row.

    Returns:
        (f32[B, Q, H, Dv], the state after `counts` tokens). Outputs at padding tokens mean nothing; their inputs must
        be finite.
    """
    length = q.shape[1]
    real = (jnp.arange(length, dtype=counts.dtype)[None, :] < counts[:, None])[:, :, None]  # [B, Q, 1]
    # No decay and no step: such a token leaves the state alone, whatever it holds.
    decay = jnp.where(real, decay, 0.0)
    beta = jnp.where(real, beta, 0.0)
    if length == 1:
        out, state = _one_token(q[:, 0], k[:, 0], v[:, 0], decay[:, 0], beta[:, 0], state)
        return out[:, None], state
    return _chunked(q, k, v, decay, beta, state, min(CHUNK, length))


def _one_token(q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """One step of the rule; the same arguments without the Q axis."""
    state = state * jnp.exp(decay)[:, :, None, None]
    held = jnp.sum(state * k[..., None], axis=-2)  # [B, H, Dv]: what the state now answers to k
    state = state + k[..., None] * ((v - held) * beta[..., None])[:, :, None, :]
    return jnp.sum(state * q[..., None], axis=-2), state


def _chunked(q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array, chunk: int) -> tuple[Array, Array]:
    """The same rule, `chunk` tokens per step of a scan: matrix products instead of Q rank-one updates."""
    length = q.shape[1]
    pad = -length % chunk
    lower = jnp.tril(jnp.ones((chunk, chunk), dtype=bool))[None, None]
    strict = jnp.tril(jnp.ones((chunk, chunk), dtype=bool), -1)[None, None]

    def to_chunks(x: Array) -> Array:  # [B, Q, H, ...] -> [Q/chunk, B, H, chunk, ...]
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
        return jnp.swapaxes(jnp.moveaxis(x, 1, 0), 2, 3)

    def step(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, decay, beta = xs  # [B, H, chunk, ...]
        total = jnp.cumsum(decay, axis=-1)  # log decay from the chunk's start
        # between[i, j]: the factor from token j to token i
        between = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
        k_beta = k * beta[..., None]
        # Token i's correction depends on those before it: (I + system) u = beta (v - what the decayed state answers).
        system = jnp.where(strict, jnp.einsum("bhik,bhjk->bhij", k_beta, k) * between, 0.0)
        answer = jnp.einsum("bhik,bhkv->bhiv", k_beta * jnp.exp(total)[..., None], state)
        u = lax.linalg.triangular_solve(
            system, v * beta[..., None] - answer, left_side=True, lower=True, unit_diagonal=True
        )
        inside = jnp.einsum("bhik,bhjk->bhij", q, k) * between
        out = jnp.einsum("bhik,bhkv->bhiv", q * jnp.exp(total)[..., None], state) + jnp.einsum(
            "bhij,bhjv->bhiv", inside, u
        )
        to_end = jnp.exp(total[..., -1:] - total)[..., None]
        state = state * jnp.exp(total[..., -1])[..., None, None] + jnp.einsum("bhjk,bhjv->bhkv", k * to_end, u)
        return state, out

    state, out = lax.scan(step, state, tuple(to_chunks(x) for x in (q, k, v, decay, beta)))
    out = jnp.moveaxis(jnp.swapaxes(out, 2, 3), 0, 1)  # [B, Q/chunk, chunk, H, Dv]
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length], state
