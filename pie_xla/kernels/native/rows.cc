#include "rows.h"

#include <cmath>
#include <cstring>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define PIE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PIE_CLONES
#endif

namespace pie {

PIE_CLONES void rotate(const float* x, const float* cos, const float* sin, float* out, int64_t T, int64_t H, int64_t d, int64_t r) {
  for (int64_t t = 0; t < T; ++t) {
    const float* c = cos + t * r;
    const float* s = sin + t * r;
    for (int64_t h = 0; h < H; ++h) {
      const float* from = x + (t * H + h) * d;
      float* into = out + (t * H + h) * d;
      for (int64_t i = 0; i < r; ++i) {
        const float a = from[i], b = from[i + r];
        into[i] = a * c[i] - b * s[i];
        into[i + r] = b * c[i] + a * s[i];
      }
      if (into != from && 2 * r < d) std::memcpy(into + 2 * r, from + 2 * r, sizeof(float) * (d - 2 * r));
    }
  }
}

PIE_CLONES void rms_norm(const float* x, const float* weight, float* out, int64_t T, int64_t D, float eps, float plus) {
  constexpr int64_t kLanes = 32;  // sums side by side: the order does not depend on the instruction set
  for (int64_t t = 0; t < T; ++t) {
    const float* from = x + t * D;
    float* into = out + t * D;
    float sums[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= D; i += kLanes)
      for (int64_t j = 0; j < kLanes; ++j) sums[j] += from[i + j] * from[i + j];
    for (int64_t j = 0; i < D; ++i, ++j) sums[j] += from[i] * from[i];
    float total = 0;
    for (float sum : sums) total += sum;
    const float scale = 1.0f / std::sqrt(total / static_cast<float>(D) + eps);
    for (int64_t k = 0; k < D; ++k) into[k] = from[k] * scale * (plus + weight[k]);
  }
}

}  // namespace pie
