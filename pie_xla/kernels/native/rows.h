// What is done to each token alone: small loops that XLA would spell out in dozens of instructions a layer.
#pragma once

#include <cstdint>

namespace pie {

// Rotary position embedding: the first 2r numbers of each head are turned, halves against each other; the rest is copied.
// x and out [T, H, d]; cos and sin [T, r], with 2r <= d. `out` may be `x`.
void rotate(const float* x, const float* cos, const float* sin, float* out, int64_t T, int64_t H, int64_t d, int64_t r);

// x [T, D] over its root mean square, times (plus + weight [D]). `out` may be `x`.
void rms_norm(const float* x, const float* weight, float* out, int64_t T, int64_t D, float eps, float plus);

}  // namespace pie
