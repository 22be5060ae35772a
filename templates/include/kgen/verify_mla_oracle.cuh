// The naive kernel: one block a row, one key at a time. Slow and obviously right.
#pragma once

#include <kgen/reductions.cuh>
#include <kgen/verify_mla_problem.cuh>

namespace kgen::verify_mla {

// The sum of `value` over the block; `scratch` holds one float a warp.
template <int kWarps>
KGEN_DEVICE float block_sum(Shared<float> scratch, float value) {
  value = lanes_sum<32>(value);
  if (thread_index() % 32 == 0) scratch.store(thread_index() / 32, value);
  block_sync();
  float sum = 0;
  KGEN_UNROLL
  for (int warp = 0; warp < kWarps; warp++) sum += scratch.load(warp);
  block_sync();
  return sum;
}

template <typename Config>
KGEN_DEVICE void oracle(const Params& params) {
  constexpr int kThreads = Config::kWarps * 32;
  constexpr int kHeadDim = Config::kLatent + Config::kRope;
  constexpr int kColumns = (kHeadDim + kThreads - 1) / kThreads;
  static_assert(Config::kWarps * sizeof(float) == Config::kSharedBytes, "the family and the kernel disagree");
  const Shared<float> scratch = shared_array<float>(0, Config::kWarps);

  const int token = block_index_x() / params.heads;
  const int thread = thread_index();
  int index = 0;
  while (index < params.batch && token >= load_index<kQoIndptr>(params, params.qo_indptr, index + 1)) index++;
  if (index == params.batch) return;
  const Request request = load_request(params, index);
  const int64_t row = block_index_x();

  float q[kColumns], o[kColumns];
  for (int i = 0; i < kColumns; i++) {
    const int column = i * kThreads + thread;
    q[i] = column < kHeadDim ? to_float(params.q.load(row * kHeadDim + column)) : 0;
    o[i] = 0;
  }
  float peak = -infinity(), total = 0;
  for (int key = 0; key < request.keys(); key++) {
    if (key >= request.prefix && !sees_draft(params, request, token - request.first_node, key - request.prefix)) continue;
    const Global<const bf16> kv = key_row<kHeadDim>(params, key_place(params, request, key));
    float k[kColumns], dot = 0;
    for (int i = 0; i < kColumns; i++) {
      const int column = i * kThreads + thread;
      k[i] = column < kHeadDim ? to_float(kv.load(column)) : 0;
      dot += q[i] * k[i];
    }
    const float score = block_sum<Config::kWarps>(scratch, dot) * params.scale_log2;
    const float new_peak = score > peak ? score : peak;
    const float rescale = exp2_approx(peak - new_peak), weight = exp2_approx(score - new_peak);
    peak = new_peak;
    total = total * rescale + weight;
    for (int i = 0; i < kColumns; i++) o[i] = o[i] * rescale + weight * k[i];
  }
  const float inverse = total > 0 ? 1 / total : 0;
  for (int i = 0; i < kColumns; i++) {
    const int column = i * kThreads + thread;
    if (column < Config::kLatent) params.out.store(row * Config::kLatent + column, to_bf16(o[i] * inverse));
  }
  if (params.lse && thread == 0) {
    params.lse.store(row, total > 0 ? (peak + log2_approx(total)) * kLn2 : -infinity());
  }
}

}  // namespace kgen::verify_mla
