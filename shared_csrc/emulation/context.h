// Where an op runs on the emulated GPU: the one stream, and workspaces that it knows.
#pragma once

#include <vector>

#include "apex/torch/like.h"

namespace apex {
inline namespace emu {

class Context {
 public:
  explicit Context(const Tensor& like) : like_(like), stream_(emulation::open_stream()) {
    check(like.is_cpu(), "the emulated GPU works on cpu tensors, got ", describe(like), ".");
  }
  Context(const Context&) = delete;
  ~Context() { emulation::close_stream(); }

  gpu_stream stream() const { return stream_; }

  bool takes_long_parameters() const { return emulation::most_parameter_bytes() > 4096; }

  void* workspace(size_t bytes) const {
    workspaces_.push_back(empty(like_, {static_cast<int64_t>(bytes)}, ScalarType::Byte));
    void* data = memory_of(workspaces_.back(), "workspace");
    emulation::name_operand(data, "workspace");
    return data;
  }

  void check_launch(const char*) const {}  // a launch that fails raises

 private:
  Tensor like_;
  gpu_stream stream_;
  mutable std::vector<Tensor> workspaces_;
};

}  // namespace emu
}  // namespace apex
