// A few consecutive elements a lane in one access: what the element-wise families share. Lanes next to each other hold
// vectors next to each other, so that every access of a warp is one stretch of memory, whatever the width of the codes.
#pragma once
#include "device.cuh"

namespace coat::cuda {

template <class View>
constexpr Scaling kScaling = View::format().scaling;

constexpr int kThreads = 256;

// Elements a lane such that the widest of the codes fills 16 bytes.
template <class... Code>
constexpr int kLane = 16 / static_cast<int>(std::max({sizeof(Code)...}));

// E codes in registers. `left` says how many of them exist; those that do not are zeros, which no range and no sum
// sees. With Whole they are known to exist and to be aligned, for all lanes of the warp: no test, one access.
template <class Code, int E>
struct Lane {
  static constexpr int kBytes = E * static_cast<int>(sizeof(Code));
  static_assert(kBytes == 4 || kBytes == 8 || kBytes % 16 == 0);
  using Vector = std::conditional_t<kBytes == 4, int, std::conditional_t<kBytes == 8, int2, int4>>;
  static constexpr int kVectors = kBytes / static_cast<int>(sizeof(Vector));
  static constexpr int kOfWord = 4 / static_cast<int>(sizeof(Code));
  union {
    Vector vector[kVectors];
    Code code[E];
    uint32_t word[kBytes / 4];
  };

  template <bool Whole>
  __device__ void fetch(const Code* from, int64_t i, int64_t left) {
    if (Whole || (left >= E && i % E == 0)) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) vector[v] = reinterpret_cast<const Vector*>(from + i)[v];
    } else {
#pragma unroll
      for (int k = 0; k < E; ++k) code[k] = k < left ? from[i + k] : Code{};
    }
  }
  template <bool Whole>
  __device__ void put(Code* to, int64_t i, int64_t left) const {
    if (Whole || (left >= E && i % E == 0)) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) reinterpret_cast<Vector*>(to + i)[v] = vector[v];
    } else {
#pragma unroll
      for (int k = 0; k < E; ++k)
        if (k < left) to[i + k] = code[k];
    }
  }
  template <class View>
  __device__ void decode(const View& view, typename View::Open open, float (&x)[E]) {
    if constexpr (kScaling<View> == Scaling::expand || kScaling<View> == Scaling::flat) {
      View held = view;
      held.codes = code;
#pragma unroll
      for (int k = 0; k < E; ++k) x[k] = held.load(k, open);
    } else {
#pragma unroll
      for (int k = 0; k < E; k += 2) {
        if constexpr (sizeof(Code) == 4) {
          x[k] = code[k].code, x[k + 1] = code[k + 1].code;
        } else {
          const float2 two = decode_pair<Code>(word[k / kOfWord] >> (k % kOfWord * 8));
          x[k] = two.x, x[k + 1] = two.y;
        }
        if constexpr (kScaling<View> != Scaling::none) x[k] = x[k] * open.scale, x[k + 1] = x[k + 1] * open.scale;
      }
    }
  }
  template <class View>
  __device__ void encode(const View& view, typename View::Sealed sealed, const float (&x)[E]) {
    if constexpr (kScaling<View> == Scaling::expand || kScaling<View> == Scaling::flat) {
      View held = view;
      held.codes = code;
#pragma unroll
      for (int k = 0; k < E; ++k) held.store(k, sealed, x[k]);
    } else {
#pragma unroll
      for (int k = 0; k < E; k += 2) {
        float a = x[k], b = x[k + 1];
        if constexpr (kScaling<View> != Scaling::none) a = View::scaled(sealed, a), b = View::scaled(sealed, b);
        if constexpr (sizeof(Code) == 4)
          code[k].code = a, code[k + 1].code = b;
        else if constexpr (sizeof(Code) == 2)
          word[k / 2] = encode_pair<Code>(a, b);
        else if (k % 4 == 0)
          word[k / 4] = encode_pair<Code>(a, b);
        else
          word[k / 4] |= encode_pair<Code>(a, b) << 16;
      }
    }
  }
  // Bits of the largest |x|. Codes without their sign order as the values do, with NaN above Inf: one is decoded.
  template <class Open>
  __device__ uint32_t largest(Open open) const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      if constexpr (sizeof(Code) == 4) {
        most = max(most, word[i] & 0x7fffffffu);
      } else if constexpr (sizeof(Code) == 2) {
        most = __vmaxu2(most, word[i] & 0x7fff7fffu);
      } else {
        most = __vmaxu2(most, word[i] & 0x007f007fu);
        most = __vmaxu2(most, word[i] >> 8 & 0x007f007fu);
      }
    }
    if constexpr (sizeof(Code) == 4) return most;
    float x = decode_pair<Code>(max(most >> 16, most & 0xffffu)).x;
    if constexpr (requires { open.scale; }) x = x * open.scale;
    return bits_of(x) & 0x7fffffffu;
  }
};

