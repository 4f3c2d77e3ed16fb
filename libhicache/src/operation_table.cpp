#include "operation_table.hpp"

#include <algorithm>

namespace hicache {

OperationTable::OperationTable(std::uint32_t completion_entries)
    : places_(completion_entries - 1), slots_left_(completion_entries - 1) {
  unused_.reserve(places_.size());
  for (std::uint32_t i = static_cast<std::uint32_t>(places_.size()); i > 0; --i) {
    places_[i - 1].ticket = i - 1;
    unused_.push_back(i - 1);
  }
}

void OperationTable::continue_after(const OperationTable& earlier) {
  std::uint64_t generation = 0;
  for (const Operation& place : earlier.places_)
    generation = std::max(generation, place.ticket >> kIndexBits);
  for (std::size_t i = 0; i < places_.size(); ++i) places_[i].ticket = i + (generation << kIndexBits);
}

std::uint32_t OperationTable::slots_of(Opcode opcode) {
  return opcode == Opcode::write || opcode == Opcode::load ? 2 : 1;
}

Operation* OperationTable::open(Opcode opcode) {
  const std::uint32_t slots = slots_of(opcode);
  if (unused_.empty() || slots_left_ < slots) return nullptr;
  Operation& operation = places_[unused_.back()];
  unused_.pop_back();
  slots_left_ -= slots;
  ++in_use_;
  operation.ticket += std::uint64_t{1} << kIndexBits;  // generation 0 is never given out, so no ticket is 0
  operation.opcode = opcode;
  operation.stage = Stage::open;
  operation.lease = 0;
  operation.arena_bytes = 0;
  operation.count = 0;
  operation.fence = Submission::kNoFence;
  operation.terminal_pending = false;
  operation.returned_pending = false;
  operation.internal = false;
  return &operation;
}

Operation* OperationTable::find(std::uint64_t ticket) {
  const std::uint64_t index = ticket & ((1u << kIndexBits) - 1);
  if (index >= places_.size()) return nullptr;
  Operation& operation = places_[index];
  return operation.stage != Stage::free && operation.ticket == ticket ? &operation : nullptr;
}

void OperationTable::close(Operation& operation) {
  if (operation.queued) dequeue(operation);
  operation.stage = Stage::free;
  slots_left_ += slots_of(operation.opcode);
  --in_use_;
  unused_.push_back(static_cast<std::uint32_t>(&operation - places_.data()));
}

void OperationTable::enqueue(Operation& operation) {
  if (operation.queued) return;
  const auto index = static_cast<std::uint32_t>(&operation - places_.data());
  operation.queued = true;
  operation.previous = last_;
  operation.next = kNone32;
  (last_ == kNone32 ? first_ : places_[last_].next) = index;
  last_ = index;
  ++queued_;
}

void OperationTable::dequeue(Operation& operation) {
  (operation.previous == kNone32 ? first_ : places_[operation.previous].next) = operation.next;
  (operation.next == kNone32 ? last_ : places_[operation.next].previous) = operation.previous;
  operation.queued = false;
  --queued_;
}

}  // namespace hicache
