// Which compiled form of the kernel this processor runs, and what all of them share.

#include "attention.h"

#include <cstring>

namespace pie {

namespace base {
void run(const Call& call, int64_t task);
}
#if defined(__x86_64__)
namespace avx2 {
void run(const Call& call, int64_t task);
}
namespace avx512 {
void run(const Call& call, int64_t task);
}
#endif

namespace {

struct Choice {
  Task task;
  const char* name;
};

Choice choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return {avx512::run, "avx512"};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {avx2::run, "avx2"};
#endif
  return {base::run, "base"};
}

const Choice kChoice = choose();

}  // namespace

Task best_task() { return kChoice.task; }
const char* best_task_name() { return kChoice.name; }

void append(const Call& call) {
  const int64_t d = call.d;
  for (int64_t b = 0; b < call.B; ++b) {
    for (int64_t t = 0; t < call.counts[b] && t < call.Q; ++t) {
      const int64_t cell = call.starts[b] + t, n = cell / call.page;
      if (cell < 0 || n >= call.N) continue;
      const int64_t at = call.first + call.pages[b * call.N + n];
      if (at < 0 || at >= call.pool_pages) continue;
      for (int64_t k = 0; k < call.K; ++k) {
        const int64_t from = ((b * call.Q + t) * call.K + k) * d;
        const int64_t into = ((at * call.K + k) * call.page + cell % call.page) * d;
        std::memcpy(call.pool_key + into, call.key + from, sizeof(float) * d);
        std::memcpy(call.pool_value + into, call.value + from, sizeof(float) * d);
      }
    }
  }
}

}  // namespace pie
