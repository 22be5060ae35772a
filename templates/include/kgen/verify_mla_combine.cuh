// Merges the splits of one row: out = sum_s 2^(lse_s - peak) out_s / sum_s 2^(lse_s - peak).
#pragma once

#include <kgen/reductions.cuh>
#include <kgen/verify_mla_schedule.cuh>

namespace kgen::verify_mla {

// A block merges `latent / combine_parts` columns of one row, four a thread. `combine_groups` threads share a column,
// each with every so many-th split, because a row's time is the latency of its loads: nothing here waits for a load
// that it could have started. A row whose request was not split is done already.
template <typename Config>
KGEN_DEVICE void combine(const Params& params) {
  constexpr int kInFlight = 8;
  const Shared<float4v> sums = shared_array<float4v>(0, Config::kCombineThreads);
  const Shared<float> totals = shared_array<float>(Config::kCombineThreads * 16, Config::kCombineGroups);
  static_assert(Config::kCombineThreads * 16 + Config::kCombineGroups * 4 == Config::kCombineSharedBytes,
                "the family and the kernel disagree");

  const int row = block_index_x(), token = divide(row, params.heads);
  const Work work = uniform_work(find_work<Config, true>(params, token));
  if (work.splits <= 1) return;
  const int request_row = row - work.request.first_node * params.heads;
  const int64_t first = static_cast<int64_t>(work.first_item + request_row / Config::kTileM) * Config::kTileM +
                        request_row % Config::kTileM;
  const int64_t stride = static_cast<int64_t>(work.row_tiles) * Config::kTileM;
  const int column_threads = divide(Config::kLatent / 4, params.combine_parts);
  const int group = divide(thread_index(), column_threads), place = thread_index() - group * column_threads;
  const int column = (block_index_y() * column_threads + place) * 4;

  float peak = -infinity();
  KGEN_UNROLL_BY(4)
  for (int split = thread_index() % 32; split < work.splits; split += 32) {
    peak = maximum(peak, params.partial_lse.load(first + split * stride));
  }
  peak = lanes_maximum<32>(peak);
  const float base = peak == -infinity() ? 0 : peak;

  float4v sum{0, 0, 0, 0};
  float total = 0;
  for (int start = group; start < work.splits; start += kInFlight * params.combine_groups) {
    float lse[kInFlight];
    uint2v part[kInFlight];
    KGEN_UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int split = start + i * params.combine_groups;
      const int64_t at = first + (split < work.splits ? split : start) * stride;  // a weight of 0 hides it
      lse[i] = params.partial_lse.load(at);
      part[i] = params.partial_out.template load_as<uint2v>(at * Config::kLatent + column);
    }
    KGEN_UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const float weight = start + i * params.combine_groups < work.splits ? exp2_approx(lse[i] - base) : 0;
      total += weight;
      sum = {sum.x + weight * low_bf16(part[i].x), sum.y + weight * high_bf16(part[i].x),
             sum.z + weight * low_bf16(part[i].y), sum.w + weight * high_bf16(part[i].y)};
    }
  }
  sums.store(thread_index(), sum);
  if (place == 0) totals.store(group, total);
  block_sync();
  if (group > 0) return;
  for (int other = 1; other < params.combine_groups; other++) {
    const float4v part = sums.load(other * column_threads + place);
    sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    total += totals.load(other);
  }
  const float inverse = total == 0 ? 0 : 1 / total;
  const uint2v packed{pack_bf16x2(sum.x * inverse, sum.y * inverse), pack_bf16x2(sum.z * inverse, sum.w * inverse)};
  params.out.template store_as<uint2v>(static_cast<int64_t>(row) * Config::kLatent + column, packed);
  if (params.lse && column == 0) {
    params.lse.store(row, total == 0 ? -infinity() : (peak + log2_approx(total)) * kLn2);
  }
}

}  // namespace kgen::verify_mla
