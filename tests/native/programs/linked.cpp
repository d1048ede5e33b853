// A program linked with -lcuda meets the proxy, reaches the driver through it, and finds what only the driver has.
#include <fstream>
#include <string>
#include <vector>

#include "check.h"

namespace {

void every_function_is_exported() {
  void* proxy = dlopen(PROXY, RTLD_NOW | RTLD_NOLOAD);
  CHECK(proxy != nullptr);
  std::ifstream names(EXPORTS);
  std::string name;
  int count = 0;
  while (names >> name) {
    void* found = dlsym(proxy, name.c_str());
    if (found == nullptr || std::strcmp(file_of(found), PROXY) != 0) std::fprintf(stderr, "%s\n", name.c_str());
    CHECK(found != nullptr && std::strcmp(file_of(found), PROXY) == 0);
    ++count;
  }
  CHECK(count > 700);
}

void nothing_else_is_exported() {
  // A symbol of the C++ library or of the proxy's own that other libraries could bind to.
  void* proxy = dlopen(PROXY, RTLD_NOW | RTLD_NOLOAD);
  for (const char* name : {"_ZSt9terminatev", "_Znwm", "moorage_real_table", "moorage_absent"}) {
    void* found = dlsym(proxy, name);
    CHECK(found == nullptr || std::strcmp(file_of(found), PROXY) != 0);
  }
}

void work_reaches_the_device() {
  begin();
  CUdeviceptr memory = 0;
  std::vector<int> numbers(1000, 1);
  std::size_t count = numbers.size();
  OK(cuMemAlloc_v2(&memory, count * sizeof(int)));
  OK(cuMemcpyHtoD_v2(memory, numbers.data(), count * sizeof(int)));
  int by = 41;
  OK(launch("add", nullptr, &memory, &by, &count));
  OK(cuCtxSynchronize());
  OK(cuMemcpyDtoH_v2(numbers.data(), memory, count * sizeof(int)));
  for (const int number : numbers) CHECK(number == 42);
  OK(cuMemFree_v2(memory));
}

void what_the_driver_lacks_is_not_supported() {
  // In the header, but younger than the fake driver.
  ANSWERS(CUDA_ERROR_NOT_SUPPORTED, cuMemcpyWithAttributesAsync(0, 0, 0, nullptr, nullptr));
  ANSWERS(CUDA_ERROR_NOT_SUPPORTED, (beyond<int()>("cuGLInit")()));
}

void what_only_the_driver_has_is_found() {
  auto* future = beyond<int(int)>("cuFakeFuture");
  CHECK(std::strcmp(file_of(reinterpret_cast<void*>(future)), REAL) == 0);
  CHECK(future(21) == 42);
  const void* table = nullptr;
  CUuuid id{};
  ANSWERS(CUDA_ERROR_INVALID_VALUE, cuGetExportTable(&table, &id));
  id.bytes[0] = static_cast<char>(0xAB);
  OK(cuGetExportTable(&table, &id));
  auto* function = reinterpret_cast<int (*)(int)>(const_cast<void*>(static_cast<const void* const*>(table)[1]));
  CHECK(function(1) == 2);
  CHECK(beyond<int()>("fakePrivateCalls")() == 1);
}

}  // namespace

int main() {
  ANSWERS(CUDA_ERROR_NOT_INITIALIZED, cuCtxSynchronize());
  CHECK(std::strcmp(file_of(reinterpret_cast<void*>(&cuInit)), PROXY) == 0);
  every_function_is_exported();
  nothing_else_is_exported();
  work_reaches_the_device();
  what_the_driver_lacks_is_not_supported();
  what_only_the_driver_has_is_found();
}
