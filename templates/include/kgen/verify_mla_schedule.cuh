// Deals a batch to the blocks of a grid, on the device, from the lengths of the moment: an item is one tile of query
// rows x one split of the keys of one request. Long requests get more splits, so that all items take as long.
#pragma once

#include <kgen/reductions.cuh>
#include <kgen/verify_mla_problem.cuh>

namespace kgen::verify_mla {

// The items of one request: [first_item, first_item + row_tiles * splits), row tiles fastest, so that blocks that read
// the same KV rows run together.
struct Work {
  Request request;
  int first_item;
  int row_tiles;
  int key_tiles;
  int splits;
  int share;  // key tiles that every split has; the first `longer` splits have one more
  int longer;

  KGEN_DEVICE int first_tile(int split) const { return split * share + (split < longer ? split : longer); }
};

KGEN_DEVICE Work uniform_work(const Work& work) {
  return {{warp_uniform(work.request.first_node), warp_uniform(work.request.nodes),
           warp_uniform(work.request.first_key), warp_uniform(work.request.prefix)},
          warp_uniform(work.first_item), warp_uniform(work.row_tiles), warp_uniform(work.key_tiles),
          warp_uniform(work.splits), warp_uniform(work.share), warp_uniform(work.longer)};
}

// Of numbers that are not negative.
KGEN_DEVICE int divide(int a, int b) { return static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b)); }
KGEN_DEVICE int ceil_divide(int a, int b) { return divide(a + b - 1, b); }

template <typename Config>
KGEN_DEVICE Work request_work(const Params& params, int index) {
  Work work;
  work.request = load_request(params, index);
  work.first_item = 0;
  work.row_tiles = ceil_divide(work.request.nodes * params.heads, Config::kTileM);
  work.key_tiles = work.row_tiles == 0 ? 0 : ceil_divide(work.request.keys(), Config::kTileN);
  work.splits = work.share = work.longer = 0;
  return work;
}

// The least length of a split with which all items fit `work_slots` blocks:
// sum of row_tiles * ceil(key_tiles / length) <= sum of row_tiles * (key_tiles / length + 1) <= work_slots.
KGEN_DEVICE int split_length(const Params& params, int row_tiles, int tiles) {
  const int room = params.work_slots - row_tiles;
  if (room <= 0) return tiles > 0 ? tiles : 1;
  const int length = ceil_divide(tiles, room);
  return length > params.min_split_tiles ? length : params.min_split_tiles;
}

// No split is longer than `length`, and none is empty.
KGEN_DEVICE void divide_keys(Work& work, int length) {
  if (work.row_tiles == 0) return;
  work.splits = ceil_divide(work.key_tiles, length);
  work.share = divide(work.key_tiles, work.splits);
  work.longer = work.key_tiles - work.share * work.splits;
}

// The request that holds item `target`; `splits` is 0 if none does. All lanes of a warp ask for the same. One request
// needs no search.
template <typename Config>
KGEN_DEVICE Work find_work(const Params& params, int target) {
  const int lane = thread_index() % 32;
  Work work = request_work<Config>(params, params.batch == 1 ? 0 : lane);
  if (params.batch == 1) {
    divide_keys(work, split_length(params, work.row_tiles, work.row_tiles * work.key_tiles));
    if (target >= work.row_tiles * work.splits) work.splits = 0;
    return work;
  }
  int row_tiles = work.row_tiles, tiles = work.row_tiles * work.key_tiles;
  KGEN_UNROLL_BY(1)
  for (int first = 32; first < params.batch; first += 32) {
    const Work more = request_work<Config>(params, first + lane);
    row_tiles += more.row_tiles;
    tiles += more.row_tiles * more.key_tiles;
  }
  const int length = split_length(params, warp_sum(row_tiles), warp_sum(tiles));
  int items = 0;
  KGEN_UNROLL_BY(1)
  for (int first = 0; first < params.batch; first += 32) {
    if (first > 0) work = request_work<Config>(params, first + lane);
    divide_keys(work, length);
    const int mine = work.row_tiles * work.splits, end = items + lanes_running_sum(mine);
    const uint32_t after = warp_ballot(end > target);
    if (after != 0) {
      const int owner = lowest_lane(after);
      work.first_item = shuffle(end - mine, owner);
      work.request.first_node = shuffle(work.request.first_node, owner);
      work.request.nodes = shuffle(work.request.nodes, owner);
      work.request.first_key = shuffle(work.request.first_key, owner);
      work.request.prefix = shuffle(work.request.prefix, owner);
      work.row_tiles = shuffle(work.row_tiles, owner);
      work.key_tiles = shuffle(work.key_tiles, owner);
      work.splits = shuffle(work.splits, owner);
      work.share = shuffle(work.share, owner);
      work.longer = shuffle(work.longer, owner);
      return work;
    }
    items = shuffle(end, 31);
  }
  return Work{};
}

}  // namespace kgen::verify_mla
