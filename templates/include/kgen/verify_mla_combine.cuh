// Merges the splits of one row: out = sum_s 2^(lse_s - peak) out_s / sum_s 2^(lse_s - peak).
#pragma once

#include <kgen/reductions.cuh>
#include <kgen/verify_mla_problem.cuh>

namespace kgen::verify_mla {

// One block a row, four columns a thread; every warp reads the row's log-sum-exps for itself, 32 splits at a
// time, so that the block needs no barrier. A split that saw nothing wrote -inf and no partial output.
template <typename Config>
KGEN_DEVICE void combine(const Params& params) {
  static_assert(Config::kCombineThreads * 4 == Config::kLatent, "a thread merges four columns");
  const int64_t row = block_index_x();
  if (row >= static_cast<int64_t>(load_index<kQoIndptr>(params, params.qo_indptr, params.batch)) * params.heads) return;
  const int lane = thread_index() % 32, column = thread_index() * 4;

  float4v sum{0, 0, 0, 0};
  float peak = -infinity(), total = 0;
  for (int first = 0; first < params.splits; first += 32) {
    const int64_t place = (first + lane) * static_cast<int64_t>(params.partial_rows) + row;
    const float lse = first + lane < params.splits ? params.partial_lse.load(place) : -infinity();
    const float new_peak = maximum(peak, lanes_maximum<32>(lse));
    if (new_peak == -infinity()) continue;
    const float rescale = exp2_approx(peak - new_peak), lane_weight = exp2_approx(lse - new_peak);
    peak = new_peak;
    total *= rescale;
    sum = {sum.x * rescale, sum.y * rescale, sum.z * rescale, sum.w * rescale};
    const int count = params.splits - first < 32 ? params.splits - first : 32;
    KGEN_UNROLL_BY(8)
    for (int i = 0; i < count; i++) {
      const int64_t at = ((first + i) * static_cast<int64_t>(params.partial_rows) + row) * Config::kLatent + column;
      const float4v part = params.partial_out.template load_as<float4v>(at);
      const float weight = shuffle(lane_weight, i);
      if (weight > 0) {
        total += weight;
        sum = {sum.x + weight * part.x, sum.y + weight * part.y, sum.z + weight * part.z, sum.w + weight * part.w};
      }
    }
  }
  const float inverse = total > 0 ? 1 / total : 0;
  const uint2v packed{pack_bf16x2(sum.x * inverse, sum.y * inverse), pack_bf16x2(sum.z * inverse, sum.w * inverse)};
  params.out.template store_as<uint2v>(row * Config::kLatent + column, packed);
  if (params.lse && thread_index() == 0) {
    params.lse.store(row, total > 0 ? (peak + log2_approx(total)) * kLn2 : -infinity());
  }
}

}  // namespace kgen::verify_mla
