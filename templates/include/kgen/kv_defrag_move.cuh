// Moves whose sources nobody overwrites, or whose overlapping sources were staged: no order among them matters.
#pragma once

#include <kgen/kv_defrag_problem.cuh>

namespace kgen::kv_defrag {

// `kRows` moves in `kLayers` layers, one warp's work.
template <typename Config>
struct Task {
  int first_move;
  int first_layer;
  int last_layer;
};

// Tasks of neighbouring warps are neighbouring moves of one layer, so that sorted destinations are written in order.
template <typename Config>
KGEN_DEVICE Task<Config> task_at(const Params& params, int groups, int task) {
  const int chunk = task / groups, first = chunk * Config::kLayers;
  const int last = first + Config::kLayers < params.layers ? first + Config::kLayers : params.layers;
  return {(task - chunk * groups) * Config::kRows, first, last};
}

// Lane l's move of a task, l < kRows. A source of -2 - i is row i of the staging area.
template <typename Config>
KGEN_DEVICE Move lane_move(const Params& params, int first_move, int count) {
  const int lane = thread_index() % 32, index = first_move + lane;
  if (lane >= Config::kRows || index >= count) return {kNothing, kNothing};
  Move move = load_move(params, index);
  if (params.stage_blocks > 0 && move.source != kNothing && params.overlaps.load(index)) move.source = -2 - index;
  return move;
}

KGEN_DEVICE Global<uint8_t> source_row(const Params& params, Global<uint8_t> base, int source, int layer) {
  return source >= 0 ? base + source * params.row_stride : params.staging + staged_row(params, -2 - source, layer);
}

// Through registers: the rows of a task are one run of vectors, of which a lane has `kVectors` in flight.
template <typename Config>
KGEN_DEVICE void move_direct(const Params& params) {
  using Vector = typename Config::Vector;
  constexpr int kVectorBytes = sizeof(Vector), kVectors = Config::kVectors;
  const int lane = thread_index() % 32, row_vectors = params.row_bytes / kVectorBytes;
  const int count = move_count(params), groups = ceil_div(count, Config::kRows);
  const int tasks = groups * ceil_div(params.layers, Config::kLayers), warps = params.blocks * Config::kWarps;
  const int run = Config::kRows * row_vectors;
  const int first = block_index_x() * Config::kWarps + thread_index() / 32;
  Move next = groups > 0 ? lane_move<Config>(params, task_at<Config>(params, groups, first).first_move, count) : Move{};
  for (int number = first; number < tasks; number += warps) {
    const Task<Config> task = task_at<Config>(params, groups, number);
    const Move mine = next;  // its slots were loaded while the rows of the task before were on their way
    next = lane_move<Config>(params, task_at<Config>(params, groups, number + warps).first_move, count);
    for (int start = 0; start < run; start += kVectors * 32) {
      int sources[kVectors], targets[kVectors], columns[kVectors];
      KGEN_UNROLL
      for (int k = 0; k < kVectors; k++) {
        const int place = start + k * 32 + lane, row = place / row_vectors;
        columns[k] = (place - row * row_vectors) * kVectorBytes;
        sources[k] = shuffle(mine.source, row % Config::kRows);
        targets[k] = shuffle(mine.target, row % Config::kRows);
        if (place >= run) targets[k] = kNothing;
      }
      for (int layer = task.first_layer; layer < task.last_layer; layer++) {
        const Global<uint8_t> base = layer_base(params, layer);
        Vector values[kVectors];
        KGEN_UNROLL
        for (int k = 0; k < kVectors; k++) {
          if (targets[k] != kNothing) {
            values[k] = source_row(params, base, sources[k], layer).template load_as<Vector>(columns[k]);
          }
        }
        KGEN_UNROLL
        for (int k = 0; k < kVectors; k++) {
          if (targets[k] != kNothing) {
            base.template store_as<Vector>(targets[k] * params.row_stride + columns[k], values[k]);
          }
        }
      }
    }
  }
}

}  // namespace kgen::kv_defrag
