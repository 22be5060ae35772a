// Merges the splits of one row: out = sum_s 2^(lse_s - peak) out_s / sum_s 2^(lse_s - peak).
#pragma once

#include <kgen/reductions.cuh>
#include <kgen/verify_mla_problem.cuh>

namespace kgen::verify_mla {

// One block a row, four columns a thread. `combine_groups` threads share a column, each with every so many-th split,
// because a row's time is the latency of its loads: nothing here waits for a load that it could have started.
// A split that saw nothing wrote -inf and no partial output.
template <typename Config>
KGEN_DEVICE void combine(const Params& params) {
  constexpr int kColumnThreads = Config::kLatent / 4, kMaxGroups = Config::kCombineThreads / kColumnThreads;
  const Shared<float4v> sums = shared_array<float4v>(0, Config::kCombineThreads);
  const Shared<float> totals = shared_array<float>(Config::kCombineThreads * 16, kMaxGroups);
  static_assert(Config::kCombineThreads * 16 + kMaxGroups * 4 == Config::kCombineSharedBytes,
                "the family and the kernel disagree");

  const int64_t row = block_index_x(), stride = params.partial_rows;
  const int lane = thread_index() % 32, place = thread_index() % kColumnThreads, group = thread_index() / kColumnThreads;
  float peak = -infinity();
  KGEN_UNROLL_BY(4)
  for (int split = lane; split < params.splits; split += 32) {
    peak = maximum(peak, params.partial_lse.load(split * stride + row));
  }
  if (row >= static_cast<int64_t>(load_index<kQoIndptr>(params, params.qo_indptr, params.batch)) * params.heads) return;
  peak = lanes_maximum<32>(peak);
  const float base = peak == -infinity() ? 0 : peak;

  float4v sum{0, 0, 0, 0};
  float total = 0;
  KGEN_UNROLL_BY(8)
  for (int split = group; split < params.splits; split += params.combine_groups) {
    const int64_t at = split * stride + row;
    const float weight = exp2_approx(params.partial_lse.load(at) - base);
    const float4v part = params.partial_out.template load_as<float4v>(at * Config::kLatent + place * 4);
    if (weight > 0) {
      total += weight;
      sum = {sum.x + weight * part.x, sum.y + weight * part.y, sum.z + weight * part.z, sum.w + weight * part.w};
    }
  }
  sums.store(thread_index(), sum);
  if (place == 0) totals.store(group, total);
  block_sync();
  if (group > 0) return;
  for (int other = 1; other < params.combine_groups; other++) {
    const float4v part = sums.load(other * kColumnThreads + place);
    sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    total += totals.load(other);
  }
  const float inverse = total > 0 ? 1 / total : 0;
  const uint2v packed{pack_bf16x2(sum.x * inverse, sum.y * inverse), pack_bf16x2(sum.z * inverse, sum.w * inverse)};
  params.out.template store_as<uint2v>(row * Config::kLatent + place * 4, packed);
  if (params.lse && place == 0) {
    params.lse.store(row, total > 0 ? (peak + log2_approx(total)) * kLn2 : -infinity());
  }
}

}  // namespace kgen::verify_mla
