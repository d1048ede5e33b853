#include "driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "callers.h"
#include "hooks.h"
#include "real.h"

#ifndef MOORAGE_REAL_LIBCUDA
#error "MOORAGE_REAL_LIBCUDA: the path of the driver's library behind the proxy"
#endif

namespace moorage {

extern void* const kExports[kFunctions];

// Stands in the table for what the driver lacks. The caller cleans up its arguments, so any signature fits.
extern "C" int moorage_absent() { return CUDA_ERROR_NOT_SUPPORTED; }
extern "C" int moorage_no_driver();
extern "C" int moorage_no_driver() { return CUDA_ERROR_STUB_LIBRARY; }

namespace driver {
namespace {

struct Entry {
  std::uintptr_t address = 0;
  std::uint16_t function = 0;
};
std::array<Entry, kFunctions> by_address;
std::size_t known = 0;
std::atomic<bool> ready{false};
std::atomic<unsigned> named{0};
unsigned lacking = 0;

std::mutex mutex;
constexpr std::size_t kUnknownMax = 256;
std::vector<Unknown>* unknowns = nullptr;  // never freed: a thread may call while the process ends

}  // namespace

bool load() {
  // A dependency of this library under the very same path: it is there already, this only finds it.
  void* handle = dlopen(MOORAGE_REAL_LIBCUDA, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == nullptr || dlsym(handle, "cuInit") == nullptr) {
    const char* why = handle == nullptr ? "is not loaded" : "has no function cuInit";
    std::fprintf(stderr, "moorage: the CUDA driver's own library %s %s: no CUDA in this process\n",
                 MOORAGE_REAL_LIBCUDA, why);
    for (void*& entry : real::moorage_real_table) entry = reinterpret_cast<void*>(&moorage_no_driver);
    return false;
  }
  if (dlsym(handle, "cuInit") == kExports[static_cast<std::size_t>(Fn::cuInit)]) {
    std::fprintf(stderr, "moorage: %s is the proxy itself, not the CUDA driver: no CUDA in this process\n",
                 MOORAGE_REAL_LIBCUDA);
    for (void*& entry : real::moorage_real_table) entry = reinterpret_cast<void*>(&moorage_no_driver);
    return false;
  }
  for (std::size_t i = 0; i < kFunctions; ++i) {
    void* address = dlsym(handle, kNames[i]);
    if (address == nullptr) {
      ++lacking;
      continue;
    }
    real::moorage_real_table[i] = address;
    by_address[known++] = {reinterpret_cast<std::uintptr_t>(address), static_cast<std::uint16_t>(i)};
  }
  std::sort(by_address.begin(), by_address.begin() + static_cast<std::ptrdiff_t>(known),
            [](const Entry& a, const Entry& b) { return a.address < b.address; });
  callers::learn_driver(dlsym(handle, "cuInit"));
  return true;
}

bool initialised() { return ready.load(std::memory_order_acquire); }
void set_initialised() { ready.store(true, std::memory_order_release); }

void* exported(Fn function) { return kExports[static_cast<std::size_t>(function)]; }

void* proxy_for(const void* address) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  const auto end = by_address.begin() + static_cast<std::ptrdiff_t>(known);
  const auto at = std::lower_bound(by_address.begin(), end, wanted,
                                   [](const Entry& entry, std::uintptr_t value) { return entry.address < value; });
  return at != end && at->address == wanted ? kExports[at->function] : nullptr;
}

void note_unknown(const char* name) {
  const std::lock_guard lock(mutex);
  if (unknowns == nullptr) unknowns = new std::vector<Unknown>;
  for (Unknown& entry : *unknowns) {
    if (entry.name == name) {
      ++entry.times;
      return;
    }
  }
  if (unknowns->size() < kUnknownMax) unknowns->push_back({name, 1});
}

std::vector<Unknown> unknown() {
  const std::lock_guard lock(mutex);
  return unknowns == nullptr ? std::vector<Unknown>{} : *unknowns;
}

unsigned found_by_name() { return named.load(); }
unsigned absent() { return lacking; }

}  // namespace driver

namespace hook {
namespace {

// By the rules that cuda.h states: the newest version not above the one asked for, and the variant for the per-thread
// default stream only when that was asked for.
void* find_by_name(const char* symbol, int version, cuuint64_t flags) {
  const bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
  const Version* best = nullptr;
  for (const Version& entry : kVersions) {
    if (std::strcmp(entry.base, symbol) != 0 || entry.since > version || (entry.per_thread && !per_thread)) continue;
    if (best == nullptr || (entry.per_thread && !best->per_thread) ||
        (entry.per_thread == best->per_thread && entry.since >= best->since)) {
      best = &entry;
    }
  }
  return best == nullptr ? nullptr : driver::exported(best->function);
}

// `*address` is what the driver answered.
void replace(const char* symbol, void** address, int version, cuuint64_t flags) {
  if (address == nullptr || *address == nullptr || symbol == nullptr) return;
  if (void* ours = driver::proxy_for(*address)) {
    *address = ours;
  } else if (void* by_name = find_by_name(symbol, version, flags)) {
    driver::named.fetch_add(1, std::memory_order_relaxed);
    *address = by_name;
  } else {
    driver::note_unknown(symbol);
  }
}

}  // namespace

CUresult cuGetProcAddress(const char* symbol, void** address, int version, cuuint64_t flags) {
  const CUresult result = real::cuGetProcAddress(symbol, address, version, flags);
  if (result == CUDA_SUCCESS) replace(symbol, address, version, flags);
  return result;
}

CUresult cuGetProcAddress_v2(const char* symbol, void** address, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  const CUresult result = real::cuGetProcAddress_v2(symbol, address, version, flags, status);
  if (result == CUDA_SUCCESS) replace(symbol, address, version, flags);
  return result;
}

// The private tables hold functions of the driver without names. They pass, and it is said that they were asked for.
CUresult cuGetExportTable(const void** table, const CUuuid* id) {
  const CUresult result = real::cuGetExportTable(table, id);
  if (result == CUDA_SUCCESS && id != nullptr) {
    char name[48] = "table ";
    for (std::size_t i = 0; i < sizeof id->bytes; ++i) {
      std::snprintf(name + 6 + 2 * i, 3, "%02x", static_cast<unsigned>(static_cast<unsigned char>(id->bytes[i])));
    }
    driver::note_unknown(name);
  }
  return result;
}

}  // namespace hook
}  // namespace moorage
