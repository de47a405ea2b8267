// gelu on the device: the exact form, element by element.
#include "../ops.h"
#include "near.cuh"

namespace coat::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr float kLowest = -12.f, kLargest = 0x1p100f;       // within them nothing overflows or flushes
constexpr float kMostBelow = 0.1701f, kSteepest = 1.4142f;  // largest |gelu(x)| for x < 0; where gelu' is largest
constexpr float kMostSlope = 1.13f;                         // … and above that

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

// The same for `runs` whole runs, nearly first; the codes of the next one are fetched before this one is computed.
template <class X, class Y>
__global__ __launch_bounds__(kThreads, sizeof(CodeOf<X>) == 1 ? 3 : 2) void gelu_forward_kernel_near(X x, Output<Y> y,
                                                                                                     int64_t runs) {
  y.open();
  const float inverse = y.inverse();
  Pack<X, kRun> next;
  Walk at(1, runs);
  if (at.more()) next.fetch(x, at.run * kRun, at.run);
  while (__any_sync(0xffffffffu, at.more())) {
    const int64_t run = at.run;
    const bool here = at.more();
    float v[kRun];
    next.unpack(x, v);
    const float reach = reach_of(next, v);
    bool certain = is_near_scale(inverse) && reach < kLargest && lowest_of(reach, kLowest, v) > kLowest;
    at.next();
    if (at.more()) next.fetch(x, at.run * kRun, at.run);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      v[k] = copysign_(fma_(-abs_(v[k]), normal_tail<Near>(v[k]), fmaxf(v[k], 0.f)), v[k]);
    }
    if (here) {
      Pack<Y, kRun> pack;
      certain = encode_near(pack, v, 2.f * kNearError, inverse) && certain;
      if (certain) y.put_codes(run * kRun, pack);
    }
    do_together(here && !certain, 0, run, [&](int64_t, int64_t i) { y.put_one(i, gelu(load_one(x, i, i / kRun))); });
  }
  y.close();
}

template <class X>
__global__ __launch_bounds__(kSearchThreads) void gelu_forward_kernel_search(X x, uint32_t* max, int64_t runs) {
  find_largest(
      max, 1, runs,
      [&](int64_t, int64_t run, float known) {
        const float reach = fmaxf(reach_of(x, run * kRun, run), kMostBelow);
        return reach <= known ? reach : fmaxf(gelu(reach), kMostBelow) * kBoundSlack<X>;
      },
      [&](Range& range, int64_t, int64_t i) { range.add(gelu(load_one(x, i, i / kRun))); });
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

template <class DY, class X, class DX>
__global__ __launch_bounds__(kThreads, sizeof(CodeOf<DY>) + sizeof(CodeOf<X>) == 3
                                           ? 3
                                           : 2) void gelu_backward_kernel_near(DY dy, X x, Output<DX> dx,
                                                                               int64_t runs) {
  dx.open();
  const float inverse = dx.inverse();
  Pack<DY, kRun> next_dy;
  Pack<X, kRun> next;
  Walk at(1, runs);
  const auto fetch = [&] {
    if (!at.more()) return;
    next_dy.fetch(dy, at.run * kRun, 0);
    next.fetch(x, at.run * kRun, at.run);
  };
  fetch();
  while (__any_sync(0xffffffffu, at.more())) {
    const int64_t run = at.run;
    const bool here = at.more();
    float v[kRun], error[kRun];
    next_dy.unpack(dy, error);
    next.unpack(x, v);
    const float reach_dy = reach_of(next_dy, error), reach = reach_of(next, v);
    bool certain = is_near_scale(inverse) && reach < kLargest && reach * reach_dy < kLargest && reach_dy < kLargest &&
                   lowest_of(reach, kLowest, v) > kLowest;
    at.next();
    fetch();
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const float x_phi = v[k] * (0.398942280f * Near::exp(-0.5f * v[k] * v[k])), tail = normal_tail<Near>(v[k]);
      const float cdf = v[k] < 0.f ? tail : 1.f - tail, g = error[k] * inverse;
      // so near to its root even the sign of the derivative is open, which a dy of 0 would hide
      if constexpr (std::is_same_v<X, F32>)
        certain = certain && abs_(x_phi + cdf) > (abs_(x_phi) + cdf) * (2.f * kNearError);
      v[k] = g * (x_phi + cdf);
      error[k] = abs_(g) * ((abs_(x_phi) + cdf) * (2.f * kNearError));
    }
    if (here) {
      Pack<DX, kRun> pack;
      uint32_t differ = 0, least = ~0u;
#pragma unroll
      for (int k = 0; k < kRun; k += 2) {
        float low[2], high[2];
        spread(v[k], error[k], low[0], high[0]);
        spread(v[k + 1], error[k + 1], low[1], high[1]);
        differ |= encode_near<CodeOf<DX>>(low, high, pack.pair[k / 2]);
        if constexpr (std::is_same_v<DX, BF16>) least = min(least, smallest_of(v[k], v[k + 1]));
      }
      certain = certain && differ == 0 && least >= kSmallest;
      if (certain) dx.put_codes(run * kRun, pack);
    }
    do_together(here && !certain, 0, run,
                [&](int64_t, int64_t i) { dx.put_one(i, dy.load(i, {}) * gelu_derivative(load_one(x, i, i / kRun))); });
  }
  dx.close();
}

