// A second device for the tests, as torch's private-use device: memory that the host cannot read, numbers as the CPU's.
//
// Its addresses lie in pages that nobody may touch, and the numbers elsewhere: whoever takes the address of a tensor
// and reads it as the host's memory is killed by the processor. Each operation runs on the CPU's own kernel, so results
// have the CPU's bits; but one that is given tensors of both devices is refused, as CUDA refuses it. As with CUDA, a
// number alone (no dimensions) may come from the host; an index may not, which CUDA would copy and wait for.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr auto HERE = c10::DeviceType::PrivateUse1;
constexpr size_t RESERVED = size_t(1) << 40;  // of addresses, not of memory; never given twice
constexpr size_t STEP = 64;
constexpr c10::DeviceIndex DEVICES = 8;

thread_local c10::DeviceIndex current = 0;

class Memory {
 public:
  Memory() {
    void* start = mmap(nullptr, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(start != MAP_FAILED, "no addresses for the second device");
    next_ = static_cast<char*>(start);
  }

  void* allocate(size_t count) {
    std::lock_guard<std::mutex> guard(lock_);
    size_t room = (count / STEP + 1) * STEP;
    char* here = next_;
    next_ += room;
    void* host = nullptr;
    TORCH_CHECK(posix_memalign(&host, STEP, room) == 0, "no memory for the second device");
    blocks_[here] = {host, room};
    held_ += room;
    peak_ = std::max(peak_, held_);
    return here;
  }

  void free(void* here) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = blocks_.find(static_cast<char*>(here));
    held_ -= found->second.second;
    std::free(found->second.first);
    blocks_.erase(found);
  }

  // Where the numbers of a device's address are in the host's memory.
  char* host(const void* there) {
    std::lock_guard<std::mutex> guard(lock_);
    auto after = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(there)));
    TORCH_CHECK(after != blocks_.begin(), "an address that is not of the second device");
    --after;
    auto offset = static_cast<const char*>(there) - after->first;
    TORCH_CHECK(size_t(offset) <= after->second.second, "an address beyond a block of the second device");
    return static_cast<char*>(after->second.first) + offset;
  }

  int64_t held() { return held_; }
  int64_t peak() { return peak_; }
  void forget_peak() { peak_ = held_; }

 private:
  std::mutex lock_;
  std::map<char*, std::pair<void*, size_t>> blocks_;
  char* next_;
  size_t held_ = 0, peak_ = 0;
};

Memory& memory() {
  static Memory* one = new Memory();  // never destroyed: tensors of modules outlive it otherwise
  return *one;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t count) override {
    void* here = memory().allocate(count);
    return {here, here, &release, c10::Device(HERE, current)};
  }
  static void release(void* here) {
    if (here != nullptr) memory().free(here);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(memory().host(to), memory().host(from), count);
  }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(HERE, &allocator);

// As CUDA's, backward passes run in a thread of the device's own.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return HERE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(HERE, std::exchange(current, device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(HERE, current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(c10::Device(HERE, current)); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void resize_storage(c10::StorageImpl* storage, size_t count) {
  c10::DeviceGuard guard(storage->device());
  c10::DataPtr data = allocator.allocate(count);
  size_t kept = std::min(count, storage->nbytes());
  if (kept > 0) std::memcpy(memory().host(data.get()), memory().host(storage->data_ptr().get()), kept);
  storage->set_data_ptr(std::move(data));
  storage->set_nbytes(count);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t count) const override {
    resize_storage(storage.unsafeGetStorageImpl(), count);
  }
};

[[maybe_unused]] const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

bool is_here(const at::Tensor& x) { return x.defined() && x.device().type() == HERE; }

// The same numbers as a tensor of the CPU, sharing memory.
at::Tensor as_cpu(const at::Tensor& x) {
  if (!is_here(x)) return x;
  at::NoGradGuard no_grad;
  c10::InferenceMode off(false);
  if (x.numel() == 0) return at::empty_strided(x.sizes(), x.strides(), x.options().device(c10::kCPU));
  void* data = memory().host(x.const_data_ptr());
  return at::from_blob(data, x.sizes(), x.strides(), x.options().device(c10::kCPU));
}

c10::Device wanted(std::optional<at::Device> device) {
  return c10::Device(HERE, device.has_value() && device->has_index() ? device->index() : current);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(wanted(device));
  c10::DispatchKeySet key(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, key, c10::dtype_or_default(dtype));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(wanted(device));
  c10::DispatchKeySet key(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, key, c10::dtype_or_default(dtype), format);
}

