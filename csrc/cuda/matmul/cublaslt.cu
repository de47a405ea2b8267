// Products by cuBLASLt, to compare with: never needed, loaded when first asked for. The few functions and numbers of
// its interface that are used are declared here, so that nothing of it is needed to build.
#include <dlfcn.h>
#include <library_types.h>

#include "products.cuh"

namespace coat::cuda {
namespace {

constexpr int kCompute32F = 68;                // cublasComputeType_t
constexpr int kTransA = 3, kTransB = 4;        // cublasLtMatmulDescAttributes_t
constexpr int kScaleOfA = 17, kScaleOfB = 18;  // pointers to f32 on the device
constexpr int kFewBits = 25;                   // an int8_t: FP8 sums stay in the tensor cores
constexpr int kMostWorkspace = 1;              // cublasLtMatmulPreferenceAttributes_t
constexpr uint64_t kWorkspace = uint64_t{64} << 20;
constexpr int kSuggestions = 4;

struct Suggestion {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

struct Library {
  int (*create)(void** handle);
  int (*description_create)(void** description, int compute, int scale_type);
  int (*description_set)(void* description, int attribute, const void* value, size_t size);
  int (*description_destroy)(void* description);
  int (*layout_create)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride);
  int (*layout_destroy)(void* layout);
  int (*preference_create)(void** preference);
  int (*preference_set)(void* preference, int attribute, const void* value, size_t size);
  int (*preference_destroy)(void* preference);
  int (*suggest)(void* handle, void* description, void* a, void* b, void* c, void* d, void* preference, int asked,
                 Suggestion* suggestions, int* found);
  int (*multiply)(void* handle, void* description, const float* alpha, const void* a, void* a_layout, const void* b,
                  void* b_layout, const float* beta, const void* c, void* c_layout, void* d, void* d_layout,
                  const uint64_t* algorithm, void* workspace, size_t workspace_size, cudaStream_t stream);
  void* handle = nullptr;  // null: the library is not there

  Library() {
    void* file = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    if (!file) file = dlopen("libcublasLt.so.12", RTLD_NOW | RTLD_LOCAL);
    if (!file) return;
    bool all = true;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(file, name));
      all = all && function;
    };
    find(create, "cublasLtCreate");
    find(description_create, "cublasLtMatmulDescCreate");
    find(description_set, "cublasLtMatmulDescSetAttribute");
    find(description_destroy, "cublasLtMatmulDescDestroy");
    find(layout_create, "cublasLtMatrixLayoutCreate");
    find(layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(preference_create, "cublasLtMatmulPreferenceCreate");
    find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(suggest, "cublasLtMatmulAlgoGetHeuristic");
    find(multiply, "cublasLtMatmul");
    if (all && create(&handle) != 0) handle = nullptr;
  }
};
const Library& library() {
  static const Library* one = new Library;  // never destroyed: threads may end after static objects
  return *one;
}

void require(int status, const char* what) {
  if (status != 0) fail("baseline", "a", "cuBLASLt refuses in ", what, " with status ", status);
}

int type_of(const Tensor& x) {
  switch (x.format.dtype) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::e4m3:
      return CUDA_R_8F_E4M3;
    default:
      return CUDA_R_8F_E5M2;
  }
}

// What is asked of the library for one kind of call, kept for the next: to ask takes longer than many products. Its
// matrices are column-major, so that it is asked for y^T, with b first.
struct Prepared {
  Form form{};
  int types[3]{};  // of a, b, y
  int64_t M = -1, N = 0, K = 0;
  bool promotes = true;
  void *description = nullptr, *layouts[3]{};
  Suggestion suggestions[kSuggestions];
  int found = 0;

