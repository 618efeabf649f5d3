// planted CASE broken|correct: runs one planted bug, or its correct twin, on the emulated GPU.
// Prints the report of the fault, or "passed". `planted list` prints the names.
#include "planted.h"

int main(int count, char** arguments) {
  using namespace apex;
  bool lists = count == 2 && std::string(arguments[1]) == "list";
  for (const auto* cases : {&kBoundsCases, &kOrderCases, &kWarpCases, &kLaunchCases, &kCostCases}) {
    for (const Case& entry : *cases) {
      if (lists) std::puts(entry.name);
      if (count != 3 || std::string(arguments[1]) != entry.name) continue;
      try {
        (std::string(arguments[2]) == "broken" ? entry.broken : entry.correct)();
        std::puts("passed");
      } catch (const std::exception& error) {
        std::puts(error.what());
      }
      return 0;
    }
  }
  return lists ? 0 : 2;
}
