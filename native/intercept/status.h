// What a process says of itself when it is asked.
#pragma once

#include <string>

namespace moorage {

// A JSON object: level of the gate; threads held, waiting and inside; captures in progress; blocks; what a checkpoint
// cannot hold (refusals); what went to the driver without the proxy knowing it (unknown).
std::string status_text();

}  // namespace moorage
