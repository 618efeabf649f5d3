// The emulator as one translation unit, compiled once for every library of emulated kernels.
#include "access.cpp"
#include "counts.cpp"
#include "hooks.cpp"
#include "interface.cpp"
#include "machine.cpp"
#include "memory.cpp"
#include "report.cpp"
#include "schedule.cpp"
#include "trace.cpp"
#include "undefined.cpp"
#if defined(APEX_EMULATE_TENSORS)
#include "tensors.cpp"
#endif
