// The naive kernel: a warp a request, one element a lane at a time; the list after the last request.
#pragma once

#include <kgen/slot_remap.cuh>

namespace kgen::slot_remap {

KGEN_DEVICE void oracle(const Params& params) {
  const int row = block_index_y();
  if (row < params.requests) {
    for (int i = thread_index(); i < row_length(params, row); i += 32) {
      remap_one(params, params.req_to_token + row * params.row_stride, i);
    }
  } else if (row == params.list_row) {
    const Global<int64_t> wide{reinterpret_cast<int64_t*>(params.slot_list.pointer)};
    for (int i = thread_index(); i < params.entries; i += 32) {
      if ((params.wide >> kSlotList) & 1) {
        remap_one(params, wide, i);
      } else {
        remap_one(params, params.slot_list, i);
      }
    }
  }
}

}  // namespace kgen::slot_remap
