// rope: turns the pairs (i, i + D/2) of every query and key head by the angle of its position.
#include "../contract.h"
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

void rope(const rope_args& args) {
  const int64_t rows = args.qkv.shape.rows(), cols = args.qkv.shape.cols();
  check_rotation(args.D, args.direction);
  const HeadTurn turn(args, static_cast<float>(args.direction));
  const Writer writer(args.qkv, {});
  parallel(rows, rows_of_chunk(cols), [&](int64_t begin, int64_t end) {
    std::vector<float> row(cols);
    for (int64_t m = begin; m < end; ++m) {
      read_row(args.qkv, m, row.data());
      turn(row.data(), m);
      writer.write(m * cols, (m + 1) * cols, row.data());
    }
  });
}

}  // namespace coat::cpu
