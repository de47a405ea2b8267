// emulate: numbers of few bits held as f32, sums of them and updates, rounded after each operation.
#include "../emulate.h"

#include "../ops.h"
#include "rows.h"

namespace coat::cpu {

void round_to(const round_to_args& args) {
  const Arithmetic arithmetic(args);
  const float* x = args.x.as<float>();
  float* y = args.y.as<float>();
  parallel(args.x.shape.numel(), kChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      y[i] =
          copysign_(static_cast<float>(arithmetic.round_at(static_cast<double>(x[i]), static_cast<uint64_t>(i))), x[i]);
  });
}

// A task makes kWide columns of y from as many rows of b, turned so that neighbours lie next to each other.
void matmul_emulated(const matmul_emulated_args& args) {
  constexpr int kWide = 16;
  const Arithmetic arithmetic(args);
  check_chunk(args.chunk);
  const int64_t M = args.a.shape.rows(), K = args.a.shape.cols(), N = args.b.shape.rows();
  const float *a = args.a.as<float>(), *b = args.b.as<float>(), *bias = args.bias ? args.bias.as<float>() : nullptr;
  float* y = args.y.as<float>();
  parallel(N, kWide, [&](int64_t begin, int64_t end) {
    std::vector<float> turned(K * kWide);
    float added[kWide] = {};
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t k = 0; k < K; ++k) turned[k * kWide + n - begin] = b[n * K + k];
      added[n - begin] = bias ? bias[n] : 0.f;
    }
    for (int64_t m = 0; m < M; ++m) {
      float row[kWide];
      emulated_sums(arithmetic, a + m * K, turned.data(), kWide, K, args.chunk, added,
                    static_cast<uint64_t>(m * N + begin), row);
      std::copy(row, row + (end - begin), y + m * N + begin);
    }
  });
}

void sgd_emulated(const sgd_emulated_args& args) {
  const EmulatedSgd rule(args);
  const float* clip = args.clip ? args.clip.as<float>() : nullptr;
  if (clip && clip[1] != 0.f) return;
  const float factor = clip ? clip[0] : 1.f;
  for (size_t member = 0; member < args.p.size(); ++member) {
    const float* g = args.g[member].as<float>();
    float *p = args.p[member].as<float>(), *m = args.m[member].as<float>();
    parallel(args.p[member].shape.numel(), kChunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) rule.update(p[i], m[i], g[i], factor, static_cast<int64_t>(member), i);
    });
  }
}

}  // namespace coat::cpu
