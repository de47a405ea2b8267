// What a tensor is: formats, shapes, devices, the error type. Plain values; knows neither Node nor CUDA.
#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace coat {

// The one error of native code: thrown anywhere, turned into a CoatError in binding.cc.
struct Error : std::exception {
  std::string code, op, argument, message;
  Error(std::string code_, std::string argument_, std::string message_)
      : code(std::move(code_)), argument(std::move(argument_)), message(std::move(message_)) {}
  const char* what() const noexcept override { return message.c_str(); }
};

// A number as people write it: whole ones with all their digits.
template <class T>
void write_part(std::ostringstream& text, const T& part) {
  if constexpr (std::is_floating_point_v<T>) {
    const double x = part;
    if (x > -9007199254740993.0 && x < 9007199254740993.0 && x == static_cast<double>(static_cast<int64_t>(x))) {
      text << static_cast<int64_t>(x);
      return;
    }
  }
  text << part;
}

// Throws an Error whose text is the parts written one after the other.
template <class... Parts>
[[noreturn]] void fail(const char* code, const std::string& argument, const Parts&... parts) {
  std::ostringstream text;
  text.precision(9);
  (write_part(text, parts), ...);
  throw Error(code, argument, text.str());
}

// i8: whole numbers. d8, u8, d4, u4: codes of maps, of 8 or 4 bits, for signed and for positive numbers.
enum class DType : uint8_t { f32, bf16, f16, e4m3, e5m2, i8, d8, u8, d4, u4, i32 };
// none: plain values. tensor: one f32 scale (/t). run: a scale a run of n in a row (/gN; bf16 rounded up for n = 16,
// else f32), or a whole row (/r). block: an f32 scale a block of n x n of a matrix of rows() x cols() (/bN). flat: an
// f32 scale a run of n over the flat tensor (/gN of maps). expand: the same with exponent k and centre (/xN).
// remainder: a second code an element, for what the first leaves (bf16x2).
enum class Scaling : uint8_t { none, tensor, run, block, flat, expand, remainder };
constexpr int32_t kWholeRow = -1;  // the run of /r

struct Format {
  DType dtype = DType::f32;
  Scaling scaling = Scaling::none;
  int32_t run = 0;
  bool pow2 = false;  // scales of runs and blocks are powers of two
  bool operator==(const Format&) const = default;
};

inline constexpr struct {
  std::string_view word;
  Format format;
} kFormats[] = {
    {"f32", {DType::f32, Scaling::none, 0}},
    {"bf16", {DType::bf16, Scaling::none, 0}},
    {"f16", {DType::f16, Scaling::none, 0}},
    {"bf16x2", {DType::bf16, Scaling::remainder, 0}},
    {"f16/t", {DType::f16, Scaling::tensor, 0}},
    {"e4m3/t", {DType::e4m3, Scaling::tensor, 0}},
    {"e5m2/t", {DType::e5m2, Scaling::tensor, 0}},
    {"e4m3/g16", {DType::e4m3, Scaling::run, 16}},
    {"i8/g16", {DType::i8, Scaling::run, 16}},
    {"e4m3/g64", {DType::e4m3, Scaling::run, 64}},
    {"e4m3/g128", {DType::e4m3, Scaling::run, 128}},
    {"e4m3/g256", {DType::e4m3, Scaling::run, 256}},
    {"e4m3/b128", {DType::e4m3, Scaling::block, 128}},
    {"e4m3/r", {DType::e4m3, Scaling::run, kWholeRow, true}},
    {"e4m3/g128p2", {DType::e4m3, Scaling::run, 128, true}},
    {"e4m3/b128p2", {DType::e4m3, Scaling::block, 128, true}},
    {"e4m3/x64", {DType::e4m3, Scaling::expand, 64}},
    {"e4m3/x128", {DType::e4m3, Scaling::expand, 128}},
    {"e4m3/x256", {DType::e4m3, Scaling::expand, 256}},
    {"e5m2/g128", {DType::e5m2, Scaling::run, 128}},
    {"e5m2/x128", {DType::e5m2, Scaling::expand, 128}},
    {"d8/g256", {DType::d8, Scaling::flat, 256}},
    {"u8/g256", {DType::u8, Scaling::flat, 256}},
    {"d4/g128", {DType::d4, Scaling::flat, 128}},
    {"u4/g128", {DType::u4, Scaling::flat, 128}},
    {"i32", {DType::i32, Scaling::none, 0}},
};

inline std::string word_of(const Format& format) {
  for (const auto& row : kFormats)
    if (row.format == format) return std::string(row.word);
  return "?";
}

