// Node's view: tensors behind number handles, memory, and one function a line of ops.def. With arguments.h and reader.h
// all that knows Node.
#include <napi.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "arguments.h"
#include "contract.h"
#include "cpu/parallel.h"
#include "cuda/device.h"
#include "describe.h"
#include "memory.h"
#include "ops.h"
#include "profile.h"
#include "reader.h"

namespace coat {
namespace {

bool guard_wanted() {
  const char* text = std::getenv("COAT_GUARD");
  return text && *text && std::strcmp(text, "0") != 0;
}

// An array of what `make` makes of each item.
template <class Items, class Make>
Napi::Array array_of(Napi::Env env, const Items& items, Make&& make) {
  auto list = Napi::Array::New(env);
  for (const auto& item : items) list.Set(list.Length(), make(item));
  return list;
}
Napi::Array array_of(Napi::Env env, const std::vector<std::string>& words) {
  return array_of(env, words, [&](const std::string& word) { return Napi::String::New(env, word); });
}
Napi::Array array_of(Napi::Env env, const Shape& shape) {
  const std::vector<int64_t> sizes(shape.dims, shape.dims + shape.rank);
  return array_of(env, sizes, [&](int64_t size) { return Napi::Number::New(env, static_cast<double>(size)); });
}

// Whether an argument is not given by the caller: an output with one legal format.
bool is_silent(const Argument& argument) { return argument.mode == Mode::out && argument.formats.size() == 1; }

// Where each argument of an op stands among the JavaScript arguments; -1: it takes none, its format is the only legal
// one.
std::vector<int> positions_of(const Op& op) {
  std::vector<int> positions;
  int next = 0;
  for (const auto& argument : op.arguments) {
    positions.push_back(is_silent(argument) ? -1 : next++);
  }
  return positions;
}

class Addon {
 public:
  Memory memory{guard_wanted()};
  Napi::FunctionReference error_class;
  std::vector<std::vector<int>> positions;

  Reader reader;
  cuda::Marks marks;
  std::unique_ptr<Profile> profile = Profile::wanted();

  explicit Addon(Napi::Env env) : reader(env) {
    for (const auto& op : table()) positions.push_back(positions_of(op));
    reader.make_error = [this, env](const Error& error) {
      return error_value(env, "read", error.code, error.argument, "read: " + error.message);
    };
  }

  Napi::Value error_value(Napi::Env env, const char* op, const std::string& code, const std::string& argument,
                          const std::string& message) {
    const auto text = Napi::String::New(env, message);
    if (error_class.IsEmpty()) return Napi::Error::New(env, message).Value();
    return error_class.New(
        {text, Napi::String::New(env, code), Napi::String::New(env, op), Napi::String::New(env, argument)});
  }

  // Runs f and turns what it throws into the CoatError class that JavaScript handed over.
  template <class F>
  Napi::Value guarded(Napi::Env env, const char* op, F&& f) {
    std::string code, argument, message;
    try {
      if constexpr (!std::is_void_v<decltype(f())>) return f();
      f();
      return env.Undefined();
    } catch (const Error& error) {
      code = error.code;
      argument = error.argument;
      message = std::string(error.op.empty() ? op : error.op) + ": " + error.message;
    } catch (const std::bad_alloc&) {
      code = "out_of_memory";
      message = std::string(op) + ": out of memory on cpu";
    } catch (const Napi::Error&) {
      throw;
    } catch (const std::exception& error) {
      code = "internal";
      message = std::string(op) + ": " + error.what();
    }
    throw Napi::Error(env, error_value(env, op, code, argument, message));
  }
};

// One call of one op: reads the arguments, checks them against the table, makes the outputs, runs.
template <class Arguments>
class Call {
 public:
  Call(const Napi::CallbackInfo& info, Addon& addon, const Op& op, const std::vector<int>& positions)
      : info_(info), addon_(addon), op_(op), positions_(positions), contract_(op) {}

