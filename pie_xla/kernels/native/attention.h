// Paged attention on a CPU: what the kernel needs to know of one call. All arrays are dense, row-major, float32 or int32.
#pragma once

#include <cstdint>

namespace pie {

// B rows of at most Q new tokens, H query heads, K kv heads, d numbers a head, pages of `page` cells, N pages a row.
struct Call {
  int64_t B, Q, H, K, d, page, N, live_words, mask_words;
  const float* query;        // [B, Q, H, d]
  const float* key;          // [B, Q, K, d]
  const float* value;        // [B, Q, K, d]
  float* pool_key;           // [pages of all layers, K, page, d]
  float* pool_value;         // the same
  const int32_t* pages;      // [B, N], within the layer
  int64_t first;             // row of the layer's page 0 in the pool
  int64_t pool_pages;        // rows of the pool
  const int32_t* starts;     // [B], cells in the row's set before this call
  const int32_t* counts;     // [B], real new tokens
  const int32_t* positions;  // [B, Q]
  const int32_t* bases;      // [B, N], position of each page's first cell
  const int32_t* live;       // [B, N, live_words], a bit per cell
  const int32_t* window;     // [B], positions a token sees
  const int32_t* sinks;      // [B], positions below it are seen whatever the window
  const int32_t* mask;       // [B, Q, mask_words], a bit per token and cell; no words: no mask
  float* out;                // [B, Q, H, d]
  float scale;
  float soft_cap;            // 0: none
  int64_t layer_window;      // 0: none
};

constexpr int64_t kTile = 16;  // new tokens one task attends for

inline int64_t tiles(const Call& call) { return (call.Q + kTile - 1) / kTile; }
inline int64_t tasks(const Call& call) { return call.B * call.K * tiles(call); }

// Copies the new keys and values into their cells; before any task.
void append(const Call& call);

// One (row, kv head, tile of tokens). Tasks are independent, and what one computes depends on nothing but its row.
using Task = void (*)(const Call& call, int64_t task);

Task best_task();              // for this processor
const char* best_task_name();

}  // namespace pie
