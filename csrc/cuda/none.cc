// Stands in for the CUDA backend when it is not compiled in: the whole list, each entry refuses.
#include "../ops.h"
#include "device.h"

namespace coat::cuda {
namespace {

[[noreturn]] void refuse() {
  fail("no_cuda", "device",
       "device 'cuda' is not there: this build of coat-fp8 has no CUDA backend; use device 'cpu', or build with "
       "COAT_CUDA=on");
}

}  // namespace

#define OP(family, name, doc, ...) \
  void name(const name##_args&) { refuse(); }
#include "../ops.def"
#undef OP

struct Reading::State {};
Reading::Reading(const uint8_t*, int64_t) : state_(nullptr) { refuse(); }
Reading::~Reading() = default;
void Reading::wait() {}
const uint8_t* Reading::host() const { return nullptr; }
std::string open() { refuse(); }
uint8_t* allocate(int64_t) { refuse(); }
void release(uint8_t*) {}
void fill(uint8_t*, int, int64_t) { refuse(); }
void fill_words(uint8_t*, uint32_t, int64_t) { refuse(); }
void check_bytes(const uint8_t*, int, int64_t) { refuse(); }
Pool pool() { refuse(); }
void reset_pool_peak() {}
void copy_in(uint8_t*, const void*, int64_t) { refuse(); }
void synchronize() { refuse(); }
Marks::~Marks() = default;
int64_t Marks::set() { refuse(); }
double Marks::between(int64_t, int64_t) { refuse(); }
struct Graph::State {};
Graph::Graph(int64_t) { refuse(); }
Graph::~Graph() = default;
void Graph::close() {}
void Graph::run() {}
bool choose_cublaslt(int) { return false; }
void launched(const char*) {}
Status* status() { refuse(); }
void close() {}

}  // namespace coat::cuda
