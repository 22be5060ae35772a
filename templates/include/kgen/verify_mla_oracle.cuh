// The naive kernel: one warp a row, one key at a time, no shared memory. Slow and obviously right.
#pragma once

#include <kgen/reductions.cuh>
#include <kgen/verify_mla_problem.cuh>

namespace kgen::verify_mla {

template <typename Config>
KGEN_DEVICE void oracle(const Params& params) {
  using Element = typename Config::Element;
  constexpr int kHeadDim = Config::kLatent + Config::kRope;
  constexpr int kColumns = kHeadDim / 32;  // of a lane: lane, lane + 32, ...
  static_assert(kHeadDim % 32 == 0 && Config::kLatent % 32 == 0, "whole columns a lane");

  const int token = block_index_x() / params.heads;
  const int lane = thread_index();
  int index = 0;
  while (index < params.batch && token >= load_index<kQoIndptr>(params, params.qo_indptr, index + 1)) index++;
  if (index == params.batch) return;
  const Request request = load_request(params, index);
  const int64_t row = block_index_x();

  float q[kColumns], o[kColumns];
  for (int i = 0; i < kColumns; i++) {
    q[i] = to_float(params.q.load(row * kHeadDim + i * 32 + lane));
    o[i] = 0;
  }
  float peak = -infinity(), total = 0;
  for (int key = 0; key < request.keys(); key++) {
    const int draft = key - request.prefix;
    if (draft >= 0 && !sees_draft(params, request, token - request.first_node, draft)) continue;
    const Global<const uint8_t> bytes =
        key_row<kHeadDim * sizeof(Element)>(params, key_place(params, request, key));
    const Global<const Element> kv{reinterpret_cast<const Element*>(bytes.pointer)};
    float k[kColumns], dot = 0;
    for (int i = 0; i < kColumns; i++) {
      k[i] = to_float(kv.load(i * 32 + lane));
      dot += q[i] * k[i];
    }
    const float score = lanes_sum<32>(dot) * params.scale_log2;
    const float new_peak = score > peak ? score : peak;
    const float rescale = exp2_approx(peak - new_peak), weight = exp2_approx(score - new_peak);
    peak = new_peak;
    total = total * rescale + weight;
    for (int i = 0; i < kColumns; i++) o[i] = o[i] * rescale + weight * k[i];
  }
  const float inverse = total == 0 ? 0 : 1 / total;
  for (int i = 0; i < Config::kLatent / 32; i++) {
    params.out.store(row * Config::kLatent + i * 32 + lane, to_bf16(o[i] * inverse * params.kv_scale));
  }
  if (params.lse && lane == 0) {
    params.lse.store(row, total == 0 ? -infinity() : (peak + log2_approx(total)) * kLn2);
  }
}

}  // namespace kgen::verify_mla