  bool fits(const Call& c) const {
    return form == c.form && promotes == c.promotes && M == c.M && N == c.N && K == c.K && types[0] == type_of(c.a) &&
           types[1] == type_of(c.b) && types[2] == type_of(c.y);
  }
  void prepare(const Call& c) {
    const Library& lib = library();
    if (description) lib.description_destroy(description);
    for (void*& layout : layouts)
      if (layout) lib.layout_destroy(layout);
    *this = Prepared{};
    const int along_a = c.form != Form::tn, along_b = c.form == Form::nt;
    const int first = along_b ? 1 : 0, second = along_a ? 0 : 1;  // whether it transposes b and a as it sees them
    require(lib.description_create(&description, kCompute32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    require(lib.description_set(description, kTransA, &first, sizeof first), "cublasLtMatmulDescSetAttribute");
    require(lib.description_set(description, kTransB, &second, sizeof second), "cublasLtMatmulDescSetAttribute");
    if (const int8_t few = 1; !c.promotes)
      require(lib.description_set(description, kFewBits, &few, sizeof few), "cublasLtMatmulDescSetAttribute");
    const Tensor* tensors[3] = {&c.b, &c.a, &c.y};
    for (int i = 0; i < 3; ++i) {
      const int64_t* dims = tensors[i]->shape.dims;
      require(lib.layout_create(&layouts[i], type_of(*tensors[i]), static_cast<uint64_t>(dims[1]),
                                static_cast<uint64_t>(dims[0]), dims[1]),
              "cublasLtMatrixLayoutCreate");
    }
    set_scales(c);
    void* preference;
    require(lib.preference_create(&preference), "cublasLtMatmulPreferenceCreate");
    lib.preference_set(preference, kMostWorkspace, &kWorkspace, sizeof kWorkspace);
    const int status = lib.suggest(lib.handle, description, layouts[0], layouts[1], layouts[2], layouts[2], preference,
                                   kSuggestions, suggestions, &found);
    lib.preference_destroy(preference);
    require(status, "cublasLtMatmulAlgoGetHeuristic");
    form = c.form, promotes = c.promotes, M = c.M, N = c.N, K = c.K;
    types[0] = type_of(c.a), types[1] = type_of(c.b), types[2] = type_of(c.y);
  }
  void set_scales(const Call& c) const {
    const Result result = c.result();
    if (result.b_scale)
      require(library().description_set(description, kScaleOfA, &result.b_scale, sizeof result.b_scale), "scale of b");
    if (result.a_scale)
      require(library().description_set(description, kScaleOfB, &result.a_scale, sizeof result.a_scale), "scale of a");
  }
};

thread_local int chosen = -1;
thread_local Prepared prepared;

}  // namespace

bool choose_cublaslt(int suggestion) {
  chosen = suggestion;
  return suggestion >= 0 && library().handle != nullptr;
}

bool multiply_by_cublaslt(const Call& call) {
  if (chosen < 0) return false;
  const Library& lib = library();
  if (!lib.handle) fail("baseline", "a", "cuBLASLt is not there");
  if (call.bias || call.amax || call.y.format.scaling != Scaling::none || call.a.format.run != 0)
    fail("baseline", "y", "cuBLASLt is compared without bias, amax and runs, and with y in f32 and bf16 only");
  if (!prepared.fits(call)) prepared.prepare(call);
  if (chosen >= prepared.found)
    fail("baseline", "a", "cuBLASLt has ", prepared.found, " suggestions, so none with number ", chosen);
  prepared.set_scales(call);
  const float alpha = 1.f, beta = call.into ? 1.f : 0.f;
  const Scratch workspace(kWorkspace);
  require(lib.multiply(lib.handle, prepared.description, &alpha, call.b.data, prepared.layouts[0], call.a.data,
                       prepared.layouts[1], &beta, call.y.data, prepared.layouts[2], call.y.data, prepared.layouts[2],
                       prepared.suggestions[chosen].algorithm, workspace.as<void>(), kWorkspace, stream()),
          "cublasLtMatmul");
  return true;
}

}  // namespace coat::cuda