  Napi::Value run() {
    int expected = 0, left_out = 0;
    for (int position : positions_) expected += position >= 0 ? 1 : 0;
    for (const Argument& argument : op_.arguments) left_out += argument.mode == Mode::opt_word ? 1 : 0;
    if (op_.is_source()) contract_.set_device(parse_device(text_argument(info_[expected++], "device")));
    const int given = static_cast<int>(info_.Length());
    if (given > expected || given < expected - left_out)
      fail("arguments", "", "takes ", expected, " arguments and was given ", given);
    each([&](const Argument& argument, const Napi::Value& value, auto& field) { read_number(argument, value, field); });
    each([&](const Argument& argument, const Napi::Value& value, auto& field) { read_tensor(argument, value, field); });
    contract_.finish();
    args_.device = contract_.device();
    try {
      each([&](const Argument& argument, const Napi::Value& value, auto& field) {
        make_output(argument, value, field);
      });
      if (addon_.profile)
        profiled(*addon_.profile);
      else
        coat::run(args_);
    } catch (...) {
      for (double handle : made_) addon_.memory.free(handle);
      throw;
    }
    for (double handle : changed_) addon_.memory.changed(handle);
    if (results_.empty()) return info_.Env().Undefined();
    if (results_.size() == 1) return results_[0];
    auto all = Napi::Array::New(info_.Env(), results_.size());
    for (size_t i = 0; i < results_.size(); ++i) all.Set(static_cast<uint32_t>(i), results_[i]);
    return all;
  }

 private:
  template <class F>
  void each(F&& f) {
    size_t i = 0;
    visit(args_, [&](const char*, auto& field) {
      const int position = positions_[i];
      f(op_.arguments[i++], position < 0 ? info_.Env().Undefined() : info_[position], field);
    });
  }

  void profiled(Profile& profile) {
    profile.begin(op_, args_.device);
    for (char letter = 'A'; letter <= 'Z'; ++letter)
      if (contract_.letter(letter) >= 0) profile.size(std::string(1, letter), contract_.letter(letter));
    each([&](const Argument& argument, const Napi::Value&, auto& field) { profile.argument(argument, field); });
    profile.start();
    coat::run(args_);
    profile.end();
  }

  void read_number(const Argument& argument, const Napi::Value& value, float& field) {
    field = static_cast<float>(number_argument(value, argument.name));
  }
  void read_number(const Argument& argument, const Napi::Value& value, int64_t& field) {
    field = integer_argument(value, argument.name);
    contract_.number(argument, field);
  }
  void read_number(const Argument& argument, const Napi::Value& value, uint64_t& field) {
    const int64_t seed = integer_argument(value, argument.name);
    if (seed < 0) fail("value", argument.name, argument.name, " is ", seed, " and must not be negative");
    field = static_cast<uint64_t>(seed);
  }
  void read_number(const Argument& argument, const Napi::Value& value, int32_t& field) {
    if (is_optional(argument.mode) && absent(argument, value)) return;
    field = position_of(text_argument(value, argument.name), argument.words, "value", argument.name);
  }
  template <class T>
  void read_number(const Argument&, const Napi::Value&, T&) {}

  bool absent(const Argument& argument, const Napi::Value& value) {
    if (!value.IsNull() && !value.IsUndefined()) return false;
    if (!is_optional(argument.mode)) fail("type", argument.name, argument.name, " is missing");
    return true;
  }
  void read_tensor(const Argument& argument, const Napi::Value& value, Tensor& field) {
    if (is_output(argument.mode)) {
      if (argument.mode == Mode::opt_out && absent(argument, value)) return;
      field.format =
          is_silent(argument) ? argument.formats[0] : parse_format(text_argument(value, argument.name), argument.name);
      contract_.output_format(argument, field.format);
      return;
    }
    if (absent(argument, value)) return;
    const double handle = number_argument(value, argument.name);
    field = addon_.memory.use(handle, argument.name);
    contract_.input(argument, field);
    if (is_changed(argument.mode)) changed_.push_back(handle);
  }
  void read_tensor(const Argument& argument, const Napi::Value& value, std::vector<Tensor>& field) {
    if (absent(argument, value)) return;
    if (!value.IsArray())
      fail("type", argument.name, argument.name, " is ", value.ToString().Utf8Value(),
           " and must be a list of tensors");
    const auto list = value.As<Napi::Array>();
    contract_.list_length(argument, list.Length());
    for (uint32_t i = 0; i < list.Length(); ++i) {
      const std::string label = argument.name + "[" + std::to_string(i) + "]";
      const double handle = number_argument(list.Get(i), label);
      field.push_back(addon_.memory.use(handle, label));
      contract_.list_item(argument, i, field.back());
      if (is_changed(argument.mode)) changed_.push_back(handle);
    }
  }
  template <class T>
  void read_tensor(const Argument&, const Napi::Value&, T&) {}

