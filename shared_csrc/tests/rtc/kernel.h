// What the fakes of NVRTC and of the driver agree on: a kernel that runs on the emulated GPU.
#pragma once

#include <cstddef>
#include <string>

struct FakeKernel {
  const char* architecture;
  size_t parameter_bytes;
  // Launches with addresses of the parameters, as a driver has them; gives what was at fault.
  std::string (*launch)(const unsigned* grid, const unsigned* block, size_t shared_bytes,
                        void** parameters);
};
