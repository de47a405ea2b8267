// swiglu on the device: silu(gate) * up on the two halves of a row.
#include "../ops.h"
#include "runs.cuh"

namespace coat::cuda {
namespace {

constexpr unsigned kThreads = 256;

// 16 columns of half 0, the gates, or 1, the ups, of x: those of run at.run of y.
template <bool Whole, class X>
__device__ inline void load_half(const X& x, const Walk& at, int64_t F, int half, float (&out)[kRun]) {
  if (Whole)
    load_run(x, at.row, 2 * F, half * at.runs + at.run, true, out);
  else
    load_some(x, at.row, 2 * F, half * F + at.run * kRun, length_of(F, at.run), out);
}

// A thread takes 16 columns of y at a time: 16 gates and the 16 ups F columns behind. Whole: F is a multiple of 16, so
// that runs are full and none crosses from gate to up; else element by element. Moves x and y once; a /t scale that has
// to be measured reads x once more.
template <bool Whole, class X, class Y>
__global__ __launch_bounds__(kThreads, 2) void swiglu_forward_kernel(X x, Output<Y> y, int64_t M, int64_t F) {
  y.open();
  for (Walk at(M, runs_of(F)); at.more(); at.next()) {
    float gate[kRun], up[kRun];
    load_half<Whole>(x, at, F, 0, gate);
    load_half<Whole>(x, at, F, 1, up);
#pragma unroll
    for (int k = 0; k < kRun; ++k) gate[k] = swiglu(gate[k], up[k]);
    put_run(y, at.row, F, at.run, Whole, gate);
  }
  y.close();
}

// The same threads; dx has no runs, so its halves may lie anywhere. Moves dy, x and dx once; measuring reads dy and x
// once more.
template <bool Whole, class DY, class X, class DX>
__global__ __launch_bounds__(kThreads, 2) void swiglu_backward_kernel(DY dy, X x, Output<DX> dx, int64_t M, int64_t F) {
  dx.open();
  for (Walk at(M, runs_of(F)); at.more(); at.next()) {
    float g[kRun], gate[kRun], up[kRun];
    load_run(dy, at.row, F, at.run, Whole, g);
    load_half<Whole>(x, at, F, 0, gate);
    load_half<Whole>(x, at, F, 1, up);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      float dgate, dup;
      swiglu_gradient(gate[k], up[k], g[k], dgate, dup);
      gate[k] = dgate;
      up[k] = dup;
    }
    const int64_t i = at.row * 2 * F + at.run * kRun;
    if (Whole) {
      dx.put(i, 0, gate);
      dx.put(i + F, 0, up);
    } else {
      const int count = length_of(F, at.run);
      dx.put_some(i, 0, gate, count);
      dx.put_some(i + F, 0, up, count);
    }
  }
  dx.close();
}

}  // namespace

void swiglu_forward(const swiglu_forward_args& args) {
  const int64_t M = args.y.shape.rows(), F = args.y.shape.cols();
  with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
    using X = std::remove_const_t<decltype(x)>;
    write("swiglu_forward", args.y, args.scale, Views<F32, BF16, E4M3T, E4M3G16>{}, [&]<class Y>(const Output<Y>& y) {
      launch("swiglu_forward", F % kRun == 0 ? swiglu_forward_kernel<true, X, Y> : swiglu_forward_kernel<false, X, Y>,
             dim3(blocks_for(M * runs_of(F), kThreads)), dim3(kThreads), 0, x, y, M, F);
    });
  });
}

void swiglu_backward(const swiglu_backward_args& args) {
  const int64_t M = args.dy.shape.rows(), F = args.dy.shape.cols();
  with("dy", args.dy, Views<F32, BF16>{}, [&](const auto dy) {
    with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
      using DY = std::remove_const_t<decltype(dy)>;
      using X = std::remove_const_t<decltype(x)>;
      write("swiglu_backward", args.dx, {}, Views<F32, BF16, E5M2T>{}, [&]<class DX>(const Output<DX>& dx) {
        launch("swiglu_backward",
               F % kRun == 0 ? swiglu_backward_kernel<true, DY, X, DX> : swiglu_backward_kernel<false, DY, X, DX>,
               dim3(blocks_for(M * runs_of(F), kThreads)), dim3(kThreads), 0, dy, x, dx, M, F);
      });
    });
  });
}

}  // namespace coat::cuda