  void make_output(const Argument& argument, const Napi::Value& value, Tensor& field) {
    if (!is_output(argument.mode)) return;
    if (argument.mode == Mode::opt_out && (value.IsNull() || value.IsUndefined())) {
      results_.push_back(info_.Env().Null());
      return;
    }
    const double handle =
        addon_.memory.make(field.format, contract_.output_shape(argument), args_.device, Purpose::temp);
    made_.push_back(handle);
    field = addon_.memory.get(handle, argument.name);
    results_.push_back(Napi::Number::New(info_.Env(), handle));
  }
  template <class T>
  void make_output(const Argument&, const Napi::Value&, T&) {}

  const Napi::CallbackInfo& info_;
  Addon& addon_;
  const Op& op_;
  const std::vector<int>& positions_;
  Contract contract_;
  Arguments args_;
  std::vector<double> made_, changed_;
  std::vector<Napi::Value> results_;
};

Addon& addon_of(const Napi::CallbackInfo& info) { return *info.Env().GetInstanceData<Addon>(); }

template <class Arguments, int Index>
Napi::Value call(const Napi::CallbackInfo& info) {
  Addon& addon = addon_of(info);
  const Op& op = table()[Index];
  return addon.guarded(info.Env(), op.name.c_str(),
                       [&] { return Call<Arguments>(info, addon, op, addon.positions[Index]).run(); });
}

// ---- tensors and memory ----

Napi::Value make(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "make", [&]() -> Napi::Value {
    const Format format = parse_format(text_argument(info[0], "format"), "format");
    return Napi::Number::New(info.Env(), addon_of(info).memory.make(format, shape_argument(info[1]),
                                                                    parse_device(text_argument(info[2], "device")),
                                                                    parse_purpose(text_argument(info[3], "purpose"))));
  });
}

Napi::Value free(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "free",
                                [&] { addon_of(info).memory.free(number_argument(info[0], "tensor")); });
}

// What a graph cannot hold: the host would have to take part whenever it runs.
void expect_unrecorded(Device device, const char* what) {
  if (Graph::records(device))
    fail("graph", "device", "a graph of device \"", word_of(device), "\" is being recorded, and ", what,
         " cannot be part of it");
}

// write(tensor, bytes): codes, then scales, as many bytes as the tensor has.
Napi::Value write(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "write", [&] {
    const double handle = number_argument(info[0], "tensor");
    const Tensor& tensor = addon_of(info).memory.get(handle, "tensor");
    if (!info[1].IsTypedArray()) fail("type", "bytes", "bytes must be a typed array");
    const auto bytes = info[1].As<Napi::TypedArray>();
    if (!bytes.Get("buffer").IsArrayBuffer()) fail("type", "bytes", "bytes must not lie in shared memory");
    expect_unrecorded(tensor.device, "values that come from the host");
    const int64_t expected = bytes_of(tensor.format, tensor.shape);
    if (static_cast<int64_t>(bytes.ByteLength()) != expected)
      fail("shape", "bytes", "bytes has ", bytes.ByteLength(), " bytes and ", text_of(tensor), " has ", expected);
    const uint8_t* from = static_cast<uint8_t*>(bytes.ArrayBuffer().Data()) + bytes.ByteOffset();
    if (tensor.device == Device::cuda)
      cuda::copy_in(tensor.data, from, expected);
    else
      std::memcpy(tensor.data, from, expected);
    addon_of(info).memory.changed(handle);
  });
}