at::Tensor to_device(const at::Tensor& cpu, c10::Device device) {
  at::Tensor made = empty_strided(cpu.sizes(), cpu.strides(), cpu.scalar_type(), std::nullopt, device, std::nullopt);
  as_cpu(made).copy_(cpu);
  return made;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  at::Tensor target = as_cpu(to);
  target.copy_(as_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& x) { return as_cpu(x).item(); }

const at::Tensor& resize(const at::Tensor& x, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = x.unsafeGetTensorImpl();
  int64_t count = 1;
  for (int64_t length : size) count *= length;
  size_t bytes = (count + x.storage_offset()) * x.itemsize();
  if (bytes > x.storage().nbytes()) resize_storage(x.storage().unsafeGetStorageImpl(), bytes);
  impl->set_sizes_contiguous(size);
  return x;
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<at::Tensor> found;
  if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& x : value.toOptionalTensorList())
      if (x.has_value()) found.push_back(*x);
  return found;
}

c10::IValue moved(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(as_cpu(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& x : value.toTensorVector()) list.push_back(as_cpu(x));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& x : value.toOptionalTensorList())
      list.push_back(x.has_value() ? std::optional<at::Tensor>(as_cpu(*x)) : x);
    return list;
  }
  if (value.isDevice()) return c10::IValue(value.toDevice().type() == HERE ? c10::Device(c10::kCPU) : value.toDevice());
  return value;
}

bool is_written(const c10::FunctionSchema& schema, size_t number) {
  const c10::AliasInfo* alias = schema.arguments()[number].alias_info();
  return alias != nullptr && alias->isWrite();
}

// An empty `out` that the operation has given a size.
void take_new_size(const c10::IValue& given, const c10::IValue& used) {
  if (!given.isTensor() || given.toTensor().sizes() == used.toTensor().sizes()) return;
  given.toTensor().resize_(used.toTensor().sizes());
  as_cpu(given.toTensor()).copy_(used.toTensor());
}

c10::Device check_one_device(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  for (const c10::IValue& value : arguments) {
    if (value.isDevice() && !device.has_value()) device = wanted(value.toDevice());
    for (const at::Tensor& x : tensors_of(value))
      if (is_here(x)) device = device.value_or(x.device());
  }
  for (size_t number = 0; number < arguments.size(); number++)
    for (const at::Tensor& x : tensors_of(arguments[number])) {
      bool is_number = x.defined() && x.dim() == 0 && x.device().is_cpu() && !is_written(schema, number);
      TORCH_CHECK(!x.defined() || x.device() == device || is_number, "Expected all tensors to be on the same device: ",
                  schema.operator_name(), " was given argument '", schema.arguments()[number].name(), "' on ",
                  x.device(), " and another on ", wanted(device));
    }
  return wanted(device);
}

// Any other operation: the CPU's kernel over the same memory; what it makes anew is copied to the device.
void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  std::vector<c10::IValue> given(stack->end() - count, stack->end());
  const c10::Device device = check_one_device(schema, given);
  std::vector<c10::IValue> used;
  for (const c10::IValue& value : given) used.push_back(moved(value));
  std::copy(used.begin(), used.end(), stack->end() - count);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t number = 0; number < count; number++)
    if (is_written(schema, number)) take_new_size(given[number], used[number]);
  const size_t returns = schema.returns().size();
  for (size_t number = 0; number < returns; number++) {
    c10::IValue& value = (*stack)[stack->size() - returns + number];
    const c10::AliasInfo* alias = schema.returns()[number].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t argument = 0; argument < count; argument++) {
        const c10::AliasInfo* other = schema.arguments()[argument].alias_info();
        if (other != nullptr && *other == *alias) value = given[argument];
      }
    } else if (value.isTensor()) {
      if (value.toTensor().defined()) value = to_device(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : value.toTensorVector()) list.push_back(to_device(x, device));
      value = list;
    }
  }
}

// No fused attention: the CPU under `sdpa_kernel(SDPBackend.MATH)` computes the same.
int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                   bool, std::optional<double>, bool) {
  return 0;
}

int64_t held() { return memory().held(); }
int64_t peak() { return memory().peak(); }
void forget_peak() { memory().forget_peak(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_fused_sdp_choice", &sdp_choice);
  // Composed of others where a device has none of its own, as the CPU has.
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY(separate_device, m) {
  m.def("held() -> int", &held);
  m.def("peak() -> int", &peak);
  m.def("forget_peak() -> ()", &forget_peak);
}

}  // namespace
