// Deals a batch to the blocks of a grid, on the device, from the lengths of the moment: an item is one tile of query
// rows x one split of the keys of one request. Splits have about one length in the whole batch, which is chosen so that
// the blocks end together. A block finds its item itself, or loads it from a schedule that one launch made for the many
// calls with the same lengths.
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

// What a block does: the rows of `request` from `tile_row` on, against its key tiles [first_tile, first_tile + tiles).
struct Item {
  Request request;
  int tile_row;
  int first_tile;
  int tiles;
  int splits;     // of the request's keys; 0: there is nothing to do
  int row_tiles;  // of the request
};

// Of numbers that are not negative.
KGEN_DEVICE int divide(int a, int b) { return static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b)); }
KGEN_DEVICE int ceil_divide(int a, int b) {
  return static_cast<int>((static_cast<uint32_t>(a) + b - 1) / static_cast<uint32_t>(b));
}

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

// Sums over a batch, of row tiles and of row tiles x key tiles, and the most key tiles of a request.
struct Load {
  int row_tiles;
  int tiles;
  int longest;
};

// The most key tiles that a split has, and how many items the requests make that have more than one.
struct Cut {
  int length;
  int split_items;
};

// The length with which the last block ends first. The grid's blocks start in the order of their numbers, one as soon as
// another of `work_slots` ends, and take an item's key tiles and `item_overhead_tiles` more. All have ended after as many
// rounds of the longest item as there are items for a slot; and also after their mean share and one item (R. L. Graham,
// Bounds on multiprocessing timing anomalies, 1969). Every lane tries one length. The shortest makes no more items than
// the grid has blocks: sum of row_tiles * ceil(key_tiles / length) <= tiles / length + row_tiles.
template <typename Config>
KGEN_DEVICE Cut choose_cut(const Params& params, const Load& load, const Work& first_work) {
  const int lane = thread_index() % 32, slots = params.work_slots, share = ceil_divide(load.tiles, slots);
  const int room = slots + Config::kSplitRoom * least(load.row_tiles, slots);
  const int shortest = most(ceil_divide(load.tiles, room), params.min_split_tiles);
  const int longest = most(load.longest / 2 < share ? load.longest : 2 * share, shortest);
  int length = longest - static_cast<int>(static_cast<uint32_t>(longest - shortest) * lane / 31);
  length = most(ceil_divide(load.longest, most(ceil_divide(load.longest, length), 1)), shortest);

  int items = 0, split_items = 0;
  KGEN_UNROLL_BY(1)
  for (int first = 0; first < params.batch; first += 32) {
    const Work work = first == 0 ? first_work : request_work<Config>(params, first + lane);
    KGEN_UNROLL_BY(1)
    for (int i = 0; i < 32 && first + i < params.batch; i++) {
      const int row_tiles = shuffle(work.row_tiles, i), key_tiles = shuffle(work.key_tiles, i);
      const int more = row_tiles * ceil_divide(key_tiles, length);
      items += more;
      if (key_tiles > length) split_items += more;
    }
  }
  const int rounds = ceil_divide(items, slots), item = length + params.item_overhead_tiles;
  const int end = least(rounds * item, share + rounds * params.item_overhead_tiles + item);
  const int best = lowest_lane(warp_ballot(end == lanes_least<32>(end)));
  return {shuffle(length, best), shuffle(split_items, best)};
}

// No split is longer than `length`, and none is empty.
KGEN_DEVICE void divide_keys(Work& work, int length) {
  if (work.row_tiles == 0) return;
  work.splits = ceil_divide(work.key_tiles, length);
  work.share = divide(work.key_tiles, work.splits);
  work.longer = work.key_tiles - work.share * work.splits;
}