inline Format parse_format(std::string_view word, const std::string& argument) {
  std::string known;
  for (const auto& row : kFormats) {
    if (row.word == word) return row.format;
    known += (known.empty() ? "" : ", ") + std::string(row.word);
  }
  fail("format", argument, argument, " is \"", word, "\", which is no format; the formats are ", known);
}

inline int64_t code_bits(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 32;
    case DType::bf16:
    case DType::f16:
      return 16;
    case DType::d4:
    case DType::u4:
      return 4;
    default:
      return 8;
  }
}
// Bytes of n codes; those of 4 bits lie two a byte.
inline int64_t code_bytes(DType dtype, int64_t n) { return (n * code_bits(dtype) + 7) / 8; }

constexpr int kMaxRank = 4;

// Sizes, row-major. rows() is the product of all but the last size, cols() the last.
struct Shape {
  int rank = 0;
  int64_t dims[kMaxRank] = {};
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= dims[i];
    return n;
  }
  int64_t cols() const { return rank == 0 ? 1 : dims[rank - 1]; }
  int64_t rows() const {
    int64_t n = 1;
    for (int i = 0; i + 1 < rank; ++i) n *= dims[i];
    return n;
  }
  bool operator==(const Shape& other) const {
    if (rank != other.rank) return false;
    for (int i = 0; i < rank; ++i)
      if (dims[i] != other.dims[i]) return false;
    return true;
  }
};

inline std::string text_of(const Shape& shape) {
  std::string text = "[";
  for (int i = 0; i < shape.rank; ++i) text += (i ? ", " : "") + std::to_string(shape.dims[i]);
  return text + "]";
}

// Runs of a row of so many elements, the last of which may be short.
inline int64_t runs_of_row(const Format& format, int64_t cols) {
  const int64_t run = format.run == kWholeRow ? cols : format.run;
  return cols == 0 ? 0 : (cols + run - 1) / run;
}

// Number of scales that a tensor of this format and shape carries.
inline int64_t blocks_of(const Format& format, const Shape& shape) {
  switch (format.scaling) {
    case Scaling::none:
      return 0;
    case Scaling::tensor:
      return 1;
    case Scaling::run:
      return shape.rows() * runs_of_row(format, shape.cols());
    case Scaling::block:
      return runs_of_row(format, shape.rows()) * runs_of_row(format, shape.cols());
    case Scaling::flat:
    case Scaling::expand:
      return (shape.numel() + format.run - 1) / format.run;
    case Scaling::remainder:
      return shape.numel();
  }
  return 0;
}

// Bytes of one block's numbers: bf16 or f32 scale, or scale, k and centre, or a remainder.
inline int64_t block_bytes(const Format& format) {
  if (format.scaling == Scaling::expand) return 12;
  if (format.scaling == Scaling::remainder) return 2;
  return format.scaling == Scaling::run && format.run == 16 ? 2 : 4;
}

// Where the scales begin: after the codes, on a 16-byte boundary.
inline int64_t scales_offset(const Format& format, const Shape& shape) {
  return (code_bytes(format.dtype, shape.numel()) + 15) / 16 * 16;
}

inline int64_t bytes_of(const Format& format, const Shape& shape) {
  if (format.scaling == Scaling::none) return code_bytes(format.dtype, shape.numel());
  return scales_offset(format, shape) + blocks_of(format, shape) * block_bytes(format);
}

enum class Device : uint8_t { cpu, cuda };
inline const char* word_of(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

// What kernels report: counters, and the first value that broke a rule where a kernel cannot throw. It lives in memory
// that the host can read at any time.
struct Status {
  int64_t infs = 0;              // infinities that a quantizing store saturated, and NaNs that a map cannot hold
  unsigned long long fault = 0;  // 0, or the kind of fault (Fault)
  int64_t fault_index = 0, fault_value = 0, fault_limit = 0;
};
enum Fault : unsigned long long { kNoFault = 0, kBadId = 1, kBadTarget = 2, kBadScale = 3, kDamaged = 4 };

// One allocation: codes, then scales. A value, not an owner: memory.h owns.
struct Tensor {
  Format format;
  Shape shape;
  Device device = Device::cpu;
  uint8_t* data = nullptr;
  Status* status = nullptr;
  explicit operator bool() const { return data != nullptr; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
  template <class T>
  T* scales() const {
    return reinterpret_cast<T*>(data + scales_offset(format, shape));
  }
};

// `bf16[8, 64]`, as errors print a tensor.
inline std::string text_of(const Tensor& tensor) { return word_of(tensor.format) + text_of(tensor.shape); }

}  // namespace coat
