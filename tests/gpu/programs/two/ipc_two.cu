// Two processes, a GPU each: the second works on the first one's memory over legacy IPC, and on its own.
#include <sys/socket.h>
#include <sys/wait.h>

#include "../cuda/check.h"

constexpr std::size_t kCount = 4 << 20;

static void say(int socket, char word) { REQUIRE(write(socket, &word, 1) == 1); }
static char hear(int socket) {
  char word = 0;
  REQUIRE(read(socket, &word, 1) == 1);
  return word;
}

static int second(int socket) {
  CHECK(cudaSetDevice(1));
  std::uint32_t* own = nullptr;
  CHECK(cudaMalloc(&own, kCount * 4));
  CHECK(cudaMemset(own, 5, kCount * 4));
  cudaIpcMemHandle_t handle;
  REQUIRE(read(socket, &handle, sizeof handle) == static_cast<ssize_t>(sizeof handle));
  std::uint32_t* values = nullptr;
  CHECK(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&values), handle, cudaIpcMemLazyEnablePeerAccess));
  for (std::uint32_t turn = 0; hear(socket) == 'g'; turn++) {
    advance<<<64, 256>>>(values, kCount, 1000 + turn);
    advance<<<64, 256>>>(own, kCount, turn);
    CHECK(cudaMemcpy(values, own, kCount, cudaMemcpyDeviceToDevice));
    CHECK(cudaDeviceSynchronize());
    say(socket, 'd');
  }
  CHECK(cudaIpcCloseMemHandle(values));
  return 0;
}

int main(int argc, char** argv) {
  int sockets[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  const pid_t child = fork();
  if (child == 0) return second(sockets[1]);
  Run run(argc, argv);
  std::uint32_t* values = nullptr;
  CHECK(cudaMalloc(&values, kCount * 4));
  CHECK(cudaMemset(values, 8, kCount * 4));
  CHECK(cudaDeviceSynchronize());
  cudaIpcMemHandle_t handle;
  CHECK(cudaIpcGetMemHandle(&handle, values));
  REQUIRE(write(sockets[0], &handle, sizeof handle) == static_cast<ssize_t>(sizeof handle));
  for (int step = 0; step < run.steps(); step++) {
    advance<<<64, 256>>>(values, kCount, step);
    CHECK(cudaDeviceSynchronize());
    say(sockets[0], 'g');
    REQUIRE(hear(sockets[0]) == 'd');
    run.step(step);
  }
  say(sockets[0], 'q');
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child && status == 0);
  run.add_device(values, kCount);
  return run.finish();
}
