// gelu on the device: the exact form, element by element.
#include "../ops.h"
#include "near.cuh"

namespace coat::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr float kMostBelow = 0.1701f, kSteepest = 1.4142f;  // largest |gelu(x)| for x < 0; where gelu' is largest
constexpr float kMostSlope = 1.13f;                         // … and above that

// Where the special function unit may be a code off, gelu and its derivative for t = |x| are powers of two of
// polynomials, fitted on [0, kFar]: relative errors below 2^-13.9 and 2^-12.6, the larger ones in the far tail. Beyond
// kFar the powers are 0. NaN stays NaN.
constexpr float kFar = 13.25f;
__device__ inline float near_to_zero(float x) {
  float t;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(t) : "f"(fabsf(x)), "f"(kFar));
  return t;
}
// x Phi(x) = max(x, 0) - t Phi(-t).
__device__ inline float gelu_near(float x) {
  const float t = near_to_zero(x);
  float p = -1.90166793e-09f;
  p = fma_(p, t, 1.3911567e-07f);
  p = fma_(p, t, -4.47435923e-06f);
  p = fma_(p, t, 8.37489861e-05f);
  p = fma_(p, t, -0.00102149742f);
  p = fma_(p, t, 0.0086685326f);
  p = fma_(p, t, -0.0539583154f);
  p = fma_(p, t, -0.458792359f);
  p = fma_(p, t, -1.15097916f);
  p = fma_(p, t, -1.00003052f);
  return fma_(-t, exp2_near(p), fmaxf(x, 0.f));
}
// The derivative at -t, without its root, is the power; at t it is one minus that at -t.
__device__ inline float gelu_derivative_near(float x) {
  const float t = near_to_zero(x);
  float p = 4.84321416e-10f;
  p = fma_(p, t, -3.60077976e-08f);
  p = fma_(p, t, 1.17085517e-06f);
  p = fma_(p, t, -2.19476988e-05f);
  p = fma_(p, t, 0.000263733091f);
  p = fma_(p, t, -0.00214528386f);
  p = fma_(p, t, 0.0122391228f);
  p = fma_(p, t, -0.0505822189f);
  p = fma_(p, t, -0.564098418f);
  p = fma_(p, t, -0.382145971f);
  p = fma_(p, t, -0.58845669f);
  const float below = (0.751791525f - t) * exp2_near(p);
  return x > 0.f ? 1.f - below : below;
}
// Two of them for codes of 8 bits, in half precision: gelu(h s) k / s = max(h k, 0) - |h k| Phi(-|h s|). Holds where
// nothing in units of the result is larger than kHalfMost; errors are below an eighth of a code.
constexpr float kHalfMost = 8192.f, kHalfScale = 65504.f;
__device__ inline __half2 gelu_near(__half2 h, __half2 s, __half2 k) {
  const __half2 t = __hmin2_nan(__habs2(__hmul2(h, s)), __float2half2_rn(6.f)), y = __hmul2(h, k);
  __half2 p = __float2half2_rn(-2.01684376e-4f);
  p = __hfma2(p, t, __float2half2_rn(4.46760522e-3f));
  p = __hfma2(p, t, __float2half2_rn(-4.28327263e-2f));
  p = __hfma2(p, t, __float2half2_rn(-0.472785708f));
  p = __hfma2(p, t, __float2half2_rn(-1.14439967f));
  p = __hfma2(p, t, __float2half2_rn(-1.00053182f));
  uint32_t power;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(power) : "r"(*reinterpret_cast<const uint32_t*>(&p)));
  return __hfma2(__hneg2(__habs2(y)), *reinterpret_cast<const __half2*>(&power), __hmax2(y, __float2half2_rn(0.f)));
}

// Elements of a thread and its accesses to each tensor: 16 bytes of the widest code, kAhead of them in flight.
template <class... View>
constexpr int kOwn = 16 / static_cast<int>(std::max({sizeof(CodeOf<View>)...}));
constexpr int kAhead = 4;
template <int C>
unsigned near_blocks(int64_t runs) {
  return static_cast<unsigned>((runs * (kRun / C) + kThreads * kAhead - 1) / (kThreads * kAhead));
}

