// Devices "cuda:0", "cuda:1", ... for a torch that was built without CUDA. Their memory is the host's, their kernels
// are the CPU's, and a tensor of one device does not meet one of another: that is an error, as on GPUs.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <cstring>
#include <set>

using namespace at;
using c10::DispatchKey;

namespace {

constexpr int kMost = 16;
int devices = 0;
void (*report)(const char* kind, const char* what) = nullptr;
thread_local DeviceIndex current = 0;  // each thread has its own, as with CUDA
std::array<std::atomic<int64_t>, kMost> held{}, peak{};
std::array<Generator, kMost> generators;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Device on(DeviceIndex index) { return {kCUDA, index < 0 ? current : index}; }
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device d) const override { Device old = on(current); uncheckedSetDevice(d); return old; }
  Device getDevice() const override { return on(current); }
  void setDevice(Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.has_index()) current = d.index(); }
  Stream getStream(Device d) const override { return Stream(Stream::DEFAULT, on(d.index())); }
  Stream getDefaultStream(Device d) const override { return getStream(d); }
  Stream getNewStream(Device d, int) const override { return getStream(d); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getStream(d); }
  Stream exchangeStream(Stream s) const override { return s; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  // a kernel is over when its call returns: events and streams have nothing to wait for
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

struct Hooks final : CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  std::string showConfig() const override { return "emulated"; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? current : std::exchange(current, d); }
  const Generator& getDefaultGenerator(DeviceIndex d) const override { return generators.at(d < 0 ? current : d); }
  Generator getNewGenerator(DeviceIndex d) const override {  // the first one of a device is what it draws from
    auto made = make_generator<CPUGeneratorImpl>();
    auto& own = generators.at(d < 0 ? current : d);
    if (!own.defined()) own = made;
    return made;
  }
};

c10::DataPtr holding(const c10::Storage& storage, Device device) {
  void* memory = storage.mutable_data();
  auto* owner = new c10::Storage(storage);
  return {memory, owner, [](void* o) { delete static_cast<c10::Storage*>(o); }, device};
}

// Memory that a kernel of the CPU has made, from now on that of a device; its bytes are counted as long as it lives.
c10::DataPtr moved(const c10::Storage& storage, Device device) {
  struct Owner { c10::Storage storage; int64_t bytes; DeviceIndex index; };
  auto* owner = new Owner{storage, static_cast<int64_t>(storage.nbytes()), device.index()};
  const int64_t now = held[owner->index] += owner->bytes;
  for (int64_t most = peak[owner->index]; now > most && !peak[owner->index].compare_exchange_weak(most, now);) {}
  return {storage.mutable_data(), owner, [](void* o) {
    auto* owner = static_cast<Owner*>(o);
    held[owner->index] -= owner->bytes;
    delete owner;
  }, device};
}

bool same(const c10::Storage& a, const c10::Storage& b) { return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl(); }

c10::Storage storage_of(c10::DataPtr memory, size_t bytes) {
  return {c10::Storage::use_byte_size_t(), bytes, std::move(memory), c10::GetCPUAllocator(), true};
}

Tensor tensor_like(const Tensor& t, c10::Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  made._set_conj(t.is_conj());
  made._set_neg(t.is_neg());
  return made;
}

// One call of an operator on tensors of a device: the CPU's kernel runs on tensors that share their memory.
struct Call {
  std::string name;
  std::optional<Device> device;
  std::vector<std::pair<Tensor, Tensor>> lent;  // a tensor of a device, and the CPU's
  std::vector<c10::Storage> before;             // of the CPU's
  // what GPUs take from the host too: copies, and an index of the host for a tensor of a device
  bool copies() const { return name == "aten::copy_"; }
  bool indexes() const { return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0; }

  Tensor lend(const Tensor& t) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      TORCH_CHECK(t.dim() == 0 || copies() || (indexes() && device), "Expected all tensors to be on the same device, but ",
                  name, " got one of shape ", t.sizes(), " on ", t.device(), " beside others on ", where());
      return t;
    }
    TORCH_CHECK(!device || *device == t.device() || copies(), "Expected all tensors to be on the same device, but ", name,
                " found at least two devices, ", where(), " and ", t.device());
    device = t.device();
    for (auto& [mine, theirs] : lent) if (mine.is_same(t)) return theirs;
    auto alias = tensor_like(t, storage_of(holding(t.storage(), kCPU), t.storage().nbytes()), DispatchKey::CPU);
    lent.emplace_back(t, alias);
    before.push_back(alias.storage());
    return alias;
  }
  std::string where() const { return device ? device->str() : "a device"; }

  // An operator may have resized a tensor, or given it other memory.
  void settle() {
    for (size_t i = 0; i < lent.size(); ++i) {
      auto& [mine, theirs] = lent[i];
      auto now = theirs.storage(), own = mine.storage();
      if (!same(now, before[i])) mine.unsafeGetTensorImpl()->set_storage_keep_dtype(storage_on_device(now));
      else if (now.mutable_data() != own.mutable_data()) {
        own.set_data_ptr_noswap(moved(now, mine.device()));
        own.set_nbytes(now.nbytes());
      }
      if (mine.sizes() != theirs.sizes() || mine.strides() != theirs.strides() || mine.storage_offset() != theirs.storage_offset())
        mine.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
    }
  }
  c10::Storage storage_on_device(const c10::Storage& cpu) const {
    for (size_t i = 0; i < lent.size(); ++i) if (same(before[i], cpu)) return lent[i].first.storage();
    return storage_of(moved(cpu, *device), cpu.nbytes());
  }
  Tensor give_back(const Tensor& t) const {
    if (!t.defined() || !t.is_cpu() || !device) return t;
    for (auto& [mine, theirs] : lent) if (theirs.is_same(t)) return mine;
    return tensor_like(t, storage_on_device(t.storage()), DispatchKey::CUDA);
  }
};

