// From a call to launches of the kernel for tensor cores: maps for the copy engine, the plan, and parts of K.
#pragma once
#include "plan.h"
#include "products.cuh"
#include "tensor.cuh"

namespace coat::cuda {

// What the shapes of a call have in common. y is the view of a matrix of M lines and `width` columns at `to`.
template <class Y, class Scales>
struct Start {
  const Call& call;
  const Lines &a, &b;
  const Plan& plan;
  Result result;
  Y y;
  uint8_t* to;
  int64_t width, apart;
  Scales scales;
};

template <class A, class B, bool AlongA, bool AlongB, class Shape, class Y, class Scales>
void start(const Start<Y, Scales>& s) {
  constexpr int kDepth = 128 / sizeof(A), kSizeY = sizeof(CodeOf<Y>);
  const char* name = s.call.name;
  constexpr int kRows = Shape::kRows * Shape::kCluster;
  TensorProduct p{};
  p.result = s.result;
  p.steps = static_cast<int>((s.call.K + kDepth - 1) / kDepth);
  p.chunk = s.plan.chunk;
  p.down = static_cast<unsigned>((s.call.M + kRows - 1) / kRows);
  p.across = static_cast<unsigned>((s.call.N + Shape::kColumns - 1) / Shape::kColumns);
  p.splits = static_cast<unsigned>(s.plan.splits);
  p.apart = s.apart;
  p.by_tiles = s.width * kSizeY % 16 == 0 && reinterpret_cast<uintptr_t>(s.to) % 16 == 0;
  const auto map_of = [&](const Lines& x, int tile_lines) {
    return tensor_map(name, x.codes, sizeof(A), x.lines, x.width, x.stride, tile_lines);
  };
  const CUtensorMap a_map = map_of(s.a, AlongA ? Shape::kRows : 64);
  const CUtensorMap b_map = map_of(s.b, AlongB ? Shape::kColumns / Shape::kCluster : 64);
  const CUtensorMap y_map =
      p.by_tiles ? tensor_map(name, s.to, kSizeY, s.call.M, s.width, s.width, 64) : a_map;  // a_map: not used
  const int64_t work = int64_t{p.down} * p.across * p.splits;
  // where parts meet, every cluster has one tile, however many of them run at once
  const int64_t most = Shape::kMeets ? work : multiprocessors() / Shape::kCluster;
  const auto blocks = static_cast<unsigned>(std::min(work, most) * Shape::kCluster);
  launch_clusters(name, matmul_kernel_tensor<A, B, AlongA, AlongB, Y, Shape, Scales>, blocks, Shape::kThreads,
                  Shape::kCluster * (Shape::kMeets ? p.splits : 1), Shape::kShared, a_map, b_map, y_map, p, s.y,
                  s.scales);
}

template <class A, class Scales>
inline constexpr Operands operands_of = sizeof(A) == 2       ? Operands::bf16
                                        : Scales::kOfRuns    ? Operands::fp8_runs
                                        : !Scales::kPromotes ? Operands::fp8_unpromoted
                                                             : Operands::fp8;

// Whether there are kernels in which parts of K meet; the sums of others go through memory.
template <class Scales>
inline constexpr bool kPartsMeet = std::is_same_v<Scales, NoScales>;

template <int Row, class Use>
void each_shape(Use&& use) {
  use.template operator()<Row>();
  if constexpr (Row + 1 < std::size(kShapes)) each_shape<Row + 1>(use);
}

template <class A, class B, bool AlongA, bool AlongB, class Y, class Scales>
void start_shape(const Start<Y, Scales>& s) {
  static_assert(sizeof(A) == sizeof(B));
  constexpr Operands kOperands = operands_of<A, Scales>;
  each_shape<0>([&]<int Row>() {
    if constexpr (kShapes[Row].step[static_cast<int>(kOperands)] != 0) {
      if (s.plan.shape != Row) return;
      if constexpr (kShapes[Row].parts_meet && kPartsMeet<Scales> && !std::is_same_v<Y, Turned>)
        if (s.plan.meet) return start<A, B, AlongA, AlongB, ShapeOf<Row, true>>(s);
      start<A, B, AlongA, AlongB, ShapeOf<Row>>(s);
    }
  });
}

template <class A, class B, bool AlongA, bool AlongB, class... Y, class Scales = NoScales>
void multiply(const Call& call, Views<Y...> list, const Scales& scales = {}) {
  constexpr int64_t kMost = INT32_MAX - 512;  // the copy engine counts in 32 bits, up to the end of the last tile
  const std::pair<const char*, int64_t> sizes[] = {{"M", call.M}, {"N", call.N}, {"K", call.K}};
  for (const auto& [letter, size] : sizes)
    if (size > kMost)
      fail("shape", "a", "a ", text_of(call.a), " and b ", text_of(call.b), " have ", letter, " = ", size,
           " and must have at most ", kMost, " on cuda");
  if (call.K == 0) return add_splits(call, nullptr, 0, 0);
  constexpr int kDepth = 128 / sizeof(A);
  std::optional<Scratch> rooms[3];
  const Lines a = lines_of(call.name, call.a, sizeof(A), rooms[0]);
  const Lines b = lines_of(call.name, call.b, sizeof(B), rooms[1]);
  const Plan plan = plan_of(call.M, call.N, (call.K + kDepth - 1) / kDepth, operands_of<A, Scales>, kPartsMeet<Scales>,
                            call.turn.table != nullptr);
  if (plan.splits == 1 || plan.meet) {
    with("y", call.y, list, [&](const auto view) {
      using V = std::remove_const_t<decltype(view)>;
      V y = view;
      if constexpr (std::is_same_v<V, Turned>) y.turn = call.turn;
      start_shape<A, B, AlongA, AlongB>(
          Start<V, Scales>{call, a, b, plan, call.result(), y, call.y.data, call.N, 0, scales});
    });
    return;
  }
  // the sums of the parts lie side by side in every row, whole tiles each, so that rows end where those of y do
  const int columns = kShapes[plan.shape].columns;
  const int64_t apart = (call.N + columns - 1) / columns * columns, width = plan.splits * apart;
  Tensor sums;
  sums.format = F32::format();
  rooms[2].emplace(call.M * width * 4);
  sums.data = rooms[2]->as<uint8_t>();
  const Result plain{call.M, call.N};
  start_shape<A, B, AlongA, AlongB>(
      Start<F32, Scales>{call, a, b, plan, plain, F32(sums), sums.data, width, apart, scales});
  add_splits(call, rooms[2]->as<float>(), plan.splits, apart);
}

}  // namespace coat::cuda
