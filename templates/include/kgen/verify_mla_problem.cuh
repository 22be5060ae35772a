// What every verify_mla kernel is given, and how a request's rows and keys are found.
#pragma once

#include <kgen/primitives.cuh>

namespace kgen::verify_mla {

// Shapes and dtypes: kgen/families/verify_mla.py, which packs these bytes.
struct Params {
  Global<const bf16> q;
  Global<const uint8_t> kv_pool;
  Global<const uint8_t> draft_kv;
  Global<const int32_t> kv_indices;
  Global<const int32_t> kv_indptr;
  Global<const int32_t> qo_indptr;
  Global<const int32_t> draft_slots;
  Global<const uint32_t> tree_mask;
  Global<bf16> out;
  Global<float> lse;
  Global<bf16> partial_out;
  Global<float> partial_lse;
  Global<uint32_t> merges;
  Global<uint32_t> schedule;
  int32_t kv_stride_bytes;
  int32_t batch;
  int32_t heads;
  int32_t work_slots;
  int32_t min_split_tiles;
  int32_t item_overhead_tiles;
  int32_t combine_groups;
  int32_t combine_parts;
  int32_t mask_words;
  int32_t wide_indices;
  float scale_log2;
  float kv_scale;
};

constexpr float kLn2 = 0.693147180559945f;

// Bits of Params::wide_indices.
enum IndexArray { kKvIndices = 0, kKvIndptr = 1, kQoIndptr = 2, kDraftSlots = 3 };

// Element `i + lane_offset` of an index array, which is int32 or int64. Every value fits int32: of an int64, the lower
// half is loaded. (What differs among lanes is apart, so that the rest needs no register a lane.)
template <IndexArray kArray>
KGEN_DEVICE int load_index(const Params& params, Global<const int32_t> array, int64_t i, uint32_t lane_offset = 0) {
  const int wide = (params.wide_indices >> kArray) & 1;
  return (array + (i << wide)).load(lane_offset << wide);
}

struct Request {
  int first_node;  // of all nodes in the batch
  int nodes;
  int first_key;  // in kv_indices
  int prefix;

  KGEN_DEVICE int keys() const { return prefix + nodes; }
};

// Request `index`; one past the batch is empty and lies at its end.
KGEN_DEVICE Request load_request(const Params& params, int index) {
  const int begin = index < params.batch ? index : params.batch, end = begin < params.batch ? begin + 1 : begin;
  Request request;
  request.first_node = load_index<kQoIndptr>(params, params.qo_indptr, begin);
  request.nodes = load_index<kQoIndptr>(params, params.qo_indptr, end) - request.first_node;
  request.first_key = load_index<kKvIndptr>(params, params.kv_indptr, begin);
  request.prefix = load_index<kKvIndptr>(params, params.kv_indptr, end) - request.first_key;
  return request;
}

// Where a key's row is: a pool slot, or -1 - t for row t of draft_kv. One register to fetch ahead.
KGEN_DEVICE int key_place(const Params& params, const Request& request, int key) {
  if (key < request.prefix) return load_index<kKvIndices>(params, params.kv_indices, request.first_key + key);
  const int node = request.first_node + key - request.prefix;
  return params.draft_kv ? -1 - node : load_index<kDraftSlots>(params, params.draft_slots, node);
}

// A row's bytes in memory, from its place.
template <int kDenseBytes>
KGEN_DEVICE Global<const uint8_t> key_row(const Params& params, int place) {
  const Global<const uint8_t> rows = place >= 0 ? params.kv_pool : params.draft_kv;
  const uint32_t row = place >= 0 ? place : -1 - place, stride = place >= 0 ? params.kv_stride_bytes : kDenseBytes;
  return rows + static_cast<int64_t>(static_cast<uint64_t>(row) * stride);
}

// Whether a node of the request sees draft row `draft`.
KGEN_DEVICE bool sees_draft(const Params& params, const Request& request, int node, int draft) {
  if (draft >= request.nodes) return false;
  if (!params.tree_mask) return draft <= node;
  const int64_t row = static_cast<int64_t>(request.first_node + node) * params.mask_words;
  return (params.tree_mask.load(row + draft / 32) >> (draft % 32)) & 1;
}

}  // namespace kgen::verify_mla
