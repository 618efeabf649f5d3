// Names for reports: kernels and source lines, by addr2line; and the library's constants.
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "machine.h"

namespace apex::emulation {
namespace {

struct Segment {
  uintptr_t begin, end;
};

struct Image {
  uintptr_t base = 0;
  std::string path;
  std::vector<Segment> constants;
};

int find_image(dl_phdr_info* info, size_t, void* result) {
  auto own = reinterpret_cast<uintptr_t>(&find_image);
  Image image{info->dlpi_addr, info->dlpi_name, {}};
  bool is_own = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    uintptr_t begin = info->dlpi_addr + header.p_vaddr, end = begin + header.p_memsz;
    is_own |= header.p_type == PT_LOAD && own >= begin && own < end;
    bool is_constant =
        (header.p_type == PT_LOAD && !(header.p_flags & PF_W)) || header.p_type == PT_GNU_RELRO;
    if (is_constant) image.constants.push_back({begin, end});
  }
  if (is_own) *static_cast<Image*>(result) = image;
  return is_own;
}

const Image& own_image() {
  static const Image image = [] {
    Image found;
    dl_iterate_phdr(find_image, &found);
    if (found.path.empty()) found.path = std::filesystem::read_symlink("/proc/self/exe");
    return found;
  }();
  return image;
}

// Function and place of each inlined call at an address, outermost last: "name\nfile:line\n...".
std::vector<std::string> symbolize(const void* address) {
  const Image& image = own_image();
  char offset[32];
  std::snprintf(offset, sizeof offset, "0x%zx",
                static_cast<size_t>(reinterpret_cast<uintptr_t>(address) - image.base));
  std::string command = "addr2line -Cfie '" + image.path + "' " + offset + " 2>/dev/null";
  std::vector<std::string> lines;
  FILE* output = popen(command.c_str(), "r");
  if (output == nullptr) return lines;
  char buffer[8192];
  while (std::fgets(buffer, sizeof buffer, output) != nullptr) {
    lines.emplace_back(buffer);
    while (!lines.back().empty() && lines.back().back() == '\n') lines.back().pop_back();
  }
  pclose(output);
  return lines;
}

void remove_all(std::string& text, const std::string& part) {
  for (size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, part.size());
}

// Without result type, parameters and our own namespaces.
std::string short_name(std::string name) {
  for (const char* part : {"apex::emu::", "apex::", "emu::", "(anonymous namespace)::", "void "}) {
    remove_all(name, part);
  }
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    depth += (name[i] == '<') - (name[i] == '>');
    if (name[i] == '(' && depth == 0) name.erase(i);
  }
  return name;
}

// Without folders, and without "(discriminator 1)".
std::string base_name(const std::string& path) {
  std::string name = path.substr(path.rfind('/') + 1);
  return name.substr(0, name.find(' '));
}

}  // namespace

std::string kernel_name(const void* kernel) {
  std::vector<std::string> lines = symbolize(kernel);
  return lines.size() < 2 ? "(unknown)" : short_name(lines[lines.size() - 2]);
}

std::string image_and_offset(const void* kernel) {
  const Image& image = own_image();
  char offset[32];
  std::snprintf(offset, sizeof offset, " 0x%zx",
                static_cast<size_t>(reinterpret_cast<uintptr_t>(kernel) - image.base));
  return image.path + offset;
}

std::string source_of(const void* pc) {
  if (pc == nullptr) return "";
  // One byte back: the address is that of the instruction behind the call.
  std::vector<std::string> lines = symbolize(static_cast<const char*>(pc) - 1);
  std::string result;
  for (size_t i = 1; i < lines.size(); i += 2) {
    result += (result.empty() ? "" : " < ") + base_name(lines[i]);
  }
  return result;
}

bool is_constant(uintptr_t address, size_t bytes) {
  for (const Segment& segment : own_image().constants) {
    if (address >= segment.begin && address + bytes <= segment.end) return true;
  }
  return false;
}

std::string text(const Index& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

std::string text(const Site& site) {
  return site.file == nullptr ? "" : base_name(site.file) + ":" + std::to_string(site.line);
}

}  // namespace apex::emulation
