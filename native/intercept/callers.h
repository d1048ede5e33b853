// Who called? Decided from the stack, only where the answer is worth microseconds.
#pragma once

namespace moorage::callers {

// Remember where the driver's code lies. `inside` is an address of one of its functions.
void learn_driver(const void* inside);

// Does this thread run a callback of the driver (host function, destructor of a user object, notification), or code of
// a libnccl? Looks through the whole stack, and at the thread's name for stacks that cannot be unwound.
bool inside_driver_or_nccl();

// Is `address` code of a libnccl? Remembered for each address.
bool is_nccl(const void* address);

// Is it code of a libnccl, but not of the proxy that stands for one? Asks the loader each time.
bool is_real_nccl(const void* address);

}  // namespace moorage::callers
