// How a product on the tensor cores is cut into work for the multiprocessors: the shape of tiles, and parts of K.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>

namespace coat::cuda {

// What is multiplied: FP8 operands with one scale or in blocks are added ahead of the next product, those that both
// have a scale a run are not; nor are those whose sums stay in the tensor cores, as those of bf16 do.
enum class Operands { bf16, fp8, fp8_runs, fp8_unpromoted };

// The shapes that kernels are compiled for. rows and columns: those of a cluster of this many blocks. A step of K, of
// 128 bytes, takes a multiprocessor this many microseconds where the tensor cores bound it, by Operands; 0 where there
// is no kernel. Parts of K may meet where there is a kernel whose clusters hold all parts of a tile, which spares the
// launch of another one that adds them.
struct ShapeRow {
  int rows, columns, cluster;
  double step[4];
  bool parts_meet;
};
inline constexpr ShapeRow kShapes[] = {{256, 256, 2, {0.67, 0.77, 0, 0.67}, false},
                                       {128, 128, 1, {0.29, 0.29, 0.42, 0.29}, true},
                                       {64, 128, 1, {0.14, 0.14, 0.30, 0}, true},
                                       {384, 128, 2, {0, 0.55, 0, 0}, false},
                                       {256, 128, 2, {0.355, 0.375, 0.42, 0}, false}};

// How many clusters of so many blocks run at once, as measured; none of the sizes that a group of multiprocessors holds
// too few of.
inline constexpr int kAtOnce[] = {0, 132, 66, 32, 30, 0, 16, 0, 15};

struct Plan {
  int shape = 0;          // in kShapes
  int splits = 1, chunk;  // parts of K, and steps along K of a part
  bool meet = false;      // in a cluster
};

inline int64_t tiles_of(const ShapeRow& shape, int64_t M, int64_t N) {
  return (M + shape.rows - 1) / shape.rows * ((N + shape.columns - 1) / shape.columns);
}

// The shape and the number of parts that are ready first by an estimate; `may_meet`: parts of K; `whole`: there are to
// be none. The number of multiprocessors is that of an H100 and an H200, not that of the device: parts of K set the
// order of sums, so equal sizes must give equal parts.
inline Plan plan_of(int64_t M, int64_t N, int64_t steps, Operands operands, bool may_meet, bool whole = false) {
  constexpr double kProcessors = 132;
  constexpr double kL2 = 11e6;                // bytes a microsecond that L2 gives
  constexpr double kEnd = 1.5;                // microseconds from sums to y
  constexpr double kLaunch = 3, kMeet = 2;    // to start the kernel that adds parts, or for parts to meet
  constexpr int64_t kFewest = 4, kMost = 32;  // steps of a part that has company, parts
  Plan best;
  double least = 1e300;
  for (int i = 0; i < static_cast<int>(std::size(kShapes)); ++i) {
    const ShapeRow& shape = kShapes[i];
    const double alone = shape.step[static_cast<int>(operands)];
    if (alone == 0) continue;
    const double tiles = static_cast<double>(tiles_of(shape, M, N)), clusters = kProcessors / shape.cluster;
    const double bytes = 128 * (shape.rows + shape.columns);  // of a cluster, a step
    for (int64_t parts = 1; parts <= (whole ? 1 : std::clamp<int64_t>(steps / kFewest, 1, kMost)); ++parts) {
      const int64_t chunk = (steps + parts - 1) / parts, splits = (steps + chunk - 1) / chunk;
      const double work = tiles * static_cast<double>(splits), at_once = std::min(work, clusters);
      const double waves = static_cast<double>(static_cast<int64_t>((work + clusters - 1) / clusters));
      const double step = std::max(alone, at_once * bytes / kL2);
      double time = waves * (static_cast<double>(chunk) * step + kEnd);
      const int64_t cluster = splits * shape.cluster;
      const bool meet =
          may_meet && shape.parts_meet && splits > 1 && cluster < std::ssize(kAtOnce) && tiles <= kAtOnce[cluster];
      if (meet)  // sums are laid out and read in shared memory
        time += kMeet + 1e-4 * shape.rows / shape.cluster * shape.columns;
      else if (splits > 1)  // sums of parts are written and read
        time += kLaunch + 8. * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(splits) / kL2;
      if (time < least) {
        least = time;
        best = {i, static_cast<int>(splits), static_cast<int>(chunk), meet};
      }
      if (work >= clusters) break;
    }
  }
  return best;
}

}  // namespace coat::cuda
