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
  Global<uint32_t> moving;
  int64_t row_stride;
  int32_t requests;
  int32_t context;
  int32_t slots;
  int32_t entries;
  int32_t wide;
  int32_t whole_vectors;
  int32_t row_parts;
  int32_t list_row;
  int32_t parts;
  int32_t blocks;
  int32_t mark_blocks;
};

enum WideArray { kLengths = 0, kSlotList = 1 };  // bits of Params::wide

template <typename Element>
KGEN_DEVICE void remap_one(const Params& params, Global<Element> array, int i) {
  const Element slot = array.load(i);
  if (slot >= 0 && slot < params.slots) array.store(i, params.slot_map.load(slot));
}

// No more than a row has, whatever the length says.
KGEN_DEVICE int row_length(const Params& params, int row) {
  const Global<const int64_t> wide{reinterpret_cast<const int64_t*>(params.lengths.pointer)};
  const int64_t length = (params.wide >> kLengths) & 1 ? wide.load(row) : params.lengths.load(row);
  return static_cast<int>(length < params.context ? length > 0 ? length : 0 : params.context);
}

// Which slots may move, in shared memory: a bit for every 2^shift neighbours, so that `kBytes` do for any map. Without
// bytes, all may.
template <int kBytes>
struct Filter {
  Shared<uint32_t> bits;
  int shift;

  static constexpr int kBits = kBytes * 8;
  KGEN_DEVICE static int shift_of(int slots) {
    int shift = 0;
    while (((slots - 1) >> shift) >= kBits) shift++;
    return shift;
  }
  KGEN_DEVICE static int words(int slots) { return ((slots - 1) >> shift_of(slots)) / 32 + 1; }

  KGEN_DEVICE bool may_move(uint32_t slot) const {
    if (kBytes == 0) return true;
    const uint32_t bit = slot >> shift;
    return (bits.load(static_cast<int>(bit / 32)) >> (bit % 32)) & 1;
  }
  // The new number of a slot; what is no slot stays (-1, say).
  KGEN_DEVICE uint32_t remap(const Params& params, uint32_t slot) const {
    const bool looks_up = slot < static_cast<uint32_t>(params.slots) && may_move(slot);
    return looks_up ? static_cast<uint32_t>(params.slot_map.load(slot)) : slot;
  }
  // Four int32, or two int64 whose upper halves must be 0 for a slot.
  KGEN_DEVICE uint4v remap(const Params& params, const uint4v& v, bool wide) const {
    if (!wide) return {remap(params, v.x), remap(params, v.y), remap(params, v.z), remap(params, v.w)};
    return {v.y == 0 ? remap(params, v.x) : v.x, v.y, v.w == 0 ? remap(params, v.z) : v.z, v.w};
  }
};

// What a block rewrites at once: its threads' vectors of 16 bytes from one array.
struct Part {
  Global<int32_t> array;
  int length;  // of the array, in elements
  int first;   // element of this thread's first vector
  bool wide;   // elements are int64
  bool whole;  // the array is aligned to 16 bytes, so that its vectors may be loaded whole

  KGEN_DEVICE int per_vector() const { return wide ? 2 : 4; }
  KGEN_DEVICE bool has_vector(int i) const { return whole && i + per_vector() <= length; }
  KGEN_DEVICE int64_t word(int i) const { return static_cast<int64_t>(i) << wide; }
};

// Rows from `list_row` on are the list's.
template <typename Config>
KGEN_DEVICE Part find_part(const Params& params, int row, int column) {
  constexpr int kBlockVectors = Config::kWarps * 32 * Config::kVectors;
  Part part{params.req_to_token, 0, 0, false, (params.whole_vectors & 1) != 0};
  if (row < params.requests) {
    part.array = params.req_to_token + row * params.row_stride;
    part.length = row_length(params, row);
  } else if (row >= params.list_row) {
    column += (row - params.list_row) * params.row_parts;
    part = {params.slot_list, params.entries, 0, ((params.wide >> kSlotList) & 1) != 0, (params.whole_vectors & 2) != 0};
  }
  part.first = (column * kBlockVectors + thread_index()) * part.per_vector();
  return part;
}

template <typename Config>
KGEN_DEVICE void load_part(const Part& part, uint4v (&values)[Config::kVectors]) {
  KGEN_UNROLL
  for (int k = 0; k < Config::kVectors; k++) {
    const int i = part.first + k * Config::kWarps * 32 * part.per_vector();
    if (part.has_vector(i)) values[k] = part.array.template load_as<uint4v>(part.word(i));
  }
}

