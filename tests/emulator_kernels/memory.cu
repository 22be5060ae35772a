// Accesses that are wrong by themselves. Each kernel exists right and wrong; a `fault:` comment names the line
// that the emulator must report.
#include <kgen/primitives.cuh>

using namespace kgen;

struct Params {
  Global<const float> in;
  Global<float> out;
};

template <bool kWrong>
KGEN_DEVICE void global_read(const Params& params) {
  const int i = block_index_x() * 32 + thread_index();
  params.out.store(i, params.in.load(kWrong ? i + 1 : i));  // fault: global_read
}
KGEN_KERNEL(global_read_right, 32, 1, Params, params) { global_read<false>(params); }
KGEN_KERNEL(global_read_wrong, 32, 1, Params, params) { global_read<true>(params); }

template <bool kWrong>
KGEN_DEVICE void global_write(const Params& params) {
  const int i = block_index_x() * 32 + thread_index();
  params.out.store(kWrong ? i - 1 : i, 1.0f);  // fault: global_write
}
KGEN_KERNEL(global_write_right, 32, 1, Params, params) { global_write<false>(params); }
KGEN_KERNEL(global_write_wrong, 32, 1, Params, params) { global_write<true>(params); }

template <bool kWrong>
KGEN_DEVICE void global_align(const Params& params) {
  const int i = block_index_x() * 32 + thread_index();
  if (i < 8) params.out.store_as(4 * i + (kWrong && i == 3 ? 1 : 0), float4v{1, 2, 3, 4});  // fault: global_align
}
KGEN_KERNEL(global_align_right, 32, 1, Params, params) { global_align<false>(params); }
KGEN_KERNEL(global_align_wrong, 32, 1, Params, params) { global_align<true>(params); }

template <bool kWrong>
KGEN_DEVICE void read_only(const Params& params) {
  const Global<float> target = kWrong ? Global<float>{const_cast<float*>(params.in.pointer)} : params.out;
  target.store(thread_index(), 1.0f);  // fault: read_only
}
KGEN_KERNEL(read_only_right, 32, 1, Params, params) { read_only<false>(params); }
KGEN_KERNEL(read_only_wrong, 32, 1, Params, params) { read_only<true>(params); }

template <bool kWrong>
KGEN_DEVICE void unwritten_global(const Params& params) {
  const int i = thread_index();
  if (!kWrong || i != 7) params.out.store(i, 1.0f);
  params.out.store(i, params.out.load(i) + 1.0f);  // fault: unwritten_global
}
KGEN_KERNEL(unwritten_global_right, 32, 1, Params, params) { unwritten_global<false>(params); }
KGEN_KERNEL(unwritten_global_wrong, 32, 1, Params, params) { unwritten_global<true>(params); }

template <bool kWrong>
KGEN_DEVICE void shared_index(const Params& params) {
  const Shared<float> row = shared_array<float>(0, 32);
  const Shared<float> next = shared_array<float>(128, 32);
  next.store(thread_index(), 0.0f);
  row.store(thread_index() + (kWrong ? 1 : 0), 2.0f);  // fault: shared_index
  params.out.store(thread_index(), 0.0f);
}
KGEN_KERNEL(shared_index_right, 32, 1, Params, params) { shared_index<false>(params); }
KGEN_KERNEL(shared_index_wrong, 32, 1, Params, params) { shared_index<true>(params); }

template <bool kWrong>
KGEN_DEVICE void shared_size(const Params& params) {
  const Shared<float> row = shared_array<float>(kWrong ? 256 : 128, 32);  // fault: shared_size
  row.store(thread_index(), 2.0f);
  params.out.store(thread_index(), row.load(thread_index()));
}
KGEN_KERNEL(shared_size_right, 32, 1, Params, params) { shared_size<false>(params); }
KGEN_KERNEL(shared_size_wrong, 32, 1, Params, params) { shared_size<true>(params); }

template <bool kWrong>
KGEN_DEVICE void unwritten_shared(const Params& params) {
  const Shared<float> row = shared_array<float>(0, 32);
  if (!kWrong || thread_index() != 9) row.store(thread_index(), 2.0f);
  params.out.store(thread_index(), row.load(thread_index()));  // fault: unwritten_shared
}
KGEN_KERNEL(unwritten_shared_right, 32, 1, Params, params) { unwritten_shared<false>(params); }
KGEN_KERNEL(unwritten_shared_wrong, 32, 1, Params, params) { unwritten_shared<true>(params); }

// ldmatrix runs over the end of its array into the next one.
template <bool kWrong>
KGEN_DEVICE void ldmatrix_range(const Params& params) {
  const Shared<uint32_t> matrix = shared_array<uint32_t>(0, 128);
  const Shared<uint32_t> other = shared_array<uint32_t>(512 + 16, 32);
  other.store(thread_index(), 0u);
  matrix.store_as(4 * thread_index(), uint4v{0, 0, 0, 0});
  warp_sync();
  uint32_t r[4];
  ldmatrix_x4(r, matrix.address(4 * thread_index()) + (kWrong ? 16 : 0));  // fault: ldmatrix_range
  params.out.store(thread_index(), static_cast<float>(r[0]));
}
KGEN_KERNEL(ldmatrix_range_right, 32, 1, Params, params) { ldmatrix_range<false>(params); }
KGEN_KERNEL(ldmatrix_range_wrong, 32, 1, Params, params) { ldmatrix_range<true>(params); }

template <bool kWrong>
KGEN_DEVICE void ldmatrix_align(const Params& params) {
  const Shared<uint32_t> matrix = shared_array<uint32_t>(0, 132);
  matrix.store_as(4 * thread_index(), uint4v{0, 0, 0, 0});
  warp_sync();
  uint32_t r[4];
  const int shift = kWrong && thread_index() == 5 ? 8 : 0;
  ldmatrix_x4(r, matrix.address(4 * thread_index()) + shift);  // fault: ldmatrix_align
  params.out.store(thread_index(), static_cast<float>(r[0]));
}
KGEN_KERNEL(ldmatrix_align_right, 32, 1, Params, params) { ldmatrix_align<false>(params); }
KGEN_KERNEL(ldmatrix_align_wrong, 32, 1, Params, params) { ldmatrix_align<true>(params); }

// An array in registers.
template <bool kWrong>
KGEN_DEVICE void register_index(const Params& params) {
  float sums[4] = {0, 0, 0, 0};
  const int last = params.in.load(0) == 0.0f ? 3 : 0;
  for (int i = 0; i <= last + (kWrong ? 1 : 0); ++i) sums[i] += 1.0f;  // fault: register_index
  params.out.store(thread_index(), sums[0] + sums[3]);
}
KGEN_KERNEL(register_index_right, 32, 1, Params, params) { register_index<false>(params); }
KGEN_KERNEL(register_index_wrong, 32, 1, Params, params) { register_index<true>(params); }

// A loop that polls memory which nobody will write.
KGEN_KERNEL(endless_wrong, 32, 1, Params, params) {
  while (params.in.load(0) == 0.0f) {  // fault: endless
  }
}
