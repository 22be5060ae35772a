// Slot numbers to what they became, in place: rows of a request-to-token map, and a flat list.
#pragma once

#include <kgen/primitives.cuh>

namespace kgen::slot_remap {

// Shapes and dtypes: kgen/families/slot_remap.py, which packs these bytes.
struct Params {
  Global<const int32_t> slot_map;
  Global<const int32_t> lengths;
  Global<int32_t> req_to_token;
  Global<int32_t> slot_list;
  int64_t row_stride;
  int32_t requests;
  int32_t slots;
  int32_t entries;
  int32_t wide;
  int32_t whole_vectors;
  int32_t row_blocks;
  int32_t list_row;
};

enum WideArray { kLengths = 0, kSlotList = 1 };  // bits of Params::wide

// The new number of a slot; what is no slot stays (-1, say).
KGEN_DEVICE uint32_t remap(const Params& params, uint32_t slot) {
  return slot < static_cast<uint32_t>(params.slots) ? static_cast<uint32_t>(params.slot_map.load(slot)) : slot;
}

template <bool kWideElements>
KGEN_DEVICE uint4v remap(const Params& params, uint4v v) {
  if (!kWideElements) return {remap(params, v.x), remap(params, v.y), remap(params, v.z), remap(params, v.w)};
  return {v.y == 0 ? remap(params, v.x) : v.x, v.y, v.w == 0 ? remap(params, v.z) : v.z, v.w};
}

template <typename Element>
KGEN_DEVICE void remap_one(const Params& params, Global<Element> array, int i) {
  const Element slot = array.load(i);
  if (slot >= 0 && slot < params.slots) array.store(i, params.slot_map.load(slot));
}

KGEN_DEVICE int row_length(const Params& params, int row) {
  if (!((params.wide >> kLengths) & 1)) return params.lengths.load(row);
  const Global<const int64_t> wide{reinterpret_cast<const int64_t*>(params.lengths.pointer)};
  return static_cast<int>(wide.load(row));
}

KGEN_DEVICE bool differ(uint4v a, uint4v b) { return ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) != 0; }

// Part `part` of one array of `length` elements. All its loads, and all look-ups, are in flight at once; vectors of which
// nothing changes are not stored. Only where `whole_vectors` says that the array is aligned to 16 bytes are its vectors
// loaded whole.
template <typename Config, typename Element>
KGEN_DEVICE void remap_part(const Params& params, Global<Element> array, int length, int part, bool whole_vectors) {
  constexpr int kPerVector = 16 / sizeof(Element), kThreads = Config::kWarps * 32, kVectors = Config::kVectors;
  const int first = (part * kThreads * kVectors + thread_index()) * kPerVector;
  uint4v old[kVectors], found[kVectors];
  KGEN_UNROLL
  for (int k = 0; k < kVectors; k++) {
    const int i = first + k * kThreads * kPerVector;
    if (whole_vectors && i + kPerVector <= length) old[k] = array.template load_as<uint4v>(i);
  }
  KGEN_UNROLL
  for (int k = 0; k < kVectors; k++) {
    const int i = first + k * kThreads * kPerVector;
    if (whole_vectors && i + kPerVector <= length) found[k] = remap<sizeof(Element) == 8>(params, old[k]);
  }
  KGEN_UNROLL
  for (int k = 0; k < kVectors; k++) {
    const int i = first + k * kThreads * kPerVector;
    if (whole_vectors && i + kPerVector <= length) {
      if (differ(old[k], found[k])) array.template store_as<uint4v>(i, found[k]);
    } else {
      for (int at = i; at < i + kPerVector && at < length; at++) remap_one(params, array, at);
    }
  }
}

// Blocks along y have a request each; those from `list_row` on share the list.
template <typename Config>
KGEN_DEVICE void rewrite(const Params& params) {
  const int row = block_index_y();
  if (row < params.requests) {
    remap_part<Config>(params, params.req_to_token + row * params.row_stride, row_length(params, row), block_index_x(),
                       params.whole_vectors & 1);
  } else if (row >= params.list_row) {
    const int part = (row - params.list_row) * params.row_blocks + block_index_x();
    const bool whole = params.whole_vectors & 2;
    if ((params.wide >> kSlotList) & 1) {
      const Global<int64_t> wide{reinterpret_cast<int64_t*>(params.slot_list.pointer)};
      remap_part<Config>(params, wide, params.entries, part, whole);
    } else {
      remap_part<Config>(params, params.slot_list, params.entries, part, whole);
    }
  }
}

}  // namespace kgen::slot_remap
