// How a session ends: by the daemon's word, its death, a takeover, a close, or a fork.
#include <thread>

#include "session_rig.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

TEST_CASE("after the daemon has ended the session, every open operation ends once with daemon_lost") {
  SessionRig rig;
  const Ticket done = TestRank::take(rig.session->nop());
  const Submission done_entry = rig.daemon.next();
  const Ticket load = rig.load(LayerFence{0, 1});
  const Ticket nop = TestRank::take(rig.session->nop());
  rig.daemon.publish(FakeDaemon::answer(done_entry));  // answered before the end: counts
  rig.daemon.end_session();

  REQUIRE(eventually([&] { return rig.session->state() == Status::daemon_lost; }));
  OperationResult result = rig.poll();
  REQUIRE(result.ticket == done);
  REQUIRE(result.status == Status::ok);
  std::vector<Ticket> lost;
  for (int i = 0; i < 2; ++i) {
    result = rig.poll();
    REQUIRE(result.status == Status::daemon_lost);
    REQUIRE(result.pages_busy == (result.ticket == load));
    lost.push_back(result.ticket);
  }
  REQUIRE(lost == std::vector<Ticket>{load, nop});
  REQUIRE(rig.silent());

  REQUIRE(rig.session->nop().status() == Status::daemon_lost);
  REQUIRE(rig.session->wait_any(10).status() == Status::daemon_lost);
  REQUIRE(rig.session->probe(prompt(1, 1)).leading == 0);
  REQUIRE(rig.session->layer_ready({0, 1}, 1));
  REQUIRE(rig.session->wait_layer({0, 1}, 1, kPatienceMs).status() == Status::daemon_lost);
  REQUIRE(rig.daemon.fences().load[0].failed.load() == 1);

  // The load's copy may have been running: its pages come back when the daemon shows that none is left.
  rig.daemon.forget_client();
  result = rig.poll();
  REQUIRE(result.ticket == load);
  REQUIRE(result.pages_returned);
  REQUIRE(rig.silent());
}

TEST_CASE("waiting threads get out when the daemon hangs up") {
  SessionRig rig;
  const Ticket load = rig.load(LayerFence{2, 1});
  Outcome layer = success();
  std::thread layer_waiter([&] { layer = rig.session->wait_layer({2, 1}, 0, kPatienceMs); });
  Result<OperationResult> other(Status::internal, "");
  std::thread any_waiter([&] { other = rig.session->wait_any(kPatienceMs); });
  rig.daemon.hang_up();
  // Short: where the other waiter took the end, only the return of the pages is still to come, and it does
  // not.
  const auto result = rig.session->wait(load, 3000);
  layer_waiter.join();
  any_waiter.join();
  REQUIRE(layer.status() == Status::daemon_lost);
  // Either waiter may have been the one to take the load's end.
  const bool by_ticket = result.ok() && result->status == Status::daemon_lost;
  const bool by_any = other.ok() && other->status == Status::daemon_lost;
  REQUIRE(by_ticket != by_any);
  REQUIRE(rig.session->state() == Status::daemon_lost);
}

TEST_CASE("an idle client that only polls notices the loss too") {
  SessionRig rig;
  TestRank::take(rig.session->nop());
  rig.daemon.hang_up();
  REQUIRE(rig.poll().status == Status::daemon_lost);
}

TEST_CASE("another daemon's epoch in the region ends the session and its lookups") {
  SessionRig rig;
  rig.daemon.tables().header->instance_epoch.fetch_add(1);
  REQUIRE(rig.session->probe(prompt(1, 1)).leading == 0);
  REQUIRE(eventually([&] { return rig.session->state() == Status::daemon_lost; }));
}

TEST_CASE("close says goodbye, ends open operations with closed and refuses new ones") {
  SessionRig rig;
  const Ticket ticket = TestRank::take(rig.session->nop());
  rig.session->close();
  rig.session->close();
  REQUIRE(rig.session->state() == Status::closed);
  REQUIRE(rig.session->nop().status() == Status::closed);
  const OperationResult result = rig.poll();
  REQUIRE(result.ticket == ticket);
  REQUIRE(result.status == Status::closed);
  REQUIRE(rig.silent());
  REQUIRE(eventually([&] { return rig.daemon.said_goodbye(); }));
}

TEST_CASE("calls in a forked child return forked and leave the parent's session alone") {
  SessionRig rig;
  const Ticket ticket = TestRank::take(rig.session->nop());
  Child child = Child::run([&] {
    Session& s = *rig.session;
    int wrong = 0;
    wrong += s.state() != Status::forked;
    wrong += s.nop().status() != Status::forked;
    wrong += s.reserve(1, prompt(1, 1)).status() != Status::forked;
    wrong += s.load(LeaseId{1}, 0, TestRank::pages(0, 1)).status() != Status::forked;
    wrong += s.release(LeaseId{1}).status() != Status::forked;
    wrong += s.wait(ticket, 10).status() != Status::forked;
    wrong += s.wait_any(10).status() != Status::forked;
    wrong += s.wait_layer({0, 1}, 0, 10).status() != Status::forked;
    wrong += s.poll().has_value();
    wrong += s.probe(prompt(1, 1)).leading != 0;
    wrong += s.layer_ready({0, 1}, 0);
    s.raise_write_fence(0, 1);
    s.close();
    rig.session.reset();
    return wrong;
  });
  const auto status = child.wait();
  REQUIRE(status.has_value());
  REQUIRE(status->exited_with(0));
  REQUIRE(rig.session->state() == Status::ok);
  rig.daemon.complete(FakeDaemon::answer(rig.daemon.next()));
  REQUIRE(rig.poll().ticket == ticket);
  REQUIRE_FALSE(rig.daemon.said_goodbye());
  REQUIRE(rig.daemon.fences().write[0].value.load() == 0);
}
