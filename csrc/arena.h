// Memory at addresses that stay: what ops that were recorded (graph.h) read and write.
#pragma once
#include <cstdint>
#include <map>

namespace coat {

// Hands out blocks of its chunks and takes them back, to hand them out again. Chunks stay until drop().
class Arena {
 public:
  // Of the blocks, in bytes; of a chunk, at least.
  static constexpr int64_t kAlign = 512, kChunk = int64_t{1} << 26;
  static int64_t rounded(int64_t bytes);

  // A chunk to hand out, of a multiple of kAlign bytes.
  void add(uint8_t* chunk, int64_t bytes);
  // The smallest free block that is large enough; null where there is none.
  uint8_t* allocate(int64_t bytes);
  // Takes a block back and returns true, unless it is none of the arena's.
  bool release(uint8_t* block);
  bool empty() const { return pieces_.empty(); }
  bool in_use() const { return used_ > 0; }
  // Gives every chunk to f and forgets it.
  template <class F>
  void drop(F&& f) {
    for (const auto& [begin, piece] : pieces_)
      if (piece.leads) f(begin);
    pieces_.clear();
  }

 private:
  struct Piece {
    int64_t bytes;
    bool free;
    bool leads;  // is the first of its chunk
  };
  using Place = std::map<uint8_t*, Piece>::iterator;
  void join(Place left, Place right);

  std::map<uint8_t*, Piece> pieces_;  // by where they begin; those of a chunk lie side by side
  int64_t used_ = 0;                  // blocks handed out
};

}  // namespace coat
