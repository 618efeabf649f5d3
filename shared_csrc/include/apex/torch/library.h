// Registration of kernels with torch's dispatcher, for the backend this file is compiled for.
//
//   APEX_KERNELS(apex_optimizers, m) { m.impl("adam_step", TORCH_BOX(&adam_step)); }
//
// Schemas are defined in Python beside the documentation; here are only implementations.
#pragma once

#include <torch/csrc/stable/library.h>

#include "apex/core/config.h"

#if defined(APEX_CUDA) || defined(APEX_HIP)
#define APEX_DISPATCH_KEY CUDA  // torch's name for ROCm devices, too
#elif defined(APEX_CPU)
#define APEX_DISPATCH_KEY CPU
#endif

#define APEX_KERNELS_(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)
#define APEX_KERNELS(ns, m) APEX_KERNELS_(ns, APEX_DISPATCH_KEY, m)
