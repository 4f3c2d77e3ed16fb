// What GPU memory can be registered, and what is refused with which reason.
#include <cstring>

#include "libhicache/include/hicache/cuda.hpp"
#include "tests/gpu/gpu_cases.hpp"
#include "tools/bench/pattern_math.hpp"

namespace hicache::test {
namespace {

void expect_refused(const Result<CudaAllocation>& described, Status status, const std::string& reason) {
  expect(!described, "memory that must be refused was described");
  expect(described.status() == status && described.error().message.find(reason) != std::string::npos,
         fmt::format("refused with {}: {}; expected {} with \"{}\"", to_string(described.status()),
                     described.error().message, to_string(status), reason));
}

// Writes pages from the range, spoils them, loads them, and compares.
void round_trip_in(const Gpu& gpu, const std::string& socket, CUdeviceptr start, std::uint64_t range_bytes) {
  const bench::Driver& d = gpu.driver();
  const NamespaceSpec spec = gpu_spec(Attention::mla, 1);
  const std::uint64_t piece = spec.piece_bytes();
  const auto pages = static_cast<std::uint32_t>(range_bytes / piece);
  AttachOptions options;
  options.socket_path = socket;
  options.engine = "memory";
  options.spec = spec;
  auto session = must(Session::attach(options));
  const std::vector<CudaRange> ranges{{pointer_of(start), range_bytes}};
  const std::vector<DeviceTensor> tensors{{0, 0, TensorKind::latent, 0, piece, piece}};
  must(register_cuda_buffers(*session, ranges, tensors, pages));
  std::vector<std::uint64_t> words(pages * piece / 8);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = bench::pattern_word(start, i);
  cuda(gpu, d.cuMemcpyHtoD(start, words.data(), words.size() * 8), "filling");
  cuda(gpu, d.cuStreamSynchronize(nullptr), "filling");  // the copy may return before its end
  const auto keys = bench::made_up_keys(start, pages);
  std::vector<DevicePage> places;
  for (std::uint32_t i = 0; i < pages; ++i) places.push_back(DevicePage{i});
  const auto lease = must(session->wait(must(session->reserve(1, keys)), kPatienceMs)).lease;
  const auto written = must(session->wait(must(session->write(lease, 0, places)), kPatienceMs));
  expect(written.status == Status::ok && written.written == pages, "the write did not keep every page");
  cuda(gpu, d.cuMemsetD8(start, 0xa5, pages * piece), "spoiling");
  std::vector<std::uint64_t> back(words.size());
  cuda(gpu, d.cuMemcpyDtoH(back.data(), start, back.size() * 8), "reading");  // the memset is over
  const auto loaded = must(session->wait(must(session->load(lease, 0, places)), kPatienceMs));
  expect(loaded.status == Status::ok, "the load failed");
  cuda(gpu, d.cuMemcpyDtoH(back.data(), start, back.size() * 8), "reading");
  expect(back == words, "the bytes that came back differ");
}

}  // namespace

TEST_CASE("Ranges that begin inside an allocation are found by the driver and copied right") {
  TestDaemon daemon(cuda_config());
  Child child = start_rank([&](const Gpu& gpu) {
    auto memory = must(bench::GpuBytes::allocate(gpu, 8 * kMiB));
    const CUdeviceptr inside = memory.address() + 3 * kMiB + 4096;
    const auto described = must(describe_cuda_allocation({pointer_of(inside), kMiB}));
    expect(described.allocation.base_offset == 3 * kMiB + 4096, "base_offset");
    expect(described.allocation.base_bytes == 8 * kMiB, "base_bytes");
    expect(described.allocation.export_kind == CudaExport::ipc_handle && !described.fd.valid(),
           "export_kind");
    round_trip_in(gpu, daemon.socket_path(), inside, kMiB);
    expect_refused(describe_cuda_allocation({pointer_of(inside), 6 * kMiB}), Status::invalid_argument,
                   "leaves its");
  });
  require_success(child);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("Memory of cuMemCreate travels as a file descriptor") {
  TestDaemon daemon(cuda_config());
  Child child = start_rank([&](const Gpu& gpu) {
    std::size_t bytes = 4 * kMiB;
    const CUdeviceptr address = create_mapped(gpu, bytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    const auto described = must(describe_cuda_allocation({pointer_of(address + kMiB), kMiB}));
    expect(described.allocation.export_kind == CudaExport::posix_fd && described.fd.valid(), "export_kind");
    expect(described.allocation.base_bytes == bytes && described.allocation.base_offset == kMiB, "place");
    round_trip_in(gpu, daemon.socket_path(), address + kMiB, kMiB);
  });
  require_success(child);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("Memory that no other process can open is refused with the reason") {
  Child child = start_rank([&](const Gpu& gpu) {
    const bench::Driver& d = gpu.driver();
    auto stream = must(bench::GpuStream::create(gpu));
    CUdeviceptr pooled = 0;
    cuda(gpu, d.cuMemAllocAsync(&pooled, kMiB, stream.get()), "cuMemAllocAsync");
    must(stream.synchronize());
    expect_refused(describe_cuda_allocation({pointer_of(pooled), kMiB}), Status::not_permitted,
                   "cudaMallocAsync");
    CUdeviceptr managed = 0;
    cuda(gpu, d.cuMemAllocManaged(&managed, kMiB, CU_MEM_ATTACH_GLOBAL), "cuMemAllocManaged");
    expect_refused(describe_cuda_allocation({pointer_of(managed), kMiB}), Status::not_permitted, "managed");
    std::size_t bytes = 2 * kMiB;
    const CUdeviceptr closed = create_mapped(gpu, bytes, CU_MEM_HANDLE_TYPE_NONE);
    expect_refused(describe_cuda_allocation({pointer_of(closed), kMiB}), Status::not_permitted,
                   "cuMemCreate");
    void* host = nullptr;
    cuda(gpu, d.cuMemHostAlloc(&host, kMiB, 0), "cuMemHostAlloc");
    expect_refused(describe_cuda_allocation({host, kMiB}), Status::not_permitted, "host memory");
    int local = 0;
    expect_refused(describe_cuda_allocation({&local, 4}), Status::invalid_argument,
                   "no memory that CUDA knows");
    expect_refused(describe_cuda_allocation({nullptr, 4}), Status::invalid_argument, "0x0");
  });
  require_success(child);
}

TEST_CASE("A garbage handle and a range outside the allocation are refused and leave the daemon healthy") {
  TestDaemon daemon(cuda_config());
  Child child = start_rank([&](const Gpu& gpu) {
    auto memory = must(bench::GpuBytes::allocate(gpu, 2 * kMiB));
    const NamespaceSpec spec = gpu_spec(Attention::mla, 1);
    const auto described = must(describe_cuda_allocation({pointer_of(memory.address()), 2 * kMiB}));
    const auto attempt = [&](const DeviceAllocation& allocation) {
      AttachOptions options;
      options.socket_path = daemon.socket_path();
      options.engine = "garbage";
      options.spec = spec;
      auto session = must(Session::attach(options));
      DeviceGeometry geometry;
      geometry.pages = 4;
      geometry.allocations = {allocation};
      geometry.tensors = {{0, 0, TensorKind::latent, 0, spec.piece_bytes(), spec.piece_bytes()}};
      return session->register_buffers(geometry, {});
    };
    DeviceAllocation garbage = described.allocation;
    garbage.ipc_handle.fill(0x5a);
    expect(!attempt(garbage), "a garbage handle was accepted");
    DeviceAllocation elsewhere = described.allocation;
    elsewhere.gpu_uuid.fill(0x11);
    expect(!attempt(elsewhere), "memory of an unknown GPU was accepted");
    DeviceAllocation outside = described.allocation;
    outside.base_offset = 64 * kMiB;
    outside.base_bytes = 128 * kMiB;  // a lie
    expect(!attempt(outside), "a range outside the allocation was accepted");
    round_trip_in(gpu, daemon.socket_path(), memory.address(), kMiB);
  });
  require_success(child);
  CHECK(daemon.stop() == 0);
}

}  // namespace hicache::test
