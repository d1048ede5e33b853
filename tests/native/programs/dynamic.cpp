// What the loader does with two libraries of the same SONAME, and that every way to open libcuda.so.1 meets the proxy.
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
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

void no_driver() {
  // A proxy whose driver's path leads nowhere. The loader refuses it as it refuses a libcuda.so.1 that is not there, so
  // programs that can do without a GPU know what to do, and it says which file is missing.
  std::ifstream in(PROXY, std::ios::binary);
  std::string image{std::istreambuf_iterator<char>(in), {}};
  const std::string path = REAL;
  std::string nowhere = path;
  nowhere.replace(nowhere.size() - 4, 4, "none");
  for (std::size_t at = 0; (at = image.find(path, at)) != std::string::npos; at += path.size()) {
    image.replace(at, path.size(), nowhere);
  }
  const std::string copy = "/tmp/moorage-test-" + std::to_string(getpid()) + ".so";
  std::ofstream(copy, std::ios::binary) << image;
  CHECK(dlopen(copy.c_str(), RTLD_NOW) == nullptr);
  const std::string error = dlerror();
  unlink(copy.c_str());
  CHECK(error.find(nowhere) != std::string::npos);
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
  apart(no_driver);
}