template <class DY, class X>
__global__ __launch_bounds__(kSearchThreads) void gelu_backward_kernel_search(DY dy, X x, uint32_t* max, int64_t runs) {
  find_largest(
      max, 1, runs,
      [&](int64_t, int64_t run, float known) {
        const float reach = reach_of(dy, run * kRun, 0), quick = reach * kMostSlope;
        if (quick <= known) return quick;
        return reach * gelu_derivative(fminf(reach_of(x, run * kRun, run), kSteepest)) * kBoundSlack<X>;
      },
      [&](Range& range, int64_t, int64_t i) { range.add(dy.load(i, {}) * gelu_derivative(load_one(x, i, i / kRun))); });
}

}  // namespace

void gelu_forward(const gelu_forward_args& args) {
  const int64_t M = args.y.shape.rows(), N = args.y.shape.cols(), runs = M * runs_of(N);
  const dim3 grid(blocks_for(runs, kThreads));
  const char* name = "gelu_forward";
  with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
    using X = std::remove_const_t<decltype(x)>;
    write(name, args.y, args.scale, Views<F32, BF16, E4M3T, E4M3G16>{}, [&]<class Y>(const Output<Y>& y) {
      if constexpr (std::is_same_v<Y, Measured>) {
        if (N % kRun == 0)
          return launch(name, gelu_forward_kernel_search<X>, grid, dim3(kSearchThreads), 0, x, y.max(), runs);
      } else if constexpr (kHasNear<Y>) {
        if (N % kRun == 0)
          return launch(name, gelu_forward_kernel_near<X, Y>, dim3(blocks_for(runs, kThreads, 3)), dim3(kThreads), 0, x,
                        y, runs);
      } else {
        if (N % kRun == 0) return launch(name, gelu_forward_kernel<true, X, Y>, grid, dim3(kThreads), 0, x, y, M, N);
      }
      launch(name, gelu_forward_kernel<false, X, Y>, grid, dim3(kThreads), 0, x, y, M, N);
    });
  });
}

void gelu_backward(const gelu_backward_args& args) {
  const int64_t M = args.dx.shape.rows(), N = args.dx.shape.cols(), runs = M * runs_of(N);
  const dim3 grid(blocks_for(runs, kThreads));
  const char* name = "gelu_backward";
  with("dy", args.dy, Views<F32, BF16>{}, [&](const auto dy) {
    with("x", args.x, Views<F32, BF16, E4M3G16>{}, [&](const auto x) {
      using DY = std::remove_const_t<decltype(dy)>;
      using X = std::remove_const_t<decltype(x)>;
      write(name, args.dx, {}, Views<F32, BF16, E5M2T>{}, [&]<class DX>(const Output<DX>& dx) {
        if constexpr (std::is_same_v<DX, Measured>) {
          if (N % kRun == 0)
            return launch(name, gelu_backward_kernel_search<DY, X>, grid, dim3(kSearchThreads), 0, dy, x, dx.max(),
                          runs);
        } else if constexpr (kHasNear<DX>) {
          if (N % kRun == 0)
            return launch(name, gelu_backward_kernel_near<DY, X, DX>, dim3(blocks_for(runs, kThreads, 3)),
                          dim3(kThreads), 0, dy, x, dx, runs);
        } else {
          if (N % kRun == 0)
            return launch(name, gelu_backward_kernel<true, DY, X, DX>, grid, dim3(kThreads), 0, dy, x, dx, M, N);
        }
        launch(name, gelu_backward_kernel<false, DY, X, DX>, grid, dim3(kThreads), 0, dy, x, dx, M, N);
      });
    });
  });
}

}  // namespace coat::cuda
