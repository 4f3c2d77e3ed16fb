// What the coordinator fuzzer found, and its rig's own proof: a whole request ends and leaves sound tables.
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/catch.hpp"
#include "tests/unit/rig_request.hpp"

using namespace hicache;
using namespace hicache::fuzz;

TEST_CASE("A control command that is no UTF-8 is refused in JSON and the coordinator goes on") {
  CoordinatorRig rig;
  const auto answer = nlohmann::json::parse(rig.control({"\xa8"}), nullptr, false);
  REQUIRE(answer.is_object());
  CHECK(answer.contains("error"));
  CHECK(nlohmann::json::parse(rig.control({"status"}), nullptr, false)["state"] == "ready");
}

TEST_CASE("A model name that is no UTF-8 does not end the daemon when somebody lists the namespaces") {
  CoordinatorRig rig;
  NamespaceSpec spec = small_spec();
  spec.model = "\xff\xfe";
  rig.lose(rig.client(0), false);
  rig.attach(0, spec);
  const auto answer = nlohmann::json::parse(rig.control({"namespaces"}), nullptr, false);
  REQUIRE(answer.is_object());
  CHECK(answer["namespaces"].size() == 2);
}

TEST_CASE("A group's write through the fuzzer's rig publishes its pages and leaves nothing behind") {
  CoordinatorRig rig;
  CHECK(run_request(rig, 1, 0, 4).written == 4);
  rig.settle();
  rig.lose_everybody();
  rig.halt_and_check();
}

TEST_CASE("A list of hashes that is no chain leaves every page at its parent's depth plus one") {
  CoordinatorRig rig;
  CHECK(run_request(rig, 1, 0, 4).written == 4);
  // Begins with the last page of the other prefix: the new page is the fifth of that one, not the second of
  // its own.
  CHECK(run_request(rig, 2, 3, 2).written == 1);
  rig.settle();
  rig.halt_and_check();  // ends the program when a check fails
}