const std::set<std::string> kBlocking{"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim",
                                      "aten::unique_consecutive", "aten::_local_scalar_dense"};

void on_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  auto values = torch::jit::pop(*stack, arguments.size());
  Call call{op.schema().name()};
  if (call.copies()) {
    const bool to = values[0].toTensor().is_cuda(), from = values[1].toTensor().is_cuda();
    report(to ? (from ? "device to device" : "host to device") : "device to host", "aten::copy_");
  } else if (kBlocking.count(call.name)) {
    report(call.name == "aten::_local_scalar_dense" ? "item" : "blocks", call.name.c_str());
  }
  for (auto& value : values)  // (first: an operator that makes a tensor has no other device)
    if (value.isDevice() && value.toDevice().is_cuda()) {
      call.device = Guard::on(value.toDevice().index());
      value = Device(kCPU);
    }
  for (size_t i = 0; i < values.size(); ++i) {
    auto& value = values[i];
    if (value.isTensor()) value = call.lend(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (const Tensor& t : value.toTensorVector()) all.push_back(call.lend(t));
      value = all;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) all.push_back(t ? std::optional(call.lend(*t)) : t);
      value = all;
    } else if (value.isStorage() && value.toStorage().device().is_cuda()) {
      auto storage = value.toStorage();
      call.device = storage.device();
      call.lent.emplace_back(tensor_like(values[0].toTensor(), storage, DispatchKey::CUDA), Tensor());
      auto alias = storage_of(holding(storage, kCPU), storage.nbytes());
      call.lent.back().second = tensor_like(call.lent.back().first, alias, DispatchKey::CPU);
      call.before.push_back(alias);
      value = alias;
    } else if (value.isNone() && call.device && arguments[i].name() == "generator") {
      value = generators.at(call.device->index());
    }
  }
  torch::jit::Stack results(values.begin(), values.end());
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &results);
  call.settle();
  for (auto& result : results) {
    if (result.isTensor()) result = call.give_back(result.toTensor());
    else if (result.isTensorList()) {
      c10::List<Tensor> all;
      for (const Tensor& t : result.toTensorVector()) all.push_back(call.give_back(t));
      result = all;
    }
    torch::jit::push(*stack, std::move(result));
  }
}

void nothing(const c10::OperatorHandle& op, torch::jit::Stack* stack) { torch::jit::pop(*stack, op.schema().arguments().size()); }

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

extern "C" void start(int count, void (*listener)(const char*, const char*)) {
  devices = count;
  report = listener;
  // torch has made its hooks long ago, and they are none: an object of the same size takes their place
  static_assert(sizeof(Hooks) == sizeof(CUDAHooksInterface));
  new (const_cast<CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
  auto& dispatcher = c10::Dispatcher::singleton();
  static std::vector<c10::RegistrationHandleRAII> kept;
  auto add = [&](const c10::OperatorName& name, auto kernel) {
    kept.push_back(dispatcher.registerImpl(name, DispatchKey::CUDA, kernel, std::nullopt, nullptr, "emulated"));
  };
  const auto emulated = c10::KernelFunction::makeFromBoxedFunction<&on_device>();
  // what the CPU has a kernel of its own for, and what asks a tensor whether it is on a GPU
  const std::set<std::string> choosing{"aten::convolution", "aten::_convolution", "aten::convolution_backward", "aten::copy_"};
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || op->hasKernelForDispatchKey(DispatchKey::CUDA)) continue;
    if (name.name == "aten::_fused_sdp_choice" || name.name == "aten::native_dropout") continue;  // emulated_cuda.py has them
    if (name.name == "aten::record_stream") add(name, c10::KernelFunction::makeFromBoxedFunction<&nothing>());
    else if (op->hasKernelForDispatchKey(DispatchKey::CPU) || (name.overload_name.empty() && choosing.count(name.name))) add(name, emulated);
  }
}
extern "C" int current_device() { return current; }
extern "C" int exchange_device(int device) { return std::exchange(current, static_cast<DeviceIndex>(device)); }
extern "C" int64_t held_bytes(int device) { return held.at(device); }
extern "C" int64_t peak_bytes(int device) { return peak.at(device); }
extern "C" void reset_peak(int device) { peak.at(device) = held.at(device).load(); }
extern "C" void resize_storage(void* storage, size_t bytes) {
  auto kept = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(static_cast<c10::StorageImpl*>(storage)));
  auto made = storage_of(c10::GetCPUAllocator()->allocate(bytes), bytes);
  const auto shared = std::min(bytes, kept.nbytes());
  if (shared) std::memcpy(made.mutable_data(), kept.data(), shared);
  kept.set_data_ptr_noswap(moved(made, kept.device()));
  kept.set_nbytes(bytes);
}
