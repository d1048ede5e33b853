// What the loader does with two libraries of the same SONAME, and that every way to open libcuda.so.1 meets the proxy.
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "check.h"

namespace {

const char* owner(void* library) { return file_of(dlsym(library, "cuInit")); }

void by_name() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr && std::strcmp(owner(library), PROXY) == 0);
  // The driver is loaded too, as its dependency, and is not taken for it by a later request for the SONAME.
  void* real = dlopen(REAL, RTLD_NOW | RTLD_NOLOAD);
  CHECK(real != nullptr && real != library && std::strcmp(owner(real), REAL) == 0);
  CHECK(dlopen("libcuda.so.1", RTLD_NOW) == library);
  CHECK(dlopen(PROXY, RTLD_NOW) == library);
  auto* init = reinterpret_cast<decltype(&cuInit)>(dlsym(library, "cuInit"));
  OK(init(0));
}

void by_absolute_path() {
  void* library = dlopen(PROXY, RTLD_LAZY | RTLD_GLOBAL);
  CHECK(library != nullptr && std::strcmp(owner(library), PROXY) == 0);
  CHECK(dlopen("libcuda.so.1", RTLD_NOW) == library);
  CHECK(std::strcmp(file_of(dlsym(RTLD_DEFAULT, "cuInit")), PROXY) == 0);
  CHECK(std::strcmp(file_of(dlsym(RTLD_DEFAULT, "cuFakeFuture")), REAL) == 0);
}

void driver_first() {
  // Nobody in a pod knows the driver's path but the proxy. Should a program load it first all the same, its SONAME
  // answers to the name from then on; the proxy by its path stays another library, and still works.
  void* real = dlopen(REAL, RTLD_NOW);
  CHECK(dlopen("libcuda.so.1", RTLD_NOW) == real);
  void* proxy = dlopen(PROXY, RTLD_NOW);
  CHECK(proxy != nullptr && proxy != real && std::strcmp(owner(proxy), PROXY) == 0);
  auto* init = reinterpret_cast<decltype(&cuInit)>(dlsym(proxy, "cuInit"));
  OK(init(0));
}

void apart(void (*test)()) {
  const pid_t child = fork();
  if (child == 0) {
    test();
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

}  // namespace

int main() {
  apart(by_name);
  apart(by_absolute_path);
  apart(driver_first);
}
