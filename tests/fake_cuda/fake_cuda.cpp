// A CUDA device that computes nothing, for a torch that was built for the CPU: a guard for devices and streams, and the
// hooks that say that there is a GPU. Under FakeTensorMode no kernel is called, so this is all that a step asks for.
//
// It must be loaded before torch, which keeps the hooks that it finds at its first look.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceType kCUDA = c10::DeviceType::CUDA;

c10::Device first_device() {
  return c10::Device(kCUDA, 0);
}

c10::Stream default_stream() {
  return c10::Stream(c10::Stream::DEFAULT, first_device());
}

// Devices and streams: always the first and the default one; what is waited for is done already.
struct FakeGuard : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kCUDA;

  c10::DeviceType type() const override { return kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return first_device(); }
  c10::Device getDevice() const override { return first_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  c10::Stream getStream(c10::Device) const override { return default_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return default_stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return default_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return default_stream(); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard);

// What torch asks of a build for CUDA before it uses the device.
struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

} // namespace
