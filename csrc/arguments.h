// What JavaScript gives to a native function, read one by one and refused by name.
#pragma once
#include <napi.h>

#include <cmath>
#include <string>

#include "memory.h"

namespace coat {

inline Device parse_device(const std::string& word) {
  if (word == "cpu") return Device::cpu;
  if (word == "cuda") return Device::cuda;
  fail("device", "device", "device is \"", word, "\" and must be \"cpu\" or \"cuda\"");
}

// Where a word stands in a list.
template <class List>
int position_of(const std::string& word, const List& list, const char* code, const std::string& name) {
  std::string known;
  int i = 0;
  for (const auto& entry : list) {
    if (word == entry) return i;
    known += (i++ ? ", " : "") + std::string(entry);
  }
  fail(code, name, name, " is \"", word, "\" and must be one of ", known);
}

inline Purpose parse_purpose(const std::string& word) {
  return static_cast<Purpose>(position_of(word, kPurposes, "purpose", "purpose"));
}

inline std::string text_argument(const Napi::Value& value, const std::string& name) {
  if (!value.IsString()) fail("type", name, name, " is ", value.ToString().Utf8Value(), " and must be a string");
  return value.As<Napi::String>().Utf8Value();
}

inline double number_argument(const Napi::Value& value, const std::string& name) {
  if (!value.IsNumber() || std::isnan(value.As<Napi::Number>().DoubleValue()))
    fail("type", name, name, " is ", value.ToString().Utf8Value(), " and must be a number");
  return value.As<Napi::Number>().DoubleValue();
}

inline int64_t integer_argument(const Napi::Value& value, const std::string& name) {
  const double x = number_argument(value, name);
  if (x != std::floor(x) || std::abs(x) > 9007199254740991.0)
    fail("type", name, name, " is ", x, " and must be an integer below 2^53");
  return static_cast<int64_t>(x);
}

inline Shape shape_argument(const Napi::Value& value) {
  if (!value.IsArray())
    fail("type", "shape", "shape is ", value.ToString().Utf8Value(), " and must be an array of sizes");
  const auto sizes = value.As<Napi::Array>();
  if (sizes.Length() > kMaxRank)
    fail("shape", "shape", "shape has ", sizes.Length(), " sizes and must have at most ", kMaxRank);
  Shape shape;
  shape.rank = static_cast<int>(sizes.Length());
  for (int i = 0; i < shape.rank; ++i) {
    shape.dims[i] = integer_argument(sizes.Get(i), "shape[" + std::to_string(i) + "]");
    if (shape.dims[i] < 0) fail("shape", "shape", "shape[", i, "] is ", shape.dims[i], " and must not be negative");
  }
  return shape;
}

}  // namespace coat
