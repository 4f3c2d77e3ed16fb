#include "daemon/storage/redis/page_steps.hpp"

#include <string>

namespace hicache::daemon::redis {
namespace {

Verdict finish(Status outcome) {
  return {Verdict::Then::finish, outcome, {}};
}
Verdict go_on(Step next) {
  return {Verdict::Then::go_on, {}, next};
}

WireCommand make_write(const PageOperation& operation, const StoragePool& pool, std::uint64_t ttl_ms) {
  const RecordIdentity identity = operation.identity();
  WireCommand command;
  for (const auto& shard : operation.payload(pool)) command.pieces.push_back(shard);
  const RecordHeader header = make_record_header(identity, command.pieces);

  command.head = ttl_ms > 0 ? "*5\r\n" : "*3\r\n";
  append_bulk(command.head, "SET");
  append_bulk(command.head, operation.key());
  command.head += "$" + std::to_string(identity.record_bytes()) + "\r\n";
  command.head.append(reinterpret_cast<const char*>(&header), sizeof header);
  command.tail = "\r\n";
  if (ttl_ms > 0) {
    append_bulk(command.tail, "PX");
    append_bulk(command.tail, std::to_string(ttl_ms));
  }
  return command;
}

Verdict judge_error(const PageOperation& operation, const Reply& error) {
  const std::string_view code = error_code(error);
  // Something else lies under our key. exists: no page is there. put: it is overwritten. get: it is dropped.
  if (code == "WRONGTYPE" && operation.step == Step::probe) {
    return operation.kind() == StorageOperation::put ? go_on(Step::write) : finish(Status::not_found);
  }
  if (code == "WRONGTYPE" && operation.step == Step::read) return go_on(Step::drop);
  if (operation.step == Step::drop) return finish(Status::corrupt);
  return finish(code == "OOM" ? Status::no_space : Status::system_error);
}

}  // namespace

WireCommand make_page_command(const PageOperation& operation, const StoragePool& pool, std::uint64_t ttl_ms) {
  switch (operation.step) {
    case Step::probe:
      return make_command({"STRLEN", operation.key()});
    case Step::read:
      return make_command({"GET", operation.key()});
    case Step::write:
      return make_write(operation, pool, ttl_ms);
    case Step::touch:
      return make_command({"PEXPIRE", operation.key(), std::to_string(ttl_ms)});
    case Step::drop:
      break;
  }
  return make_command({"DEL", operation.key()});
}

Verdict judge(const PageOperation& operation, const Reply& reply, bool has_ttl) {
  if (reply.kind == ReplyKind::error) return judge_error(operation, reply);
  const bool integer = reply.kind == ReplyKind::integer;
  switch (operation.step) {
    case Step::probe: {
      if (!integer) return {};
      const bool there = reply.integer >= 0 &&
                         static_cast<std::uint64_t>(reply.integer) == operation.identity().record_bytes();
      if (operation.kind() == StorageOperation::exists) return finish(there ? Status::ok : Status::not_found);
      if (!there) return go_on(Step::write);
      return has_ttl ? go_on(Step::touch) : finish(Status::ok);
    }
    case Step::read:
      if (reply.kind == ReplyKind::nil) return finish(Status::not_found);
      if (reply.kind != ReplyKind::page) return {};
      return reply.fate == PageFate::whole ? finish(Status::ok) : go_on(Step::drop);
    case Step::write:
      return reply.kind == ReplyKind::status ? finish(Status::ok) : Verdict{};
    case Step::touch:
      if (!integer) return {};
      return reply.integer == 1 ? finish(Status::ok) : go_on(Step::write);  // it has expired meanwhile
    case Step::drop:
      break;
  }
  return integer ? finish(Status::corrupt) : Verdict{};
}

}  // namespace hicache::daemon::redis