// Whether all elements are finite, NaN aside.
template <class X, int C>
__device__ inline bool is_finite(const Pack<X, C>& pack, const float (&x)[C]) {
  float reach = 0.f;
  if constexpr (X::run != 0) {
    reach = BFloat16::decode(pack.scale) * CodeOf<X>::max();
  } else {
#pragma unroll
    for (int k = 0; k < C; ++k) reach = fmaxf(reach, fabsf(x[k]));
  }
  return reach < kInf;
}

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

// C elements a thread, of whole runs, nearly; exactly where one is infinite. Moves x and y once.
template <class X, class Y, int C = kOwn<X, Y>>
__global__ __launch_bounds__(kThreads) void gelu_forward_kernel_near(X x, Output<Y> y, int64_t total) {
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kAhead) + threadIdx.x;
  Pack<X, C> from[kAhead];
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    const int64_t q = min(first + u * kThreads, total - 1);
    from[u].fetch(x, q * C, q / (kRun / C));
  }
  y.open();
  const float inverse = y.inverse();
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    const int64_t q = first + u * kThreads, i = q * C;
    if (q >= total) break;
    Pack<Y, C> pack;
    if constexpr (X::run != 0 && sizeof(CodeOf<Y>) == 1) {
      const float scale = BFloat16::decode(from[u].scale), units = scale * inverse;
      if (units * CodeOf<X>::max() < kHalfMost) {
        const __half2 s = __float2half2_rn(fminf(scale, kHalfScale)), k = __float2half2_rn(units);
#pragma unroll
        for (int c = 0; c < C / 2; ++c) {
          const __half2 v(__nv_cvt_fp8x2_to_halfraw2(from[u].pair[c], __NV_E4M3));
          pack.pair[c] = __nv_cvt_halfraw2_to_fp8x2(gelu_near(v, s, k), __NV_SATFINITE, __NV_E4M3);
        }
        y.put_codes(i, pack);
        continue;
      }
    }
    float v[C];
    from[u].unpack(x, v);
    if (is_finite(from[u], v)) {
#pragma unroll
      for (int k = 0; k < C; ++k) v[k] = gelu_near(v[k]);
      pack.put(y.view(), i, y.sealed(), v);
    } else {
#pragma unroll 1
      for (int k = 0; k < C; ++k) y.put_one(i + k, gelu(load_one(x, i + k, i / kRun)));
    }
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

// As gelu_forward_kernel_near.
template <class DY, class X, class DX, int C = kOwn<DY, X, DX>>
__global__ __launch_bounds__(kThreads) void gelu_backward_kernel_near(DY dy, X x, Output<DX> dx, int64_t total) {
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kAhead) + threadIdx.x;
  Pack<DY, C> from_dy[kAhead];
  Pack<X, C> from[kAhead];
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    const int64_t q = min(first + u * kThreads, total - 1);
    from_dy[u].fetch(dy, q * C, 0);
    from[u].fetch(x, q * C, q / (kRun / C));
  }
  dx.open();
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    const int64_t q = first + u * kThreads, i = q * C;
    if (q >= total) break;
    float g[C], v[C];
    from_dy[u].unpack(dy, g);
    from[u].unpack(x, v);
    bool near = is_finite(from[u], v);
    if constexpr (Output<DX>::kScaling != Scaling::none) near = near && is_finite(from_dy[u], g);  // which are counted
    if (near) {
#pragma unroll
      for (int k = 0; k < C; ++k) g[k] *= gelu_derivative_near(v[k]);
      Pack<DX, C> pack;
      pack.put(dx.view(), i, dx.sealed(), g);
    } else {
#pragma unroll 1
      for (int k = 0; k < C; ++k) dx.put_one(i + k, dy.load(i + k, {}) * gelu_derivative(load_one(x, i + k, i / kRun)));
    }
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
          return launch(name, gelu_forward_kernel_near<X, Y>, dim3(near_blocks<kOwn<X, Y>>(runs)), dim3(kThreads), 0, x,
                        y, runs * (kRun / kOwn<X, Y>));
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
            return launch(name, gelu_backward_kernel_near<DY, X, DX>, dim3(near_blocks<kOwn<DY, X, DX>>(runs)),
                          dim3(kThreads), 0, dy, x, dx, runs * (kRun / kOwn<DY, X, DX>));
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
