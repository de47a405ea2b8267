// The rules of ops.def applied to one call: formats, dims, device, shapes of outputs. The table is parsed once.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "tensor.h"

namespace coat {

enum class Mode : uint8_t {
  in,
  opt_in,
  inout,
  out,
  opt_out,
  list_in,
  list_inout,
  opt_list_in,
  opt_list_inout,
  f32,
  i64,
  seed,
  word,
  opt_word
};
inline constexpr const char* kModes[] = {"in",         "opt_in",      "inout",          "out", "opt_out", "list_in",
                                         "list_inout", "opt_list_in", "opt_list_inout", "f32", "i64",     "seed",
                                         "word",       "opt_word"};
inline bool is_list(Mode mode) { return mode >= Mode::list_in && mode <= Mode::opt_list_inout; }
inline bool is_output(Mode mode) { return mode == Mode::out || mode == Mode::opt_out; }
inline bool is_optional(Mode mode) {
  return mode == Mode::opt_in || mode == Mode::opt_out || mode == Mode::opt_list_in || mode == Mode::opt_list_inout ||
         mode == Mode::opt_word;
}
inline bool is_number(Mode mode) { return mode >= Mode::f32; }
inline bool is_changed(Mode mode) {
  return mode == Mode::inout || mode == Mode::list_inout || mode == Mode::opt_list_inout;
}

// One size of a dims text in postfix: a letter, an integer (kind '0') or one of + *.
struct Dim {
  struct Token {
    char kind;
    int64_t value;
  };
  std::string text;
  std::vector<Token> tokens;
};

struct Argument {
  Mode mode;
  std::string name;
  std::vector<Format> formats;
  std::string dims_text;  // "*" = any shape
  std::vector<Dim> dims;
  std::vector<std::string> words;  // of an ENUM
};

// The legal combinations of formats of some arguments; none: absent.
struct Only {
  std::vector<std::string> names;
  std::vector<std::vector<std::optional<Format>>> words;
};

struct Op {
  // Whether the op reads no tensor, so that the caller must name a device.
  bool is_source() const {
    for (const auto& argument : arguments)
      if (!is_number(argument.mode) && !is_output(argument.mode)) return false;
    return true;
  }
  std::string family, name, doc;
  std::vector<Argument> arguments;
  std::vector<Only> only;
};

// ops.def, parsed at first use.
const std::vector<Op>& table();

// One position a line of ops.def: table()[kOp_rmsnorm_forward].
enum OpIndex : int {
#define OP(family, name, doc, ...) kOp_##name,
#include "ops.def"
#undef OP
};

// Checks one call of op: give it the numbers, then the inputs, then ask for the shapes of the outputs.
class Contract {
 public:
  explicit Contract(const Op& op) : op_(op), only_seen_(op.only.size()) {}
  void number(const Argument& argument, int64_t value);
  void input(const Argument& argument, const Tensor& tensor) {
    check(argument, tensor, argument.name, any_);
    remember(argument, tensor.format, 0);
  }
  void list_length(const Argument& argument, int64_t length);
  void list_item(const Argument& argument, int64_t index, const Tensor& tensor);
  void output_format(const Argument& argument, const Format& format);
  // After all inputs and output formats: the combinations of ONLY.
  void finish();
  Shape output_shape(const Argument& argument) const;
  // For an op that reads no tensor: the caller says where its outputs go.
  void set_device(Device device) { device_ = device; }
  Device device() const { return device_; }
  // What a letter of dims stands for in this call; -1: nothing.
  int64_t letter(char name) const { return letters_[name - 'A'].value; }

 private:
  struct Any {
    bool bound = false;
    Shape shape;
    std::string by;
  };
  struct Letter {
    int64_t value = -1;
    std::string by;
  };
  void check(const Argument& argument, const Tensor& tensor, const std::string& label, Any& any);
  void check_format(const Argument& argument, const Format& format, const std::string& shown);
  int64_t evaluate(const Dim& dim, char unknown, int64_t value) const;
  std::string letters_text(const Dim& dim) const;
  void remember(const Argument& argument, const Format& format, int64_t index);

  const Op& op_;
  Device device_ = Device::cpu;
  bool device_bound_ = false;
  std::string device_by_;
  Any any_;
  std::vector<Any> any_items_;
  int64_t length_ = -1;
  std::string length_by_;
  Letter letters_[26];
  std::vector<std::vector<std::vector<std::optional<Format>>>> only_seen_;  // [ONLY][item of the lists][argument]
};

// Rules of single ops that formats and letters cannot say. Both backends ask before they change anything.
void check_row_not_empty(const Tensor& x, const char* argument = "x");
// What is changed in place must not be what is read at the same time.
void check_apart(const char* argument, const Tensor& changed, const Tensor& read);
void check_heads(int64_t rows, int64_t T, int64_t H, int64_t J, int64_t window);
void check_cached(int64_t M, int64_t T, int64_t H, int64_t J, int64_t first, int64_t window);
void check_rotation(int64_t D, int64_t direction);
void check_slice(const char* argument, int64_t first, int64_t count, int64_t size);
// The runs of optimizer states go on over the ends of rows: their formats need the shape [1, n].
void check_flat(const char* argument, const std::vector<Tensor>& states);
// Where FP8 products are summed: the positions of the words of `accumulate`; fast needs operands with a scale a tensor.
enum Accumulate : int32_t { kSplit, kFast };
void check_accumulate(int32_t accumulate, const Tensor& a, const Tensor& b);
// How an optimizer rounds its parameters: the positions of the words of `rounding`.
enum Rounding : int32_t { kNearest, kStochastic, kKahan };
void check_rounding(int32_t rounding, const std::vector<Tensor>& p, const std::vector<Tensor>& master,
                    const std::vector<Tensor>& lost);

}  // namespace coat
