// Merges the splits of one row: out = sum_s 2^(lse_s - peak) out_s / sum_s 2^(lse_s - peak).
#pragma once

#include <kgen/reductions.cuh>
#include <kgen/verify_mla_problem.cuh>

namespace kgen::verify_mla {

// What weights are relative to; a row that has seen no key has none.
KGEN_DEVICE float finite_base(float peak) { return peak == -infinity() ? 0 : peak; }

KGEN_DEVICE float4v scale(const float4v& v, float by) { return {v.x * by, v.y * by, v.z * by, v.w * by}; }

// A block merges `latent / combine_parts` columns of one row, four a thread. `combine_groups` threads share a column,
// each with every so many-th split, and merge what they have at the end, because a row's time is the latency of its
// loads: a round of them, of up to `kCombineLoads` splits, is on its way before the first is waited for. The next round
// is not. A row whose request was not split is done already.
template <typename Config>
KGEN_DEVICE void combine(const Params& params) {
  constexpr int kInFlight = Config::kCombineLoads;
  const Shared<float4v> sums = shared_array<float4v>(0, Config::kCombineThreads);
  constexpr int kTotals = Config::kCombineThreads * 16, kPeaks = kTotals + Config::kCombineGroups * 4;
  const Shared<float> totals = shared_array<float>(kTotals, Config::kCombineGroups);
  const Shared<float> peaks = shared_array<float>(kPeaks, Config::kCombineGroups);
  constexpr int kBytes = kPeaks + Config::kCombineGroups * 4;
  static_assert(kBytes == Config::kCombineSharedBytes, "the family and the kernel disagree");

  const int row = block_index_x();
  const uint4v merge = params.merges.template load_as<uint4v>(static_cast<int64_t>(row) * 4);
  if (row >= load_index<kQoIndptr>(params, params.qo_indptr, params.batch) * params.heads) return;
  const int splits = static_cast<int>(merge.z);
  if (splits <= 1) return;
  const uint32_t first = merge.x, stride = merge.y;
  const int column_threads = Config::kLatent / 4 / params.combine_parts;
  const int group = thread_index() / column_threads, place = thread_index() - group * column_threads;
  const int column = (block_index_y() * column_threads + place) * 4;

  float4v sum{0, 0, 0, 0};
  float peak = -infinity(), total = 0;
  for (int start = group; start < splits; start += kInFlight * params.combine_groups) {
    float lse[kInFlight];
    uint2v part[kInFlight];
    KGEN_UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int split = start + i * params.combine_groups;
      lse[i] = -infinity();
      part[i] = {0, 0};
      if (split >= splits) continue;
      const uint32_t at = first + split * stride;  // all partials are a few hundred blocks' rows
      lse[i] = params.partial_lse.load(at);
      part[i] = params.partial_out.template load_as<uint2v>(at * Config::kLatent + column);
    }
    float higher = peak;
    KGEN_UNROLL
    for (int i = 0; i < kInFlight; i++) higher = maximum(higher, lse[i]);
    const float base = finite_base(higher), fade = exp2_approx(peak - base);
    sum = scale(sum, fade);
    total *= fade;
    peak = higher;
    KGEN_UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const float weight = exp2_approx(lse[i] - base);
      total += weight;
      sum = {sum.x + weight * low_bf16(part[i].x), sum.y + weight * high_bf16(part[i].x),
             sum.z + weight * low_bf16(part[i].y), sum.w + weight * high_bf16(part[i].y)};
    }
  }
  sums.store(thread_index(), sum);
  if (place == 0) {
    totals.store(group, total);
    peaks.store(group, peak);
  }
  block_sync();
  if (group > 0) return;
  KGEN_UNROLL_BY(4)
  for (int other = 1; other < params.combine_groups; other++) peak = maximum(peak, peaks.load(other));
  const float base = finite_base(peak), own = exp2_approx(peaks.load(0) - base);
  sum = scale(sum, own);
  total *= own;
  KGEN_UNROLL_BY(4)
  for (int other = 1; other < params.combine_groups; other++) {
    const float4v part = sums.load(other * column_threads + place);
    const float weight = exp2_approx(peaks.load(other) - base);
    sum = {sum.x + weight * part.x, sum.y + weight * part.y, sum.z + weight * part.z, sum.w + weight * part.w};
    total += weight * totals.load(other);
  }
  const float inverse = total == 0 ? 0 : 1 / total;
  const uint2v packed{pack_bf16x2(sum.x * inverse, sum.y * inverse), pack_bf16x2(sum.z * inverse, sum.w * inverse)};
  params.out.template store_as<uint2v>(static_cast<int64_t>(row) * Config::kLatent + column, packed);
  if (params.lse && column == 0) params.lse.store(row, (peak + log2_approx(total)) * kLn2);
}

}  // namespace kgen::verify_mla
