// moorage-init CONFIG: pid 1 of a pod.
// moorage-init --in FOLDER COMMAND...: a command in a folder, with the rights of whoever starts it.
#include <unistd.h>

#include <string>
#include <string_view>

#include "config.h"
#include "frames.h"
#include "launch.h"
#include "supervisor.h"

namespace {

constexpr int kBadConfig = 125;

int fail(const std::string& why) {
  moorage::FrameWriter writer(STDOUT_FILENO);
  writer.submit_text(moorage::Kind::Stderr, 0, "moorage: " + why + "\n");
  if (writer.flush()) writer.submit_number(moorage::Kind::Ended, 0, kBadConfig);
  writer.wait_until_taken();
  return kBadConfig;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 3 && std::string_view(argv[1]) == "--in") moorage::enter(argv[2], argv + 3);
  if (argc != 2) return fail("usage: moorage-init CONFIG");
  moorage::Config config;
  if (const std::string wrong = moorage::read_config(argv[1], config); !wrong.empty()) return fail(wrong);
  moorage::Supervisor supervisor(config, STDOUT_FILENO);
  return supervisor.run();
}
