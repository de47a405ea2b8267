// The arena: best fit, and free neighbours of a chunk become one.
#include "arena.h"

#include <iterator>

namespace coat {

int64_t Arena::rounded(int64_t bytes) { return (bytes < 1 ? 1 : (bytes + kAlign - 1) / kAlign) * kAlign; }

void Arena::add(uint8_t* chunk, int64_t bytes) { pieces_[chunk] = {bytes, true, true}; }

uint8_t* Arena::allocate(int64_t bytes) {
  const int64_t size = rounded(bytes);
  Place best = pieces_.end();
  for (Place piece = pieces_.begin(); piece != pieces_.end(); ++piece)
    if (piece->second.free && piece->second.bytes >= size &&
        (best == pieces_.end() || piece->second.bytes < best->second.bytes))
      best = piece;
  if (best == pieces_.end()) return nullptr;
  if (best->second.bytes > size) pieces_[best->first + size] = {best->second.bytes - size, true, false};
  best->second = {size, false, best->second.leads};
  used_ += 1;
  return best->first;
}

bool Arena::release(uint8_t* block) {
  const Place piece = pieces_.find(block);
  if (piece == pieces_.end() || piece->second.free) return false;
  piece->second.free = true;
  used_ -= 1;
  join(piece, std::next(piece));
  if (piece != pieces_.begin()) join(std::prev(piece), piece);
  return true;
}

void Arena::join(Place left, Place right) {
  if (right == pieces_.end() || right->second.leads || !left->second.free || !right->second.free) return;
  left->second.bytes += right->second.bytes;
  pieces_.erase(right);
}

}  // namespace coat
