// gelu on the device: the exact form, element by element.
#include "../ops.h"
#include "runs.cuh"

namespace coat::cuda {
namespace {

constexpr unsigned kThreads = 256;

// A thread takes 16 columns of a row at a time; Whole: N is a multiple of 16, else element by element. Moves x and y
// once; a /t scale that has to be measured reads x once more.
template <bool Whole, class X, class Y>
__global__ __launch_bounds__(kThreads) void gelu_forward_kernel(X x, Output<Y> y, int64_t M, int64_t N) {
  y.open();
  for (Walk at(M, runs_of(N)); at.more(); at.next()) {
    float v[kRun];
    load_run(x, at.row, N, at.run, Whole, v);
#pragma unroll
    for (int k = 0; k < kRun; ++k) v[k] = gelu(v[k]);
    put_run(y, at.row, N, at.run, Whole, v);
  }
  y.close();
}

// The same threads. Moves dy, x and dx once; measuring reads dy and x once more.
template <bool Whole, class DY, class X, class DX>
__global__ __launch_bounds__(kThreads) void gelu_backward_kernel(DY dy, X x, Output<DX> dx, int64_t M, int64_t N) {
  dx.open();
  for (Walk at(M, runs_of(N)); at.more(); at.next()) {
    float g[kRun], v[kRun];
    load_run(dy, at.row, N, at.run, Whole, g);
    load_run(x, at.row, N, at.run, Whole, v);
#pragma unroll
    for (int k = 0; k < kRun; ++k) g[k] *= gelu_derivative(v[k]);
    put_run(dx, at.row, N, at.run, Whole, g);
  }
  dx.close();
}

}  // namespace

void gelu_forward(const gelu_forward_args& args) {
  const int64_t M = args.y.shape.rows(), N = args.y.shape.cols();
  with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
    using X = std::remove_const_t<decltype(x)>;
    write("gelu_forward", args.y, args.scale, Views<F32, BF16, E4M3T, E4M3G16>{}, [&]<class Y>(const Output<Y>& y) {
      launch("gelu_forward", N % kRun == 0 ? gelu_forward_kernel<true, X, Y> : gelu_forward_kernel<false, X, Y>,
             dim3(blocks_for(M * runs_of(N), kThreads)), dim3(kThreads), 0, x, y, M, N);
    });
  });
}

void gelu_backward(const gelu_backward_args& args) {
  const int64_t M = args.dx.shape.rows(), N = args.dx.shape.cols();
  with("dy", args.dy, Views<F32, BF16>{}, [&](const auto dy) {
    with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
      using DY = std::remove_const_t<decltype(dy)>;
      using X = std::remove_const_t<decltype(x)>;
      write("gelu_backward", args.dx, {}, Views<F32, BF16, E5M2T>{}, [&]<class DX>(const Output<DX>& dx) {
        launch("gelu_backward",
               N % kRun == 0 ? gelu_backward_kernel<true, DY, X, DX> : gelu_backward_kernel<false, DY, X, DX>,
               dim3(blocks_for(M * runs_of(N), kThreads)), dim3(kThreads), 0, dy, x, dx, M, N);
      });
    });
  });
}

}  // namespace coat::cuda