// The request that holds item `target`; `splits` is 0 if none does. Items of requests with more than one split come first:
// only these leave partial results, and they are the longer ones. All lanes of a warp ask for the same. One request needs
// no search.
template <typename Config>
KGEN_DEVICE Work find_work(const Params& params, int target) {
  const int lane = thread_index() % 32;
  Work work = request_work<Config>(params, params.batch == 1 ? 0 : lane);
  Load load{work.row_tiles, work.row_tiles * work.key_tiles, work.key_tiles};
  if (params.batch > 1) {
    const Work first_work = work;
    KGEN_UNROLL_BY(1)
    for (int first = 32; first < params.batch; first += 32) {
      work = request_work<Config>(params, first + lane);
      load.row_tiles += work.row_tiles;
      load.tiles += work.row_tiles * work.key_tiles;
      load.longest = most(load.longest, work.key_tiles);
    }
    load = {warp_sum(load.row_tiles), warp_sum(load.tiles), lanes_most<32>(load.longest)};
    work = first_work;
  }
  load = {warp_uniform(load.row_tiles), warp_uniform(load.tiles), warp_uniform(load.longest)};
  const Cut cut = choose_cut<Config>(params, load, work);
  if (params.batch == 1) {
    divide_keys(work, cut.length);
    if (target >= work.row_tiles * work.splits) work.splits = 0;
    return work;
  }
  const bool is_split = target < cut.split_items;
  int items = is_split ? 0 : cut.split_items;
  KGEN_UNROLL_BY(1)
  for (int first = 0; first < params.batch; first += 32) {
    if (first > 0) work = request_work<Config>(params, first + lane);
    divide_keys(work, cut.length);
    const int mine = (work.splits > 1) == is_split ? work.row_tiles * work.splits : 0;
    const int end = items + lanes_running_sum(mine);
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

// Item `index`, from the lengths that are on the device.
template <typename Config>
KGEN_DEVICE Item find_item(const Params& params, int index) {
  const Work work = find_work<Config>(params, index);
  if (work.splits == 0) return Item{};
  const int place = index - work.first_item, split = divide(place, work.row_tiles), first = work.first_tile(split);
  return {work.request, (place - split * work.row_tiles) * Config::kTileM, first, work.first_tile(split + 1) - first,
          work.splits, work.row_tiles};
}

// An item takes 9 of its kScheduleWords in Params::schedule.
template <typename Config>
KGEN_DEVICE void store_item(Global<uint32_t> schedule, int index, const Item& item) {
  const Global<uint32_t> words = schedule + static_cast<int64_t>(index) * Config::kScheduleWords;
  const auto word = [](int value) { return static_cast<uint32_t>(value); };
  const Request& request = item.request;
  words.template store_as<uint4v>(
      0, {word(request.first_node), word(request.nodes), word(request.first_key), word(request.prefix)});
  words.template store_as<uint4v>(4, {word(item.tile_row), word(item.first_tile), word(item.tiles), word(item.splits)});
  words.template store_as<uint4v>(8, {word(item.row_tiles), 0, 0, 0});
}

template <typename Config>
KGEN_DEVICE Item load_item(Global<uint32_t> schedule, int index) {
  const Global<uint32_t> words = schedule + static_cast<int64_t>(index) * Config::kScheduleWords;
  const uint4v a = words.template load_as<uint4v>(0), b = words.template load_as<uint4v>(4);
  const uint4v c = words.template load_as<uint4v>(8);
  const auto word = [](uint32_t value) { return static_cast<int>(value); };
  return {{word(a.x), word(a.y), word(a.z), word(a.w)}, word(b.x), word(b.y), word(b.z), word(b.w), word(c.x)};
}

KGEN_DEVICE Item uniform_item(const Item& item) {
  return {{warp_uniform(item.request.first_node), warp_uniform(item.request.nodes),
           warp_uniform(item.request.first_key), warp_uniform(item.request.prefix)},
          warp_uniform(item.tile_row), warp_uniform(item.first_tile), warp_uniform(item.tiles),
          warp_uniform(item.splits), warp_uniform(item.row_tiles)};
}

// This block's item: as a schedule has it, or else found.
template <typename Config>
KGEN_DEVICE Item own_item(const Params& params) {
  const int index = block_index_x();
  return uniform_item(params.schedule ? load_item<Config>(params.schedule, index) : find_item<Config>(params, index));
}

// Fills Params::schedule, a warp an item, for calls with the same lengths to load. Items that nobody has are written
// too: an earlier batch may have had them.
template <typename Config>
KGEN_DEVICE void make_schedule(const Params& params) {
  const int index = block_index_x() * Config::kScheduleWarps + thread_index() / 32;
  const Item item = find_item<Config>(params, index);
  if (thread_index() % 32 == 0) store_item<Config>(params.schedule, index, item);
}

}  // namespace kgen::verify_mla
