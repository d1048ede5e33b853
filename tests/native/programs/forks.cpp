// A child forked after CUDA has started: the driver's descriptors and maps are gone, calls fail as the driver's would,
// the end of the process is a normal one, and the parent does not notice.
#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <string>
#include <thread>

#include "check.h"

namespace {

int open_devices() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(folder)) {
    char target[4096] = "";
    if (readlink((std::string("/proc/self/fd/") + entry->d_name).c_str(), target, sizeof target - 1) < 0) continue;
    if (std::strncmp(target, DEVICES, std::strlen(DEVICES)) == 0) ++count;
  }
  closedir(folder);
  return count;
}

int mapped_devices() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  int count = 0;
  while (std::getline(maps, line)) {
    if (line.find(DEVICES) != std::string::npos) ++count;
  }
  return count;
}

int child(void (*test)()) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    test();
    std::exit(0);  // with all destructors: the fake driver looks at its registers there
  }
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid);
  return status;
}

void before_cuda() {
  // The child of a process that has not used CUDA may use it.
  begin();
  CUdeviceptr memory = 0;
  OK(cuMemAlloc_v2(&memory, 4096));
  CHECK(open_devices() == 3);
}

void after_cuda() {
  CHECK(open_devices() == 0);
  CHECK(mapped_devices() == 0);
  ANSWERS(CUDA_ERROR_NOT_INITIALIZED, cuInit(0));
  CUdeviceptr memory = 0;
  ANSWERS(CUDA_ERROR_NOT_INITIALIZED, cuMemAlloc_v2(&memory, 4096));
  ANSWERS(CUDA_ERROR_NOT_INITIALIZED, cuCtxSynchronize());
  int version = 0;
  OK(cuDriverGetVersion(&version));
  const char* text = nullptr;
  OK(cuGetErrorString(CUDA_ERROR_NOT_INITIALIZED, &text));
  CHECK(text != nullptr);
  // A grandchild is no better off.
  CHECK(child([] { ANSWERS(CUDA_ERROR_NOT_INITIALIZED, cuInit(0)); }) == 0);
}

}  // namespace

int main() {
  CHECK(child(before_cuda) == 0);
  begin();
  CHECK(open_devices() == 3);
  CHECK(mapped_devices() >= 6);
  CHECK(child(after_cuda) == 0);

  // With other threads inside the driver, one of them waiting.
  std::atomic<int> flag{0};
  std::atomic<int>* address = &flag;
  CUstream stream = nullptr;
  OK(cuStreamCreate(&stream, 0));
  OK(launch("wait", stream, &address));
  CUcontext context = nullptr;
  OK(cuCtxGetCurrent(&context));
  std::thread waiter([&] {
    OK(cuCtxSetCurrent(context));
    OK(cuStreamSynchronize(stream));
  });
  for (int i = 0; i < 5; ++i) CHECK(child(after_cuda) == 0);
  flag = 1;
  waiter.join();
  CHECK(open_devices() == 3);
  CHECK(mapped_devices() >= 6);
  int value = 1;
  OK(launch("spin", stream, &value));
  OK(cuStreamSynchronize(stream));
}
