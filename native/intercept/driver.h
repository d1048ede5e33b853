// The real driver behind the proxy.
#pragma once

#include <string>
#include <vector>

#include "functions.h"

namespace moorage::driver {

// Fill the table of the driver's addresses. Call once, from the constructor. False: no driver; every call then answers
// CUDA_ERROR_STUB_LIBRARY, and one line on stderr has said why.
bool load();

// Was cuInit ever successful in this process?
bool initialised();
void set_initialised();

// The exported function of this proxy that stands for the driver's function at `address`; null when there is none.
void* proxy_for(const void* address);
void* exported(Fn function);

// What went to the driver without the proxy knowing it: names asked for through cuGetProcAddress, private tables.
void note_unknown(const char* name);
struct Unknown {
  std::string name;
  unsigned times;
};
std::vector<Unknown> unknown();
// Functions that the driver has under an address which its symbol table does not tell: found by name instead.
unsigned found_by_name();
// Functions of the header that this driver lacks.
unsigned absent();

}  // namespace moorage::driver