// fill(tensor, value): every element of an f32 or i32 tensor.
Napi::Value fill(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "fill", [&] {
    const double handle = number_argument(info[0], "tensor");
    const Tensor& tensor = addon_of(info).memory.get(handle, "tensor");
    const bool whole = tensor.format == Format{DType::i32};
    if (!whole && tensor.format != Format{DType::f32})
      fail("format", "tensor", "tensor ", text_of(tensor), " must be f32 or i32");
    const uint32_t bits = whole ? static_cast<uint32_t>(integer_argument(info[1], "value"))
                                : std::bit_cast<uint32_t>(static_cast<float>(number_argument(info[1], "value")));
    addon_of(info).memory.fill(tensor, bits);
    addon_of(info).memory.changed(handle);
  });
}

// read(tensor): a promise of an ArrayBuffer with the bytes of the tensor.
Napi::Value read(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "read", [&]() -> Napi::Value {
    const Tensor& tensor = addon_of(info).memory.get(number_argument(info[0], "tensor"), "tensor");
    expect_unrecorded(tensor.device, "a read");
    const int64_t bytes = bytes_of(tensor.format, tensor.shape);
    if (tensor.device == Device::cuda) return addon_of(info).reader.read(tensor.data, bytes);
    auto buffer = Napi::ArrayBuffer::New(info.Env(), bytes);
    if (bytes) std::memcpy(buffer.Data(), tensor.data, bytes);
    auto deferred = Napi::Promise::Deferred::New(info.Env());
    deferred.Resolve(buffer);
    return deferred.Promise();
  });
}

// open(device): says what the device is; throws no_cuda with what was found when it cannot be used.
Napi::Value open(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "open", [&]() -> Napi::Value {
    const Device device = parse_device(text_argument(info[0], "device"));
    return Napi::String::New(info.Env(), device == Device::cuda ? cuda::open() : std::string("CPU with AVX2"));
  });
}

// sync(device): a promise that everything queued on the device is done. A profile is written first.
Napi::Value sync(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "sync", [&]() -> Napi::Value {
    const Device device = parse_device(text_argument(info[0], "device"));
    expect_unrecorded(device, "a wait");
    if (addon_of(info).profile) addon_of(info).profile->flush();
    if (device == Device::cuda) return addon_of(info).reader.read(nullptr, 0);
    auto deferred = Napi::Promise::Deferred::New(info.Env());
    deferred.Resolve(info.Env().Undefined());
    return deferred.Promise();
  });
}

// note(name, device): a point in time of the profile, where there is one.
Napi::Value note(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "note", [&] {
    if (addon_of(info).profile)
      addon_of(info).profile->note(text_argument(info[0], "name"), parse_device(text_argument(info[1], "device")));
  });
}

// mark(), elapsed(from, to), forgetMarks(): the clock of the CUDA device.
Napi::Value mark(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "mark", [&]() -> Napi::Value {
    expect_unrecorded(Device::cuda, "a point in time");
    return Napi::Number::New(info.Env(), static_cast<double>(addon_of(info).marks.set()));
  });
}
Napi::Value elapsed(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "elapsed", [&]() -> Napi::Value {
    return Napi::Number::New(
        info.Env(), addon_of(info).marks.between(integer_argument(info[0], "from"), integer_argument(info[1], "to")));
  });
}
Napi::Value forget_marks(const Napi::CallbackInfo& info) {
  addon_of(info).marks.forget();
  return info.Env().Undefined();
}

