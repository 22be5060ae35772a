// What every kv_defrag kernel is given, and how a move is found.
#pragma once

#include <kgen/primitives.cuh>

namespace kgen::kv_defrag {

// Shapes and dtypes: kgen/families/kv_defrag.py, which packs these bytes.
struct Params {
  Global<const uint64_t> layer_ptrs;
  Global<const int32_t> src_slots;
  Global<const int32_t> dst_slots;
  Global<const int32_t> count;
  Global<uint8_t> staging;
  Global<int32_t> overlaps;
  int64_t row_stride;
  int32_t row_bytes;
  int32_t layers;
  int32_t slots;
  int32_t moves;
  int32_t wide_slots;
  int32_t slice_vectors;
  int32_t move_blocks;
  int32_t stage_blocks;
};

// Bits of Params::wide_slots.
enum SlotArray { kSrcSlots = 0, kDstSlots = 1 };

constexpr int kNothing = -1;

// One row's move, the same in every layer. `source` is kNothing where there is nothing to do.
struct Move {
  int source;
  int target;
};

// Slot `i` of a list, which is int32 or int64, or a negative number for what int32 does not hold. Without a branch, so
// that many of these loads are in flight at once: the upper half of an int64 is loaded beside the lower one.
template <SlotArray kArray>
KGEN_DEVICE int load_slot(const Params& params, Global<const int32_t> array, int i) {
  const int wide = (params.wide_slots >> kArray) & 1;
  const int64_t at = static_cast<int64_t>(i) << wide;
  const int low = array.load(at), high = array.load(at + wide);
  return wide && high != 0 ? kNothing : low;
}

// How many moves of the lists count; the lists may be longer than what a replayed graph has to do.
KGEN_DEVICE int move_count(const Params& params) {
  if (!params.count) return params.moves;
  const int count = params.count.load(0);
  return count < params.moves ? count : params.moves;
}

// Move `i`, i < params.moves. A row that stays, or a slot outside the pool, is nothing to do.
KGEN_DEVICE Move load_move(const Params& params, int i) {
  const int source = load_slot<kSrcSlots>(params, params.src_slots, i);
  const int target = load_slot<kDstSlots>(params, params.dst_slots, i);
  const bool inside = source >= 0 && source < params.slots && target >= 0 && target < params.slots;
  if (!inside || source == target) return {kNothing, kNothing};
  return {source, target};
}

KGEN_DEVICE Global<uint8_t> layer_base(const Params& params, int layer) {
  return {reinterpret_cast<uint8_t*>(params.layer_ptrs.load(layer))};
}

// Where the staging area keeps a move's row of one layer.
KGEN_DEVICE int64_t staged_row(const Params& params, int move, int layer) {
  return (static_cast<int64_t>(move) * params.layers + layer) * params.row_bytes;
}

}  // namespace kgen::kv_defrag