// A tensor seen as rows of vectors of E elements, in whole groups of `lanes`: a group makes one run and ends with its
// row.
struct Rows {
  int64_t rows, cols, vectors;
  static Rows of(int64_t rows, int64_t cols, int elements, int lanes) {
    const int64_t group = static_cast<int64_t>(elements) * lanes;
    return {rows, cols, (cols + group - 1) / group * lanes};
  }
  COAT_HD int64_t total() const { return rows * vectors; }
  // One row that holds vectors [first, first + count) in full: they lie on multiples of E.
  template <int E>
  __device__ bool whole(int64_t first, int64_t count) const {
    return rows == 1 && (first + count) * E <= cols;
  }
};

// use(true_type or false_type): the same code compiled for whole vectors and for any.
template <class F>
__device__ inline void by_case(bool whole, F&& use) {
  if (whole)
    use(std::true_type{});
  else
    use(std::false_type{});
}

// Runs of t that do not lie on its flat elements like those of [1, n]: rows have to be walked one by one.
inline bool is_ragged(const Tensor& t) {
  return t.format.scaling == Scaling::run && t.shape.rows() > 1 && t.shape.cols() % t.format.run != 0;
}

// Where vector q of such a tensor lies. Without elements: left <= 0.
template <int E, bool Whole>
struct Spot {
  int64_t row, col, i, left;
  __device__ Spot(const Rows& rows, int64_t q) {
    row = Whole || rows.rows == 1 ? 0 : q / rows.vectors;
    col = (q - row * rows.vectors) * E;
    i = row * rows.cols + col;
    left = q < rows.total() ? rows.cols - col : 0;
  }
  template <class View>
  __device__ int64_t block(const Rows& rows) const {
    if constexpr (View::run == 0)
      return 0;
    else if constexpr (Whole || kScaling<View> == Scaling::expand)
      return i / View::run;
    else
      return row * ((rows.cols + View::run - 1) / View::run) + col / View::run;
  }
  template <class View>
  __device__ typename View::Open open(const View& view, const Rows& rows) const {
    if (!Whole && left <= 0) return {};
    return view.open(block<View>(rows));
  }
};

// Range of a lane's elements. While all are finite, one maximum an element says it all.
template <int E>
__device__ inline void add_all(Range& range, const float (&x)[E]) {
  float top = 0.f;  // fmaxf passes over NaN, as a range does
#pragma unroll
  for (int k = 0; k < E; ++k) top = fmaxf(top, fabsf(x[k]));
  if (top < kInf) {
    range.merge({bits_of(top), 0});
  } else {
#pragma unroll
    for (int k = 0; k < E; ++k) range.add(x[k]);
  }
}
template <class R, int E>
  requires(!std::is_same_v<R, Range>)
__device__ inline void add_all(R& range, const float (&x)[E]) {
#pragma unroll
  for (int k = 0; k < E; ++k) range.add(x[k]);
}

