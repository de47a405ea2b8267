// One call of matmul, and who makes it by the format of a.
#pragma once
#include <optional>

#include "result.cuh"

namespace coat::cuda {

enum class Form { nt, nn, tn };  // y = a b^T, a b, a^T b

struct Call {
  const char* name;
  Form form;
  Tensor a, b, bias, y, amax;  // no bias, no amax: no data
  bool into;                   // the product is added to what y holds
  int64_t M, N, K;             // M and N are at least 1
  Turned::Turn turn;
  bool promotes = true;  // FP8 sums leave the tensor cores every 128 of K

  Result result() const {
    const auto scale = [](const Tensor& x) {
      return x.format.scaling == Scaling::tensor ? x.scales<float>() : nullptr;
    };
    // rows of nothing have no scale
    const auto rows = [&](const Tensor& x) { return x.format.run == kWholeRow && K > 0 ? x.scales<float>() : nullptr; };
    const bool pairs = N % 2 == 0 && reinterpret_cast<uintptr_t>(y.data) % 8 == 0;
    const bool bias_bf16 = bias.format.dtype == DType::bf16;
    return {M, N, scale(a), scale(b), rows(a), rows(b), bias.data, bias_bf16, pairs, into, amax.as<uint32_t>()};
  }
};

void multiply_f32(const Call& call);
// bf16 by bf16, or by FP8 codes with a scale a tensor, which multiplies the sums.
void multiply_bf16(const Call& call);
// e4m3 and e5m2 with a scale a tensor, or a row, which multiplies the sums.
void multiply_e4m3(const Call& call);
void multiply_e5m2(const Call& call);
// The same with a scale a tensor whose sums stay in the tensor cores.
void multiply_unpromoted(const Call& call);
// e4m3 with a scale a run of 128 along K by e4m3 with a scale a block of 128 x 128, or a run too.
void multiply_runs_by_blocks(const Call& call);
void multiply_runs_by_runs(const Call& call);
// Returns whether products of this thread are to be made by cuBLASLt; then this one is.
bool multiply_by_cublaslt(const Call& call);

// The stored lines of an operand, which begin on 16-byte boundaries: x itself, or a copy in `room` with zeros between.
// Its codes have so many bytes: FP8 ones of two become those of bf16 with the same values.
struct Lines {
  const uint8_t* codes;
  int64_t lines, width, stride;  // in codes
};
Lines lines_of(const char* name, const Tensor& x, int64_t bytes, std::optional<Scratch>& room);

// y from the sums of `splits` parts of K, which lie side by side: row m of part s begins at (m splits + s) apart.
void add_splits(const Call& call, const float* parts, int splits, int64_t apart);

}  // namespace coat::cuda
