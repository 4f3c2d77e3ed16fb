#if !defined(HICACHE_CATCH2_V3)
#define CATCH_CONFIG_RUNNER
#endif
#include "tests/gpu/gpu_cases.hpp"

#include <unistd.h>

#include <nlohmann/json.hpp>

#if defined(HICACHE_CATCH2_V3)
#include <catch2/catch_session.hpp>
#endif

namespace hicache::test {

std::string why_no_gpu() {
  Child probe = Child::run([] {
    const auto gpu = Gpu::open();
    if (gpu) return 0;
    say(gpu.error().message);
    return 1;
  });
  const std::string text = probe.read_all();
  const auto status = probe.wait();
  if (status && status->exited_with(0)) return {};
  return text.empty() ? "the GPU can't be used" : text.substr(0, text.find('\n'));
}

void await_pinned(const TestDaemon& daemon) {
  std::string text;
  const bool pinned = eventually([&] {
    const auto answer = control(daemon.socket_path(), {"status"});
    if (!answer) return false;
    text = *answer;
    const auto cuda = nlohmann::json::parse(text).at("cuda");
    return cuda.at("state") == "on" && cuda.at("pinned_bytes") == cuda.at("pool_bytes");
  });
  INFO(text);
  REQUIRE(pinned);
}

std::uint64_t gpu_status(const TestDaemon& daemon, const std::string& key) {
  const std::string text = must(control(daemon.socket_path(), {"status"}));
  return nlohmann::json::parse(text).at("cuda").at("gpus").at(0).at(key).get<std::uint64_t>();
}

Child start_rank(const std::function<void(const Gpu&)>& body) {
  return Child::run([body] {
    try {
      const auto gpu = must(Gpu::open());
      body(*gpu);
      return 0;
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
      return 1;
    }
  });
}

void say(const std::string& line) {
  const std::string text = line + "\n";
  if (::write(STDOUT_FILENO, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    throw std::runtime_error("standard output is closed");
}

void require_success(Child& rank) {
  const auto status = rank.wait(3 * kPatienceMs);
  INFO(rank.error_text());
  REQUIRE(status.has_value());
  REQUIRE(status->exited_with(0));
}

void cuda(const Gpu& gpu, CUresult result, const char* what) {
  must(bench::check(gpu.driver(), result, what));
}

CUdeviceptr create_mapped(const Gpu& gpu, std::size_t& bytes, CUmemAllocationHandleType handle_type) {
  const bench::Driver& d = gpu.driver();
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {gpu.device()}};
  properties.requestedHandleTypes = handle_type;
  std::size_t granularity = 0;
  cuda(gpu, d.cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
       "granularity");
  bytes = align_up(bytes, granularity);
  CUmemGenericAllocationHandle handle = 0;
  cuda(gpu, d.cuMemCreate(&handle, bytes, &properties, 0), "cuMemCreate");
  CUdeviceptr address = 0;
  cuda(gpu, d.cuMemAddressReserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
  cuda(gpu, d.cuMemMap(address, bytes, 0, handle, 0), "cuMemMap");
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  cuda(gpu, d.cuMemSetAccess(address, bytes, &access, 1), "cuMemSetAccess");
  cuda(gpu, d.cuMemRelease(handle), "cuMemRelease");
  return address;
}

NamespaceSpec gpu_spec(Attention attention, std::uint32_t layers, std::uint32_t head_dim) {
  NamespaceSpec spec;
  spec.model = "gpu-test";
  spec.dtype = "bfloat16";
  spec.attention = attention;
  spec.page_tokens = 16;
  spec.layers = layers;
  spec.heads_per_shard = 1;
  spec.head_dim = head_dim;
  spec.element_bytes = 2;
  return spec;
}

std::vector<KeyedPage> scattered(const std::vector<PrefixHash>& keys) {
  const auto count = static_cast<std::uint32_t>(keys.size());
  std::vector<KeyedPage> pages;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t evens = (count + 1) / 2;
    pages.push_back({keys[i], DevicePage{i < evens ? 2 * i : 2 * (i - evens) + 1}});
  }
  return pages;
}

std::vector<DevicePage> places(const std::vector<KeyedPage>& pages) {
  std::vector<DevicePage> out;
  for (const KeyedPage& page : pages) out.push_back(page.page);
  return out;
}

void expect_right(GpuRank& rank, const std::vector<KeyedPage>& pages) {
  const auto found = must(rank.memory().verify(pages, 0));
  expect(found.words > 0, "no word was checked");
  expect(found.wrong == 0,
         fmt::format("{} of {} words are wrong, one at {}", found.wrong, found.words, found.first));
}

void write_all(GpuRank& rank, const std::vector<PrefixHash>& keys, const std::vector<KeyedPage>& pages) {
  must(rank.memory().fill(pages, 0));
  must(rank.memory().synchronize());
  const LeaseId lease = must(rank.reserve(keys, 0));
  must(rank.wait(rank.session().write(lease, 0, places(pages)), static_cast<std::uint32_t>(pages.size())));
  must(rank.release(lease));
}

}  // namespace hicache::test

int main(int argc, char** argv) {
  const std::string why = hicache::test::why_no_gpu();
  if (!why.empty()) {
    std::printf("SKIPPED: GPU tests: %s\n", why.c_str());
    return 77;
  }
  return Catch::Session().run(argc, argv);
}
