#include "control.h"
namespace moorage::control {
void start() {}
void before_fork() {}
void after_fork_in_parent() {}
void after_fork_in_child() {}
}
