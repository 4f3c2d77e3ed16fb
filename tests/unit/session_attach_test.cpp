// What a session refuses at attach: everything that does not fit together, before it uses any of it.
#include <cstring>

#include "session_rig.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

Error refused(FakeDaemon::Options options) {
  FakeDaemon daemon(std::move(options));
  auto session = Session::attach(fake_options(daemon));
  REQUIRE_FALSE(session.ok());
  return session.error();
}

FakeDaemon::Options with_welcome(std::function<void(Welcome&)> spoil) {
  FakeDaemon::Options options;
  options.spoil_welcome = std::move(spoil);
  return options;
}

FakeDaemon::Options with_memory(std::function<void(FakeDaemon&)> spoil) {
  FakeDaemon::Options options;
  options.spoil_memory = std::move(spoil);
  return options;
}

}  // namespace

TEST_CASE("a client attaches to what is whole") {
  FakeDaemon daemon;
  auto session = Session::attach(fake_options(daemon));
  REQUIRE(session.ok());
  REQUIRE((*session)->state() == Status::ok);
  REQUIRE((*session)->instance_epoch() == FakeDaemon::kEpoch);
  REQUIRE((*session)->client_slot() == FakeDaemon::kSlot);
  REQUIRE((*session)->namespace_id() == NamespaceId{0});
}

TEST_CASE("a welcome that contradicts the region or the channel is refused as corrupt") {
  REQUIRE(refused(with_welcome([](Welcome& w) { w.instance_epoch ^= 1; })).status == Status::corrupt);
  REQUIRE(refused(with_welcome([](Welcome& w) { w.region_bytes += 4096; })).status == Status::corrupt);
  REQUIRE(refused(with_welcome([](Welcome& w) { w.client_slot = 1'000'000; })).status == Status::corrupt);
  REQUIRE(refused(with_welcome([](Welcome& w) { w.client_generation += 1; })).status == Status::corrupt);
  REQUIRE(refused(with_welcome([](Welcome& w) { w.namespace_id = 1'000'000; })).status == Status::corrupt);
  REQUIRE(refused(with_welcome([](Welcome& w) { w.channel.total_bytes += 4096; })).status == Status::corrupt);
  REQUIRE(refused(with_welcome([](Welcome& w) { w.channel.cq_entries = 3; })).status == Status::corrupt);
  REQUIRE(refused(with_welcome([](Welcome& w) {
            w.channel = ChannelGeometry::plan(8, 16, 1 << 20);
          })).status == Status::corrupt);
}

TEST_CASE("a welcome with another protocol is a version mismatch that names both sides") {
  const Error error = refused(with_welcome([](Welcome& w) { w.protocol = 77; }));
  REQUIRE(error.status == Status::version_mismatch);
  REQUIRE(error.message.find("77") != std::string::npos);
  REQUIRE(error.message.find(std::to_string(kProtocolMax)) != std::string::npos);
}

TEST_CASE("a region of another layout or with a damaged header is refused") {
  REQUIRE(refused(with_memory([](FakeDaemon& d) {
            d.tables().header->layout_fingerprint.fetch_add(1);
            d.tables().header->header_crc.store(header_crc(*d.tables().header));
          })).status == Status::version_mismatch);
  REQUIRE(refused(with_memory([](FakeDaemon& d) { d.tables().header->pool_bytes.fetch_add(1); })).status ==
          Status::corrupt);
  REQUIRE(refused(with_memory([](FakeDaemon& d) {
            d.tables().header->sections[5].entries.store(1ull << 40);
          })).status == Status::corrupt);
}

TEST_CASE("a channel that is not sealed, or is somebody else's, is refused") {
  FakeDaemon::Options unsealed;
  unsealed.seal_channel = false;
  REQUIRE(refused(unsealed).status == Status::corrupt);
  REQUIRE(refused(with_memory([](FakeDaemon& d) { d.header().client_slot.store(1); })).status ==
          Status::corrupt);
  REQUIRE(refused(with_memory([](FakeDaemon& d) { d.header().magic.store(1); })).status == Status::corrupt);
}

TEST_CASE("a welcome with a descriptor missing is refused") {
  FakeDaemon::Options options;
  options.descriptors = 2;
  REQUIRE(refused(options).status == Status::corrupt);
}

TEST_CASE("attach names the option that is wrong without asking a daemon") {
  AttachOptions options;
  options.socket_path = "/nonexistent/hicache.sock";
  options.engine = "engine";
  options.spec = small_spec(Attention::mha, 2);
  const auto expect_invalid = [](const AttachOptions& bad, const std::string& word) {
    const auto session = Session::attach(bad);
    REQUIRE(session.status() == Status::invalid_argument);
    INFO(session.error().message);
    REQUIRE(session.error().message.find(word) != std::string::npos);
  };
  AttachOptions bad = options;
  bad.tp_rank = 2;
  expect_invalid(bad, "tp_rank");
  bad = options;
  bad.engine = "";
  expect_invalid(bad, "engine");
  bad = options;
  bad.role = Role::tool;
  expect_invalid(bad, "role");
  bad = options;
  bad.spec.layers = 0;
  expect_invalid(bad, "layers");
  bad = options;
  bad.socket_path = "";
  bad.name = "../x";
  expect_invalid(bad, "name");
  REQUIRE(Session::attach(options).status() == Status::daemon_absent);
}