KGEN_DEVICE bool differ(uint4v a, uint4v b) { return ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) != 0; }

// All look-ups of a thread are in flight at once; vectors of which nothing changes are not stored.
template <typename Config, typename SlotFilter>
KGEN_DEVICE void remap_part(const Params& params, const SlotFilter& filter, const Part& part,
                            const uint4v (&values)[Config::kVectors]) {
  uint4v found[Config::kVectors];
  KGEN_UNROLL
  for (int k = 0; k < Config::kVectors; k++) {
    const int i = part.first + k * Config::kWarps * 32 * part.per_vector();
    if (part.has_vector(i)) found[k] = filter.remap(params, values[k], part.wide);
  }
  KGEN_UNROLL
  for (int k = 0; k < Config::kVectors; k++) {
    const int i = part.first + k * Config::kWarps * 32 * part.per_vector();
    if (part.has_vector(i)) {
      if (differ(values[k], found[k])) part.array.template store_as<uint4v>(part.word(i), found[k]);
      continue;
    }
    for (int at = i; at < i + part.per_vector() && at < part.length; at++) {
      if (part.wide) {
        remap_one(params, Global<int64_t>{reinterpret_cast<int64_t*>(part.array.pointer)}, at);
      } else {
        remap_one(params, part.array, at);
      }
    }
  }
}

// A block for every part: blocks along y have a request each, or share the list.
template <typename Config>
KGEN_DEVICE void rewrite(const Params& params) {
  uint4v values[Config::kVectors];
  const Part part = find_part<Config>(params, block_index_y(), block_index_x());
  load_part<Config>(part, values);
  remap_part<Config>(params, Filter<0>{}, part, values);
}

// Which slots may move, for the blocks below: a bit a lane. Words are written by fours, as they are copied.
template <typename Config>
KGEN_DEVICE void mark(const Params& params) {
  constexpr int kWords = 4;  // of a warp at a time, whose loads are in flight together
  using Bits = Filter<Config::kFilterBytes>;
  const int lane = thread_index() % 32, shift = Bits::shift_of(params.slots), words = Bits::words(params.slots);
  const int warp = (block_index_x() * Config::kMarkThreads + thread_index()) / 32;
  for (int first = warp * kWords; first < words; first += params.mark_blocks * (Config::kMarkThreads / 32) * kWords) {
    bool moves[kWords] = {};
    for (int neighbour = 0; neighbour < 1 << shift; neighbour++) {
      KGEN_UNROLL
      for (int k = 0; k < kWords; k++) {
        const int slot = (((first + k) * 32 + lane) << shift) + neighbour;
        if (slot < params.slots) moves[k] |= params.slot_map.load(slot) != slot;
      }
    }
    KGEN_UNROLL
    for (int k = 0; k < kWords; k++) {
      const uint32_t word = warp_ballot(moves[k]);
      if (lane == 0) params.moving.store(first + k, word);
    }
  }
}

// Resident blocks, every one with the filter, that loop over the parts: where few slots move, look-ups of the others do
// not leave the SM. The next part is on its way while one is looked up.
template <typename Config>
KGEN_DEVICE void rewrite_moving(const Params& params) {
  using Bits = Filter<Config::kFilterBytes>;
  static_assert(Config::kFilterBytes + 8 == Config::kSharedBytes, "the family and the kernel disagree");
  const Bits filter{shared_array<uint32_t>(0, Config::kFilterBytes / 4), Bits::shift_of(params.slots)};
  const auto find = [&](int part) {  // those after the last are beyond the list
    const int row = part / params.row_parts;
    return find_part<Config>(params, row, part - row * params.row_parts);
  };
  const uint32_t filled = shared_array<uint64_t>(Config::kFilterBytes, 1).address();
  if (thread_index() == 0) {
    const int bytes = (Bits::words(params.slots) + 3) / 4 * 16;
    mbarrier_init(filled, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(filled, bytes);
    bulk_copy(filter.bits.address(), params.moving, bytes, filled);
  }
  uint4v values[Config::kVectors], next[Config::kVectors];
  Part part = find(block_index_x());
  load_part<Config>(part, values);
  block_sync();
  mbarrier_wait(filled, 0);
  for (int index = block_index_x(); index < params.parts; index += params.blocks) {
    const Part following = find(index + params.blocks);
    load_part<Config>(following, next);
    remap_part<Config>(params, filter, part, values);
    part = following;
    KGEN_UNROLL
    for (int k = 0; k < Config::kVectors; k++) values[k] = next[k];
  }
}

}  // namespace kgen::slot_remap
