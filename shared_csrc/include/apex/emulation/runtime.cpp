// The emulator as one translation unit, compiled once for every library of emulated kernels.
#include "apex/emulation/access.cpp"
#include "apex/emulation/hooks.cpp"
#include "apex/emulation/interface.cpp"
#include "apex/emulation/machine.cpp"
#include "apex/emulation/memory.cpp"
#include "apex/emulation/report.cpp"
#include "apex/emulation/schedule.cpp"
#include "apex/emulation/undefined.cpp"
#if defined(APEX_EMULATE_TENSORS)
#include "apex/emulation/tensors.cpp"
#endif
