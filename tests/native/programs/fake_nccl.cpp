// Stands for a libnccl: what it allocates is left to the driver.
#include <cstddef>

extern "C" int cuMemAlloc_v2(unsigned long long* pointer, std::size_t size);

extern "C" __attribute__((visibility("default"))) int allocate(unsigned long long* pointer, std::size_t size) {
  const int result = cuMemAlloc_v2(pointer, size);
  return result == 0 && *pointer == 0 ? 1 : result;  // no tail call: the caller is here
}
