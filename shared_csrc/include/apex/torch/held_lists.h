// Lists of tensors that stay in C++ between the calls of an operator.
//
// Parameters and states of an optimizer are the same tensors at every step. Handing 30,000 of them
// through torch takes 8 ms; reading their facts from handles that were kept takes 1 ms.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "apex/torch/tensor_list.h"

namespace apex {

// Python knows the lists by a number, so that no misuse reaches memory. Only the identity of a
// tensor is kept: pointer, size, dtype and device are read again in each call.
class HeldLists {
 public:
  using Lists = std::vector<TensorList>;

  int64_t hold(Lists lists) {
    auto owned = std::make_shared<const Lists>(std::move(lists));
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.emplace(++last_id_, std::move(owned));
    return last_id_;
  }

  // The lists live at least as long as the result, also if another thread releases them meanwhile.
  std::shared_ptr<const Lists> find(const char* op, int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto entry = entries_.find(id);
    check(entry != entries_.end(), op, ": no lists are held under the number ", id,
          "; they were released, or never held.");
#if defined(APEX_RELEASE_OPERAND)
    return {entry->second.get(), [lists = entry->second](const Lists*) {
              for (const TensorList& list : *lists) list.end_of_op();
            }};
#else
    return entry->second;
#endif
  }

  // A number that is unknown, such as one already released, is left alone.
  void release(int64_t id) {
    std::shared_ptr<const Lists> last;  // dies without the lock: a tensor's end may run Python
    std::lock_guard<std::mutex> lock(mutex_);
    auto entry = entries_.find(id);
    if (entry == entries_.end()) return;
    last = std::move(entry->second);
    entries_.erase(entry);
  }

  int64_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(entries_.size());
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Lists>> entries_;
  int64_t last_id_ = 0;
};

// The lists of the operators that one source file registers, hence `static`: no other operator
// finds them under its numbers. Never destroyed: at the end of a process torch is gone before the
// handles would be.
static inline HeldLists& held_lists() {
  static HeldLists& lists = *new HeldLists;
  return lists;
}

// The lists are the calling operator's own: their handles are kept, not copied.
template <class... Lists>
static inline int64_t hold_lists(Lists&... lists) {
  HeldLists::Lists kept;
  kept.reserve(sizeof...(lists));
  (kept.push_back(std::move(lists)), ...);
  return held_lists().hold(std::move(kept));
}

// The lists of one call of a step operator, in the order in which it takes them.
class HeldCall {
 public:
  // `held_grads` is the number under which this step's gradients are held by themselves, or 0: then
  // `grads` are they. (Otherwise these only tell torch for which kind of device the call is.)
  HeldCall(const char* op, int64_t held, int64_t held_grads, const TensorList& grads)
      : lists_(held_lists().find(op, held)), grads_(&grads) {
    if (held_grads == 0) return;
    own_grads_ = held_lists().find(op, held_grads);
    grads_ = &(*own_grads_)[1];
  }

  // Of all lists but the gradients, which are the second.
  const TensorList& operator[](size_t index) const { return (*lists_)[index]; }
  const TensorList& grads() const { return *grads_; }

 private:
  std::shared_ptr<const HeldLists::Lists> lists_, own_grads_;
  const TensorList* grads_;
};

// Operators; the tensor says for which kind of device.
static inline void release_lists(const Tensor&, int64_t held) { held_lists().release(held); }
static inline int64_t held_count(const Tensor&) { return held_lists().size(); }

}  // namespace apex
