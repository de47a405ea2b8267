// Prints ops.def as TypeScript: the text of lib/native.gen.ts.
#include "describe.h"
#include "contract.h"

namespace coat {
namespace {

std::string format_type(const std::vector<Format>& formats) {
  std::string text;
  for (const auto& format : formats) text += (text.empty() ? "'" : " | '") + word_of(format) + "'";
  return text;
}

std::string shape_text(const Argument& argument) {
  std::string text = argument.name + " [";
  if (argument.dims_text == "*") return text + "…]";
  for (size_t i = 0; i < argument.dims.size(); ++i) text += (i ? ", " : "") + argument.dims[i].text;
  return text + "]";
}

std::string signature(const Op& op) {
  std::string parameters, results, shapes;
  int result_count = 0;
  for (const auto& argument : op.arguments) {
    if (!is_number(argument.mode)) shapes += (shapes.empty() ? "" : ", ") + shape_text(argument);
    std::string type;
    if (!argument.words.empty())
      for (const auto& word : argument.words) type += (type.empty() ? "'" : " | '") + word + "'";
    else if (is_number(argument.mode))
      type = "number";
    else if (is_list(argument.mode))
      type = "readonly Handle[]";
    else if (is_output(argument.mode))
      type = argument.formats.size() > 1 || is_optional(argument.mode) ? format_type(argument.formats) : "";
    else
      type = "Handle";
    const bool left_out = argument.mode == Mode::opt_word;
    if (is_optional(argument.mode) && !left_out) type += " | null";
    if (!type.empty())
      parameters += (parameters.empty() ? "" : ", ") + argument.name + (left_out ? "?: " : ": ") + type;
    if (is_output(argument.mode)) {
      results +=
          (results.empty() ? "" : ", ") + argument.name + ": Handle" + (is_optional(argument.mode) ? " | null" : "");
      ++result_count;
    }
  }
  if (op.is_source()) parameters += ", device: 'cpu' | 'cuda'";
  const std::string returns = result_count == 0 ? "void" : result_count == 1 ? "Handle" : "[" + results + "]";
  return "  /** " + op.doc + " " + shapes + ". */\n  " + op.name + "(" + parameters + "): " + returns + "\n";
}

}  // namespace

std::string describe() {
  std::string words;
  for (const auto& row : kFormats) words += (words.empty() ? "'" : " | '") + std::string(row.word) + "'";
  std::string text =
      "// GENERATED from csrc/ops.def by `npm run generate`: the ops of the native addon with dims and formats.\n\n"
      "/** A tensor of the native addon: slot and generation in one number. */\nexport type Handle = number\n\n"
      "/** Every format word (csrc/tensor.h). */\nexport type AnyFormat = " +
      words +
      "\n\n"
      "export interface NativeOps {\n";
  for (const auto& op : table()) text += signature(op);
  return text + "}\n";
}

}  // namespace coat