// beginGraph(device, reserve), endGraph(keep), runGraph(graph), freeGraph(graph): ops recorded, and run as one.
Napi::Value begin_graph(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "graph", [&] {
    if (addon_of(info).profile)
      fail("graph", "device", "COAT_PROFILE takes the time of every op, which cannot be recorded; unset it");
    addon_of(info).memory.begin(parse_device(text_argument(info[0], "device")), integer_argument(info[1], "reserve"));
  });
}
Napi::Value end_graph(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "graph", [&]() -> Napi::Value {
    const int64_t graph = addon_of(info).memory.end(info[0].ToBoolean().Value());
    return Napi::Number::New(info.Env(), static_cast<double>(graph));
  });
}
Napi::Value run_graph(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "graph",
                                [&] { addon_of(info).memory.run(integer_argument(info[0], "graph")); });
}
Napi::Value free_graph(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "graph",
                                [&] { addon_of(info).memory.drop(integer_argument(info[0], "graph")); });
}

// baseline(suggestion): products on CUDA by cuBLASLt, below 0 no longer; returns whether it is there.
Napi::Value baseline(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), cuda::choose_cublaslt(info[0].ToNumber().Int32Value()));
}

Napi::Value info_of(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "info", [&]() -> Napi::Value {
    const Tensor& tensor = addon_of(info).memory.get(number_argument(info[0], "tensor"), "tensor");
    auto result = Napi::Object::New(info.Env());
    result.Set("format", word_of(tensor.format));
    result.Set("shape", array_of(info.Env(), tensor.shape));
    result.Set("device", word_of(tensor.device));
    result.Set("bytes", static_cast<double>(bytes_of(tensor.format, tensor.shape)));
    return result;
  });
}

Napi::Value retag(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "retag", [&] {
    addon_of(info).memory.retag(number_argument(info[0], "tensor"), parse_purpose(text_argument(info[1], "purpose")));
  });
}

Napi::Value version(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "version", [&]() -> Napi::Value {
    return Napi::Number::New(info.Env(),
                             static_cast<double>(addon_of(info).memory.version(number_argument(info[0], "tensor"))));
  });
}

Napi::Value memory(const Napi::CallbackInfo& info) {
  const Memory& memory = addon_of(info).memory;
  const auto& usage = memory.usage();
  auto result = Napi::Object::New(info.Env()), live = Napi::Object::New(info.Env()),
       peak = Napi::Object::New(info.Env()), at_peak = Napi::Object::New(info.Env());
  for (int i = 0; i < kPurposeCount; ++i) {
    live.Set(kPurposes[i], static_cast<double>(usage.live[i]));
    peak.Set(kPurposes[i], static_cast<double>(usage.peak[i]));
    at_peak.Set(kPurposes[i], static_cast<double>(usage.at_peak[i]));
  }
  live.Set("total", static_cast<double>(usage.live_total));
  peak.Set("total", static_cast<double>(usage.peak_total));
  at_peak.Set("total", static_cast<double>(usage.peak_total));
  result.Set("live", live);
  result.Set("peak", peak);
  result.Set("atPeak", at_peak);
  result.Set("tensors", static_cast<double>(usage.tensors));
  result.Set("infs", static_cast<double>(memory.infs()));
  return result;
}

// pool(): what the device's pool holds; null before a tensor is there.
Napi::Value pool(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "pool", [&]() -> Napi::Value {
    if (!addon_of(info).memory.on_device()) return info.Env().Null();
    const cuda::Pool pool = cuda::pool();
    auto result = Napi::Object::New(info.Env());
    const auto set = [&](const char* name, int64_t bytes) { result.Set(name, static_cast<double>(bytes)); };
    set("used", pool.used);
    set("usedPeak", pool.used_peak);
    set("reserved", pool.reserved);
    set("reservedPeak", pool.reserved_peak);
    set("free", pool.free);
    set("total", pool.total);
    return result;
  });
}

// memoryLimit() or memoryLimit(bytes): the most bytes that tensors may hold together; 0: no limit.
Napi::Value memory_limit(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "memoryLimit", [&]() -> Napi::Value {
    Memory& memory = addon_of(info).memory;
    if (info.Length() > 0) {
      const int64_t bytes = integer_argument(info[0], "bytes");
      if (bytes < 0) fail("value", "bytes", "bytes is ", bytes, " and must not be negative");
      memory.limit(bytes);
    }
    return Napi::Number::New(info.Env(), static_cast<double>(memory.limit()));
  });
}

