// A queue of several owners that are served in turn, so that none waits behind all of another's entries.
//
// Thread safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <utility>

namespace hicache::daemon {

template <class Entry>
class FairQueue {
 public:
  [[nodiscard]] bool empty() const { return size_ == 0; }
  [[nodiscard]] std::size_t size() const { return size_; }

  void push(std::uint32_t owner, Entry entry) {
    ++size_;
    for (Line& line : lines_) {
      if (line.owner != owner) continue;
      line.entries.push_back(std::move(entry));
      return;
    }
    lines_.push_back(Line{owner, {}});
    lines_.back().entries.push_back(std::move(entry));
  }
  // The next owner's oldest entry. Precondition: not empty.
  Entry pop() {
    Line& line = lines_.front();
    Entry entry = std::move(line.entries.front());
    line.entries.pop_front();
    --size_;
    if (line.entries.empty()) {
      lines_.pop_front();
    } else {
      lines_.splice(lines_.end(), lines_, lines_.begin());
    }
    return entry;
  }
  // Takes out every entry for which `wanted` is true and gives it to `take`, in each owner's order.
  template <class Wanted, class Take>
  void extract(Wanted&& wanted, Take&& take) {
    for (auto line = lines_.begin(); line != lines_.end();) {
      for (auto entry = line->entries.begin(); entry != line->entries.end();) {
        if (!wanted(*entry)) {
          ++entry;
          continue;
        }
        take(std::move(*entry));
        entry = line->entries.erase(entry);
        --size_;
      }
      line = line->entries.empty() ? lines_.erase(line) : std::next(line);
    }
  }

 private:
  struct Line {
    std::uint32_t owner = 0;
    std::deque<Entry> entries;
  };
  std::list<Line> lines_;  // the front one is next; only owners with entries
  std::size_t size_ = 0;
};

}  // namespace hicache::daemon
