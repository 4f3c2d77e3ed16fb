#include "tools/bench/gpu/gpu_pages.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "tools/bench/pattern_math.hpp"

namespace hicache::bench {
namespace {

constexpr unsigned kThreads = 256;
// Allocators of engines ask the driver for whole 2 MiB pages; see docs/gpu.md for what other sizes cost.
constexpr std::uint64_t kAllocationUnit = 2 * kMiB;

const void* pointer_of(CUdeviceptr address) {
  return reinterpret_cast<const void*>(static_cast<std::uintptr_t>(address));
}

}  // namespace

Result<std::unique_ptr<GpuPages>> GpuPages::create(const Gpu& gpu, const NamespaceSpec& spec,
                                                   std::uint32_t pages, BufferLayout layout,
                                                   std::uint64_t gap) {
  auto stream = GpuStream::create(gpu);
  if (!stream) return stream.error();
  std::unique_ptr<GpuPages> made(new GpuPages(gpu, spec, pages, std::move(*stream)));
  const std::uint64_t tensor_bytes = spec.piece_bytes() * pages;
  const std::uint32_t tensors = spec.layers * spec.kinds();
  const std::uint32_t per_allocation = layout == BufferLayout::separate ? 1 : tensors;
  for (std::uint32_t i = 0; i < tensors; i += per_allocation) {
    auto bytes = GpuBytes::allocate(gpu, align_up(gap + tensor_bytes * per_allocation, kAllocationUnit));
    if (!bytes) return bytes.error();
    made->ranges_.push_back({pointer_of(bytes->address() + gap), tensor_bytes * per_allocation});
    made->memory_.push_back(std::move(*bytes));
  }
  for (std::uint32_t i = 0; i < tensors; ++i) {
    DeviceTensor tensor;
    tensor.allocation = i / per_allocation;
    tensor.layer = i % spec.layers;
    tensor.kind =
        spec.attention == Attention::mla ? TensorKind::latent : static_cast<TensorKind>(i / spec.layers);
    const bool blocks = layout == BufferLayout::blocks;
    tensor.offset = (blocks ? spec.piece_bytes() : tensor_bytes) * (i % per_allocation);
    tensor.page_stride = blocks ? spec.shard_bytes() : spec.piece_bytes();
    tensor.page_bytes = spec.piece_bytes();
    made->tensors_.push_back(tensor);
  }
  if (const Outcome prepared = made->prepare(); !prepared) return prepared.error();
  return made;
}

Outcome GpuPages::prepare() {
  std::vector<PatternTensor> list;
  for (const DeviceTensor& tensor : tensors_) {
    const auto start = reinterpret_cast<std::uintptr_t>(ranges_[tensor.allocation].pointer);
    list.push_back({start + tensor.offset, tensor.page_stride,
                    static_cast<std::uint32_t>(tensor.page_bytes / sizeof(std::uint64_t)), tensor.layer,
                    static_cast<std::uint32_t>(tensor.kind), 0});
  }
  const std::array<std::pair<GpuBytes*, std::uint64_t>, 3> buffers{
      {{&tensor_list_, list.size() * sizeof(PatternTensor)},
       {&page_list_, std::uint64_t{pages_} * sizeof(PatternPage)},
       {&findings_, sizeof(PatternFindings)}}};
  for (const auto& [buffer, bytes] : buffers) {
    auto made = GpuBytes::allocate(gpu_, bytes);
    if (!made) return made.error();
    *buffer = std::move(*made);
  }
  const std::array<std::pair<CUfunction*, const char*>, 3> kernels{
      {{&fill_, "hicache_fill"}, {&poison_, "hicache_poison"}, {&verify_, "hicache_verify"}}};
  for (const auto& [function, name] : kernels) {
    const auto found = gpu_.kernel(name);
    if (!found) return found.error();
    *function = *found;
  }
  return upload(tensor_list_, list.data(), list.size() * sizeof(PatternTensor),
                "sending the list of tensors");
}

Outcome GpuPages::register_with(Session& session) const {
  return register_cuda_buffers(session, ranges_, tensors_, pages_);
}

PatternNamespace GpuPages::space(std::uint32_t shard) const {
  PatternNamespace out{};
  std::copy(digest_.words.begin(), digest_.words.end(), out.digest);
  out.shard = shard;
  return out;
}

// Waits for what the stream still does with the list before it is overwritten.
Outcome GpuPages::send(std::span<const KeyedPage> pages) {
  std::vector<PatternPage> list(pages.size());
  for (std::size_t i = 0; i < pages.size(); ++i) {
    std::copy(pages[i].key.words.begin(), pages[i].key.words.end(), list[i].key);
    list[i].page = pages[i].page.value;
  }
  if (list.size() > pages_) {
    return Error{Status::invalid_argument, fmt::format("{} pages at once; at most {}", list.size(), pages_),
                 0};
  }
  if (const Outcome idle = synchronize(); !idle) return idle;
  return upload(page_list_, list.data(), list.size() * sizeof(PatternPage), "sending the list of pages");
}

// Through the stream of the kernels: a plain copy may return while its end is still on the way, and they
// would not wait for it.
Outcome GpuPages::upload(const GpuBytes& to, const void* from, std::uint64_t bytes, const char* what) {
  const Driver& d = gpu_.driver();
  if (Outcome sent = check(d, d.cuMemcpyHtoDAsync(to.address(), from, bytes, stream_.get()), what); !sent)
    return sent;
  return synchronize();
}

Outcome GpuPages::fill(std::span<const KeyedPage> pages, std::uint32_t shard) {
  if (pages.empty()) return success();
  if (Outcome sent = send(pages); !sent) return sent;
  PatternNamespace pattern = space(shard);
  CUdeviceptr page_list = page_list_.address();
  CUdeviceptr tensor_list = tensor_list_.address();
  std::array<void*, 3> arguments{&pattern, &page_list, &tensor_list};
  return gpu_.launch(fill_, static_cast<unsigned>(pages.size()), static_cast<unsigned>(tensors_.size()),
                     kThreads, stream_.get(), arguments.data());
}

Outcome GpuPages::poison(std::span<const KeyedPage> pages) {
  if (pages.empty()) return success();
  if (Outcome sent = send(pages); !sent) return sent;
  CUdeviceptr page_list = page_list_.address();
  CUdeviceptr tensor_list = tensor_list_.address();
  std::array<void*, 2> arguments{&page_list, &tensor_list};
  return gpu_.launch(poison_, static_cast<unsigned>(pages.size()), static_cast<unsigned>(tensors_.size()),
                     kThreads, stream_.get(), arguments.data());
}

Result<PatternCheck> GpuPages::verify(std::span<const KeyedPage> pages, std::uint32_t shard) {
  PatternCheck out;
  if (pages.empty()) return out;
  if (const Outcome sent = send(pages); !sent) return sent.error();
  const Driver& d = gpu_.driver();
  PatternFindings found{0, 0, ~0ull};
  if (const Outcome done = upload(findings_, &found, sizeof found, "clearing findings"); !done) {
    return done.error();
  }
  PatternNamespace pattern = space(shard);
  CUdeviceptr page_list = page_list_.address();
  CUdeviceptr tensor_list = tensor_list_.address();
  CUdeviceptr findings = findings_.address();
  std::array<void*, 4> arguments{&pattern, &page_list, &tensor_list, &findings};
  if (const Outcome done =
          gpu_.launch(verify_, static_cast<unsigned>(pages.size()), static_cast<unsigned>(tensors_.size()),
                      kThreads, stream_.get(), arguments.data());
      !done) {
    return done.error();
  }
  if (const Outcome done = synchronize(); !done) return done.error();
  if (const Outcome done =
          check(d, d.cuMemcpyDtoH(&found, findings_.address(), sizeof found), "reading findings");
      !done) {
    return done.error();
  }
  out.wrong = found.wrong_words;
  out.poison = found.poison_words;
  for (const DeviceTensor& tensor : tensors_) out.words += tensor.page_bytes / sizeof(std::uint64_t);
  out.words *= pages.size();
  if (found.wrong_words > 0) {
    const DeviceTensor& tensor = tensors_[static_cast<std::uint32_t>(found.first_wrong)];
    out.first = fmt::format("page {} (device page {}), layer {}, kind {}", found.first_wrong >> 32,
                            pages[found.first_wrong >> 32].page.value, tensor.layer,
                            static_cast<std::uint32_t>(tensor.kind));
  }
  return out;
}

Result<std::uint64_t> GpuPages::count_wrong_on_host(std::span<const KeyedPage> pages,
                                                    std::uint32_t shard) const {
  if (const Outcome idle = synchronize(); !idle) return idle.error();
  const Driver& d = gpu_.driver();
  const PatternNamespace pattern = space(shard);
  std::uint64_t wrong = 0;
  for (const DeviceTensor& tensor : tensors_) {
    const auto start = reinterpret_cast<std::uintptr_t>(ranges_[tensor.allocation].pointer) + tensor.offset;
    const std::size_t stride = tensor.page_stride / sizeof(std::uint64_t);
    std::vector<std::uint64_t> words(stride * pages_);
    if (const Outcome done = check(
            d, d.cuMemcpyDtoH(words.data(), start, words.size() * sizeof(std::uint64_t)), "reading a tensor");
        !done) {
      return done.error();
    }
    for (const KeyedPage& page : pages) {
      const std::uint64_t base = pattern_base(pattern.digest, page.key.words.data(), shard, tensor.layer,
                                              static_cast<std::uint32_t>(tensor.kind));
      const std::uint64_t* piece = &words[page.page.value * stride];
      bool right = true;
      for (std::size_t i = 0; i < tensor.page_bytes / sizeof(std::uint64_t); ++i)
        right = right && piece[i] == pattern_word(base, i);
      wrong += right ? 0 : 1;
    }
  }
  return wrong;
}

}  // namespace hicache::bench
