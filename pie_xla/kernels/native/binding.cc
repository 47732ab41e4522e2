// The XLA FFI handlers: they check shapes; attention shares its tasks with XLA's own threads.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "attention.h"
#include "rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

namespace {

// Work that the caller does together with whichever threads are free. It never waits for a thread to become free: a thread that comes
// late finds nothing to do, so a pool whose threads all wait here cannot lock up.
struct Shared {
  pie::Call call;
  pie::Task task;
  int64_t total;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable ended;

  void work() {
    int64_t finished = 0;
    for (int64_t i = next.fetch_add(1); i < total; i = next.fetch_add(1)) {
      task(call, i);
      ++finished;
    }
    if (finished && done.fetch_add(finished) + finished == total) {
      std::lock_guard<std::mutex> lock(mutex);
      ended.notify_all();
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    ended.wait(lock, [this] { return done.load() == total; });
  }
};

ffi::Error attend(ffi::ThreadPool pool, F32 query, F32 key, F32 value, F32 pool_key, F32 pool_value, I32 pages, I32 first, I32 starts,
                  I32 counts, I32 positions, I32 bases, I32 live, I32 window, I32 sinks, I32 mask, ffi::ResultBuffer<ffi::F32> out,
                  ffi::ResultBuffer<ffi::F32> new_key, ffi::ResultBuffer<ffi::F32> new_value, float scale, float soft_cap,
                  int64_t layer_window) {
  const auto q = query.dimensions(), p = pool_key.dimensions(), table = pages.dimensions();
  if (q.size() != 4 || p.size() != 4 || table.size() != 2 || live.dimensions().size() != 3 || mask.dimensions().size() != 3)
    return ffi::Error::InvalidArgument("pie_attend: ranks");
  if (q[3] != p[3] || p[1] == 0 || q[2] % p[1] || table[0] != q[0] || live.dimensions()[2] * 32 < p[2])
    return ffi::Error::InvalidArgument("pie_attend: shapes");
  if (new_key->typed_data() != pool_key.typed_data() || new_value->typed_data() != pool_value.typed_data())
    return ffi::Error::Internal("pie_attend: the pool was copied, it must be donated");
  auto shared = std::make_shared<Shared>();
  shared->call = {q[0], q[1], q[2], p[1], q[3], p[2], table[1], live.dimensions()[2], mask.dimensions()[2],
                  query.typed_data(), key.typed_data(), value.typed_data(), new_key->typed_data(), new_value->typed_data(),
                  pages.typed_data(), first.typed_data()[0], p[0], starts.typed_data(), counts.typed_data(), positions.typed_data(),
                  bases.typed_data(), live.typed_data(), window.typed_data(), sinks.typed_data(), mask.typed_data(),
                  out->typed_data(), scale, soft_cap, layer_window};
  pie::append(shared->call);
  shared->task = pie::best_task();
  shared->total = pie::tasks(shared->call);
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), shared->total) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->work(); });
  shared->work();
  shared->wait();
  return ffi::Error::Success();
}

ffi::Error rotate(F32 x, F32 cos, F32 sin, ffi::ResultBuffer<ffi::F32> out) {
  const auto shape = x.dimensions(), table = cos.dimensions();
  if (shape.size() != 4 || table.size() != 3 || sin.element_count() != cos.element_count() || table[0] != shape[0] || table[1] != shape[1] ||
      2 * table[2] > shape[3])
    return ffi::Error::InvalidArgument("pie_rotate: shapes");
  pie::rotate(x.typed_data(), cos.typed_data(), sin.typed_data(), out->typed_data(), shape[0] * shape[1], shape[2], shape[3], table[2]);
  return ffi::Error::Success();
}

ffi::Error rms_norm(F32 x, F32 weight, ffi::ResultBuffer<ffi::F32> out, float eps, float plus) {
  const auto shape = x.dimensions();
  if (shape.size() < 1 || static_cast<int64_t>(weight.element_count()) != shape.back())
    return ffi::Error::InvalidArgument("pie_rms_norm: shapes");
  const int64_t D = shape.back();
  pie::rms_norm(x.typed_data(), weight.typed_data(), out->typed_data(), D ? x.element_count() / D : 0, D, eps, plus);
  return ffi::Error::Success();
}

}  // namespace

extern "C" const char* pie_kernel_name() { return pie::best_task_name(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(pie_attend, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()   // query
                                  .Arg<F32>()   // key
                                  .Arg<F32>()   // value
                                  .Arg<F32>()   // pool_key
                                  .Arg<F32>()   // pool_value
                                  .Arg<I32>()   // pages
                                  .Arg<I32>()   // first
                                  .Arg<I32>()   // starts
                                  .Arg<I32>()   // counts
                                  .Arg<I32>()   // positions
                                  .Arg<I32>()   // bases
                                  .Arg<I32>()   // live
                                  .Arg<I32>()   // window
                                  .Arg<I32>()   // sinks
                                  .Arg<I32>()   // mask
                                  .Ret<F32>()   // out
                                  .Ret<F32>()   // new_key
                                  .Ret<F32>()   // new_value
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("layer_window"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pie_rotate, rotate,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()   // x
                                  .Arg<F32>()   // cos
                                  .Arg<F32>()   // sin
                                  .Ret<F32>()); // out

XLA_FFI_DEFINE_HANDLER_SYMBOL(pie_rms_norm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()   // x
                                  .Arg<F32>()   // weight
                                  .Ret<F32>()   // out
                                  .Attr<float>("eps")
                                  .Attr<float>("plus"));
