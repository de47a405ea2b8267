// Parsing of ops.def's words and checking of calls.
#include "contract.h"

#include <cctype>

namespace coat {
namespace {

std::vector<std::string> words_of(const std::string& text, char separator = ' ') {
  std::vector<std::string> words;
  std::string word;
  for (char c : text + separator) {
    if (c != separator) {
      word += c;
    } else if (!word.empty()) {
      words.push_back(word);
      word.clear();
    }
  }
  return words;
}

// Recursive descent: sum = product (+ product)*, product = atom (* atom)*, atom = letter | integer | ( sum ).
struct DimParser {
  const std::string& text;
  size_t at = 0;
  std::vector<Dim::Token> tokens;
  void sum() {
    product();
    while (at < text.size() && text[at] == '+') {
      ++at;
      product();
      tokens.push_back({'+', 0});
    }
  }
  void product() {
    atom();
    while (at < text.size() && text[at] == '*') {
      ++at;
      atom();
      tokens.push_back({'*', 0});
    }
  }
  void atom() {
    if (text[at] == '(') {
      ++at;
      sum();
      ++at;
    } else if (std::isdigit(text[at])) {
      int64_t value = 0;
      while (at < text.size() && std::isdigit(text[at])) value = value * 10 + (text[at++] - '0');
      tokens.push_back({'0', value});
    } else {
      tokens.push_back({text[at++], 0});
    }
  }
};

Argument tensor_argument(Mode mode, const char* name, const char* formats, const char* dims) {
  Argument argument{mode, name, {}, dims, {}, {}};
  for (const auto& word : words_of(formats)) argument.formats.push_back(parse_format(word, name));
  if (argument.dims_text != "*")
    for (const auto& word : words_of(dims)) {
      DimParser parser{word, 0, {}};
      parser.sum();
      argument.dims.push_back({word, parser.tokens});
    }
  return argument;
}

// Collects the pieces of one line of ops.def; each macro below calls one of these.
struct OpBuilder {
  Op op;
  OpBuilder& tensor(Mode mode, const char* name, const char* formats, const char* dims) {
    op.arguments.push_back(tensor_argument(mode, name, formats, dims));
    return *this;
  }
  OpBuilder& number(Mode mode, const char* name) {
    op.arguments.push_back({mode, name, {}, "", {}, {}});
    return *this;
  }
  OpBuilder& word(Mode mode, const char* name, const char* words) {
    op.arguments.push_back({mode, name, {}, "", {}, words_of(words)});
    return *this;
  }
  OpBuilder& only(const char* names, const char* words) {
    Only only{words_of(names), {}};
    for (const auto& row : words_of(words)) {
      std::vector<std::optional<Format>> formats;
      for (const auto& word : words_of(row, ':'))
        formats.push_back(word == "-" ? std::optional<Format>() : parse_format(word, "ONLY"));
      only.words.push_back(formats);
    }
    op.only.push_back(only);
    return *this;
  }
};

std::vector<Op> parse() {
  std::vector<Op> ops;
#define IN(name, formats, dims) .tensor(Mode::in, #name, formats, dims)
#define OPT_IN(name, formats, dims) .tensor(Mode::opt_in, #name, formats, dims)
#define INOUT(name, formats, dims) .tensor(Mode::inout, #name, formats, dims)
#define OUT(name, formats, dims) .tensor(Mode::out, #name, formats, dims)
#define OPT_OUT(name, formats, dims) .tensor(Mode::opt_out, #name, formats, dims)
#define LIST_IN(name, formats) .tensor(Mode::list_in, #name, formats, "*")
#define LIST_INOUT(name, formats) .tensor(Mode::list_inout, #name, formats, "*")
#define OPT_LIST_IN(name, formats) .tensor(Mode::opt_list_in, #name, formats, "*")
#define OPT_LIST_INOUT(name, formats) .tensor(Mode::opt_list_inout, #name, formats, "*")
#define OPT_LIST_ONES(name, formats) .tensor(Mode::opt_list_inout, #name, formats, "1")
#define F32(name) .number(Mode::f32, #name)
#define I64(name) .number(Mode::i64, #name)
#define SEED(name) .number(Mode::seed, #name)
#define ENUM(name, words) .word(Mode::word, #name, words)
#define OPT_ENUM(name, words) .word(Mode::opt_word, #name, words)
#define ONLY(names, words) .only(names, words)
#define OP(family, name, doc, ...)              \
  ops.push_back((OpBuilder {                    \
                  {                             \
#family, #name, doc, {}, {} \
                  }                             \
                } __VA_ARGS__)                  \
                    .op);
#include "ops.def"
#undef OP
  return ops;
}

std::string format_list(const std::vector<Format>& formats) {
  std::string text;
  for (size_t i = 0; i < formats.size(); ++i)
    text += (i == 0 ? "" : i + 1 == formats.size() ? " or " : ", ") + word_of(formats[i]);
  return text;
}

bool is_letter(const std::string& name) { return name.size() == 1 && std::isupper(name[0]); }

}  // namespace

const std::vector<Op>& table() {
  static const std::vector<Op> ops = parse();
  return ops;
}

void Contract::number(const Argument& argument, int64_t value) {
  if (!is_letter(argument.name)) return;
  if (value < 0) fail("value", argument.name, argument.name, " is ", value, " and must not be negative");
  letters_[argument.name[0] - 'A'] = {value, argument.name + " = " + std::to_string(value)};
}

void Contract::check_format(const Argument& argument, const Format& format, const std::string& shown) {
  for (const auto& legal : argument.formats)
    if (legal == format) return;
  fail("format", argument.name, shown, " must be ", format_list(argument.formats));
}

// The value of a size, with `unknown` standing for `value`; letters that are not bound count as 0.
int64_t Contract::evaluate(const Dim& dim, char unknown, int64_t value) const {
  int64_t stack[16];
  int top = 0;
  for (const auto& token : dim.tokens) {
    if (token.kind == '0') {
      stack[top++] = token.value;
    } else if (token.kind == '+' || token.kind == '*') {
      const int64_t b = stack[--top], a = stack[--top];
      stack[top++] = token.kind == '+' ? a + b : a * b;
    } else {
      stack[top++] = token.kind == unknown ? value : letters_[token.kind - 'A'].value;
    }
  }
  return stack[0];
}

// " (H = 4, D = 8)" for the bound letters of a size.
std::string Contract::letters_text(const Dim& dim) const {
  std::string text;
  for (const auto& token : dim.tokens)
    if (std::isupper(token.kind) && letters_[token.kind - 'A'].value >= 0)
      text += (text.empty() ? "" : ", ") + letters_[token.kind - 'A'].by;
  return text.empty() ? "" : " (" + text + ")";
}

void Contract::check(const Argument& argument, const Tensor& tensor, const std::string& label, Any& any) {
  const std::string shown = label + " " + text_of(tensor);
  check_format(argument, tensor.format, shown);
  if (device_bound_ && tensor.device != device_)
    fail("device", argument.name, shown, " is on ", word_of(tensor.device), " and must be on ", word_of(device_),
         ", as ", device_by_);
  device_ = tensor.device;
  device_bound_ = true;
  device_by_ = shown;
  if (argument.dims_text == "*") {
    // members of lists may differ in shape: a state is seen as [1, n], its parameter is not
    if (any.bound && is_list(argument.mode) && any.shape.numel() != tensor.shape.numel())
      fail("shape", argument.name, shown, " must have ", any.shape.numel(), " elements, as ", any.by);
    if (any.bound && !is_list(argument.mode) && !(any.shape == tensor.shape))
      fail("shape", argument.name, shown, " must have the shape ", text_of(any.shape), ", as ", any.by);
    any = {true, tensor.shape, shown};
    return;
  }
  if (tensor.shape.rank != static_cast<int>(argument.dims.size()))
    fail("shape", argument.name, shown, " must have ", argument.dims.size(),
         argument.dims.size() == 1 ? " size [" : " sizes [", argument.dims_text, "]");
  for (int i = 0; i < tensor.shape.rank; ++i) {
    const Dim& dim = argument.dims[i];
    const int64_t size = tensor.shape.dims[i];
    char unknown = 0;
    for (const auto& token : dim.tokens)
      if (std::isupper(token.kind) && letters_[token.kind - 'A'].value < 0) unknown = token.kind;
    if (unknown) {  // sizes are linear in the one letter that is not bound yet
      const int64_t base = evaluate(dim, unknown, 0), slope = evaluate(dim, unknown, 1) - base;
      if (slope <= 0 || size < base || (size - base) % slope != 0)
        fail("shape", argument.name, shown, " must have size ", dim.text, letters_text(dim), " in dimension ", i,
             ", which ", size, " is not");
      letters_[unknown - 'A'] = {(size - base) / slope, std::string(1, unknown) + " = " +
                                                            std::to_string((size - base) / slope) + ", as in " + shown};
    } else if (evaluate(dim, 0, 0) != size) {
      if (is_letter(dim.text)) fail("shape", argument.name, shown, " must have ", letters_[dim.text[0] - 'A'].by);
      fail("shape", argument.name, shown, " must have ", dim.text, " = ", evaluate(dim, 0, 0), " in dimension ", i,
           letters_text(dim));
    }
  }
}

void Contract::remember(const Argument& argument, const Format& format, int64_t index) {
  for (size_t o = 0; o < op_.only.size(); ++o) {
    const auto& names = op_.only[o].names;
    auto& seen = only_seen_[o];
    for (size_t i = 0; i < names.size(); ++i)
      if (names[i] == argument.name) {
        if (seen.size() <= static_cast<size_t>(index)) seen.resize(index + 1);
        seen[index].resize(names.size());
        seen[index][i] = format;
      }
  }
}

void Contract::list_length(const Argument& argument, int64_t length) {
  if (length_ >= 0 && length != length_)
    fail("shape", argument.name, argument.name, " has ", length, " tensors and must have ", length_, ", as ",
         length_by_);
  length_ = length;
  length_by_ = argument.name;
  letters_['L' - 'A'] = {length, "L = " + std::to_string(length) + ", as in " + argument.name};
  any_items_.resize(length);
}

void Contract::list_item(const Argument& argument, int64_t index, const Tensor& tensor) {
  check(argument, tensor, argument.name + "[" + std::to_string(index) + "]", any_items_[index]);
  remember(argument, tensor.format, index);
}

void Contract::output_format(const Argument& argument, const Format& format) {
  check_format(argument, format, argument.name + " " + word_of(format));
  remember(argument, format, 0);
}

namespace {
std::string word_or_none(const std::optional<Format>& format) { return format ? word_of(*format) : "none"; }
}  // namespace

void Contract::finish() {
  for (size_t o = 0; o < op_.only.size(); ++o)
    for (const auto& item : only_seen_[o]) {
      const Only& only = op_.only[o];
      bool legal = item.empty();
      std::string seen, rows;
      for (const auto& row : only.words) legal = legal || row == item;
      if (legal) continue;
      for (size_t i = 0; i < only.names.size(); ++i)
        seen += (i ? ", " : "") + only.names[i] + " " + word_or_none(item[i]);
      for (const auto& row : only.words) {
        rows += rows.empty() ? "" : "; ";
        for (size_t i = 0; i < row.size(); ++i) rows += (i ? ", " : "") + word_or_none(row[i]);
      }
      fail("format", only.names[0], seen,
           only.words.empty() ? "" : " is not a combination of this op, which has: ", rows);
    }
}

Shape Contract::output_shape(const Argument& argument) const {
  if (argument.dims_text == "*") return any_.shape;
  Shape shape;
  for (const auto& dim : argument.dims) shape.dims[shape.rank++] = evaluate(dim, 0, 0);
  return shape;
}

void check_row_not_empty(const Tensor& x, const char* argument) {
  if (x.shape.cols() == 0) fail("shape", argument, argument, " ", text_of(x), " must have at least one column");
}

void check_apart(const char* argument, const Tensor& changed, const Tensor& read) {
  if (changed.data == read.data && changed.shape.numel() > 0)
    fail("value", argument, argument, " ", text_of(read), " must be another tensor than the one that is changed");
}

void check_heads(int64_t rows, int64_t T, int64_t H, int64_t J, int64_t window) {
  if (T < 1) fail("value", "T", "T is ", T, " and must be at least 1");
  if (rows % T != 0) fail("value", "T", "T is ", T, " and must divide B*T = ", rows);
  if (J < 1 || H % J != 0) fail("value", "J", "J is ", J, " and must divide H = ", H);
  if (window < 0) fail("value", "window", "window is ", window, " and must be at least 0");
}

void check_cached(int64_t M, int64_t T, int64_t H, int64_t J, int64_t first, int64_t window) {
  if (J < 1 || H % J != 0) fail("value", "J", "J is ", J, " and must divide H = ", H);
  if (first < 0 || first > T - M)
    fail("value", "first", "first is ", first, " and must be from 0 to T - M = ", T - M, ", so that the rows fit");
  if (window < 0) fail("value", "window", "window is ", window, " and must be at least 0");
}

void check_rotation(int64_t D, int64_t direction) {
  if (D % 2 != 0) fail("value", "D", "D is ", D, " and must be even, because rope turns pairs");
  if (direction != 1 && direction != -1) fail("value", "direction", "direction is ", direction, " and must be 1 or -1");
}

void check_slice(const char* argument, int64_t first, int64_t count, int64_t size) {
  if (first < 0 || first > size - count)
    fail("value", argument, argument, " is ", first, " and must be from 0 to ", size - count, ", since ", count, " of ",
         size, " are meant");
}

void check_flat(const char* argument, const std::vector<Tensor>& states) {
  for (const Tensor& t : states)
    if (t.format.scaling == Scaling::run && t.shape.rows() != 1)
      fail("shape", argument, argument, " ", text_of(t), " must have the shape [1, ", t.shape.numel(), "]");
}

void check_accumulate(int32_t accumulate, const Tensor& a, const Tensor& b) {
  const bool first = a.format.scaling != Scaling::tensor;
  if (accumulate == kFast && (first || b.format.scaling != Scaling::tensor))
    fail("value", "accumulate", "accumulate is fast and must be split where ", first ? "a" : "b", " is ",
         text_of(first ? a : b), ": only sums of operands with one scale stay in the tensor cores");
}

void check_rounding(int32_t rounding, const std::vector<Tensor>& p, const std::vector<Tensor>& master,
                    const std::vector<Tensor>& lost) {
  if (rounding != kNearest && !master.empty())
    fail("value", "rounding", "rounding is ", rounding == kKahan ? "kahan" : "stochastic",
         " and must be nearest with a master, which loses nothing");
  if ((rounding == kKahan) != !lost.empty() && !p.empty())
    fail("value", "lost", "lost is ", lost.empty() ? "absent" : "given", " and must be given with rounding kahan only");
  if (rounding != kStochastic) return;
  for (size_t i = 0; i < p.size(); ++i)
    if (p[i].format.dtype != DType::bf16)
      fail("format", "p", "p[", i, "] ", text_of(p[i]), " must be bf16 with rounding stochastic");
}

}  // namespace coat
