#include "status.h"

#include <cstdint>

#include "bulk.h"
#include "captures.h"
#include "driver.h"
#include "gate.h"

namespace moorage {
namespace {

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    if (c == '"' || c == '\\') safe += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) safe += c;
  }
  return safe;
}

std::string member(const char* name, std::uint64_t value) {
  return std::string("\"") + name + "\":" + std::to_string(value) + ",";
}

}  // namespace

std::string status_text() {
  std::string text = "{" + member("level", static_cast<unsigned>(gate::now())) + member("held", gate::held()) +
                     member("waiting", gate::waiting()) + member("inside", gate::busy().size()) +
                     member("captures", captures::running()) + member("absent", driver::absent()) +
                     member("found_by_name", driver::found_by_name()) + bulk::describe() + ",\"unknown\":{";
  bool first = true;
  for (const driver::Unknown& one : driver::unknown()) {
    text += std::string(first ? "" : ",") + "\"" + escaped(one.name) + "\":" + std::to_string(one.times);
    first = false;
  }
  return text + "}}";
}

}  // namespace moorage