Napi::Value reset_peak(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "resetPeak", [&] { addon_of(info).memory.reset_peak(); });
}

Napi::Value check_guards(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "checkGuards", [&] { addon_of(info).memory.check_guards(); });
}

// threads() or threads(count): how many threads take part in an op of the CPU backend.
Napi::Value threads(const Napi::CallbackInfo& info) {
  return addon_of(info).guarded(info.Env(), "threads", [&]() -> Napi::Value {
    if (info.Length() > 0) cpu::set_threads(integer_argument(info[0], "threads"));
    return Napi::Number::New(info.Env(), cpu::threads());
  });
}

// ---- the table, for the test harness and the bench ----

Napi::Value table_object(const Napi::CallbackInfo& info) {
  const auto env = info.Env();
  const auto word = [&](const std::optional<Format>& format) {
    return format ? Napi::Value(Napi::String::New(env, word_of(*format))) : env.Null();
  };
  const auto argument_object = [&](const Argument& argument) {
    auto entry = Napi::Object::New(env);
    entry.Set("mode", kModes[static_cast<int>(argument.mode)]);
    entry.Set("name", argument.name);
    entry.Set("formats", array_of(env, argument.formats, word));
    entry.Set("dims", argument.dims_text);
    entry.Set("words", array_of(env, argument.words));
    return entry;
  };
  const auto only_object = [&](const Only& only) {
    auto entry = Napi::Object::New(env);
    entry.Set("names", array_of(env, only.names));
    entry.Set("combinations", array_of(env, only.words, [&](const auto& row) { return array_of(env, row, word); }));
    return entry;
  };
  return array_of(env, table(), [&](const Op& op) {
    auto row = Napi::Object::New(env);
    row.Set("family", op.family);
    row.Set("name", op.name);
    row.Set("doc", op.doc);
    row.Set("arguments", array_of(env, op.arguments, argument_object));
    row.Set("only", array_of(env, op.only, only_object));
    return row;
  });
}

Napi::Value describe_text(const Napi::CallbackInfo& info) { return Napi::String::New(info.Env(), describe()); }

Napi::Value set_error_class(const Napi::CallbackInfo& info) {
  if (!info[0].IsFunction()) throw Napi::TypeError::New(info.Env(), "setErrorClass: needs a constructor");
  addon_of(info).error_class = Napi::Persistent(info[0].As<Napi::Function>());
  return info.Env().Undefined();
}

Napi::Object init(Napi::Env env, Napi::Object exports) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    throw Napi::Error::New(env, "coat-fp8: this processor lacks AVX2 or FMA, which the CPU backend needs");
  env.SetInstanceData(new Addon(env));
  const auto set = [&](const char* name, Napi::Value (*function)(const Napi::CallbackInfo&)) {
    exports.Set(name, Napi::Function::New(env, function, name));
  };
#define OP(family, op_name, doc, ...) set(#op_name, call<op_name##_args, kOp_##op_name>);
#include "ops.def"
#undef OP
  set("make", make);
  set("free", free);
  set("write", write);
  set("fill", fill);
  set("read", read);
  set("open", open);
  set("sync", sync);
  set("note", note);
  set("mark", mark);
  set("elapsed", elapsed);
  set("forgetMarks", forget_marks);
  set("beginGraph", begin_graph);
  set("endGraph", end_graph);
  set("runGraph", run_graph);
  set("freeGraph", free_graph);
  set("baseline", baseline);
  set("info", info_of);
  set("retag", retag);
  set("version", version);
  set("memory", memory);
  set("pool", pool);
  set("memoryLimit", memory_limit);
  set("resetPeak", reset_peak);
  set("checkGuards", check_guards);
  set("threads", threads);
  set("table", table_object);
  set("describe", describe_text);
  set("setErrorClass", set_error_class);
  return exports;
}

}  // namespace

NODE_API_MODULE(coat_fp8, init)

}  // namespace coat