// Merges the extremes over groups of `Lanes` lanes; infinities stay with their lane.
template <int Lanes, class R>
__device__ inline void merge_lanes(R& range) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) {
    range.max = max(range.max, __shfl_xor_sync(0xffffffffu, range.max, offset));
    if constexpr (std::is_same_v<R, RangeWithMin>)
      range.min = min(range.min, __shfl_xor_sync(0xffffffffu, range.min, offset));
  }
}

// Counts the infinities that the threads of a block met: one atomic a block that met any. All threads must call it.
__device__ inline void count_infs_of_block(Status* status, uint32_t infs) {
  if (__syncthreads_or(infs != 0) == 0) return;
  const uint32_t total = block_sum(infs);
  if (threadIdx.x == 0) count_infs(status, total);
}

// What stores into a per-tensor format need: the scale given, or that of the largest finite |x| measured. One thread of
// the grid writes it.
template <class View>
__device__ inline typename View::Sealed seal_tensor(const View& view, const float* given, const uint32_t* measured) {
  const float scale = given ? *given : scale_for<CodeOf<View>>(Range{*measured, 0});
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (!(scale >= kMinNormal && scale < kInf)) report(view.status, kBadScale, 0, bits_of(scale), 0);
    view.seal_as(scale);
  }
  return {1.f / scale};
}

// Vectors that a thread of largest_of reads at once, and those of its block.
template <class View>
constexpr int kLook = kScaling<View> == Scaling::expand ? 1 : 8;
template <class View>
constexpr int64_t kLooked = kThreads * kLook<View>;

// Largest |x| among the vectors of a block as bits, in every thread: of all elements (NaN > Inf > finite), or of the
// finite ones. Codes are compared, and one a vector is decoded.
template <bool Finite, class View>
__device__ inline uint32_t largest_of(const View& view, const Rows& rows) {
  using Code = CodeOf<View>;
  constexpr int E = kLane<Code>;
  const int64_t start = int64_t{blockIdx.x} * kLooked<View>;
  uint32_t largest = 0;
  by_case(rows.whole<E>(start, kLooked<View>), [&](auto whole) {
    constexpr int U = whole.value ? kLook<View> : 1;
#pragma unroll 1
    for (int64_t first = start; first < start + kLooked<View>; first += kThreads * U) {
      Lane<Code, E> lane[U];
      typename View::Open open[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const Spot<E, whole.value> spot(rows, first + u * kThreads + threadIdx.x);
        lane[u].template fetch<whole.value>(view.codes, spot.i, spot.left);
        open[u] = spot.open(view, rows);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        uint32_t most = 0x7f800000u;
        if constexpr (kScaling<View> != Scaling::expand) most = lane[u].largest(open[u]);
        if (most < 0x7f800000u || !Finite) {
          largest = max(largest, most);
        } else {
          float x[E];
          lane[u].decode(view, open[u], x);
          Range range;
          add_all(range, x);
          largest = max(largest, range.max);
        }
      }
    }
  });
  return block_max(largest);
}
// The rows that largest_of reads x by, and the blocks of its grid.
template <class View>
Rows rows_of(const Tensor& x) {
  const bool by_row = is_ragged(x);
  return Rows::of(by_row ? x.shape.rows() : 1, by_row ? x.shape.cols() : x.shape.numel(), kLane<CodeOf<View>>, 1);
}
template <class View>
unsigned largest_blocks(const Rows& rows) {
  return static_cast<unsigned>((rows.total() + kLooked<View> - 1) / kLooked<View>);
}

// The last member of a list whose pieces begin at or before `piece`; `first` names where its pieces begin.
template <class Member>
__device__ inline Member owner_of(const Member* list, int count, int64_t Member::*first, int64_t piece) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (list[middle].*first <= piece)
      low = middle;
    else
      high = middle - 1;
  }
  return list[low];
}

}  // namespace coat::cuda
