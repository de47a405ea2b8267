// rope: turns the pairs (i, i + D/2) of every query and key head by the angle of its position.
#include "../contract.h"
#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

void rope(const rope_args& args) {
  const int64_t rows = args.qkv.shape.rows(), cols = args.qkv.shape.cols(), T = args.table.shape.rows();
  const int64_t half = args.D / 2;
  check_rotation(args.D, args.direction);
  const float* table = args.table.as<float>();
  const int32_t* starts = args.starts.as<int32_t>();
  const float sign = static_cast<float>(args.direction);
  const Writer writer(args.qkv, {});
  parallel(rows, rows_of_chunk(cols), [&](int64_t begin, int64_t end) {
    std::vector<float> row(cols);
    for (int64_t m = begin; m < end; ++m) {
      read_row(args.qkv, m, row.data());
      const float *cosine = table + rope_position(m % T, starts ? starts[m] : 0, T) * args.D, *sine = cosine + half;
      for (int64_t head = 0; head < args.H + args.J; ++head) {
        float *first = row.data() + head * args.D, *second = first + half;
        for (int64_t i = 0; i < half; ++i) {
          const float a = first[i], b = second[i], s = sine[i] * sign;
          first[i] = fma_(a, cosine[i], -(b * s));
          second[i] = fma_(b, cosine[i], a * s);
        }
      }
      writer.write(m * cols, (m + 1) * cols, row.data());
    }
  });
}

}  // namespace coat::cpu
