// A short way for the arguments that calls in a loop have: tensors that are just as a communicator takes them. DLPack's
// table of C functions tells what a tensor is in a fraction of the time that its Python attributes take. The answer is only
// yes or no: whom it says no to reads the arguments in Python (arguments.py), where the rules and their messages are.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "expertwire/moe_runtime.hpp"

namespace nb = nanobind;

namespace expertwire::bindings {
namespace {

// What `__dlpack_c_exchange_api__` of a type leads to, as DLPack 1.3 lays it out. Of the functions three are not used here.
struct ExchangeApi {
  struct Header {
    std::uint32_t major;
    std::uint32_t minor;
    Header* previous;
  };
  Header header;
  void (*unused[3])();
  int (*describe)(void* tensor, nb::dlpack::dltensor* out);  // borrowed: nothing in `out` is to be released
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

// Null if the type has none, or none of a version that is known here, or one without these functions.
const ExchangeApi* exchange_api(nb::handle type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  auto* header = static_cast<ExchangeApi::Header*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (header != nullptr && header->major != 1) header = header->previous;
  const auto* api = reinterpret_cast<const ExchangeApi*>(header);
  return api == nullptr || api->describe == nullptr || api->current_stream == nullptr ? nullptr : api;
}

struct Dtype {
  nb::dlpack::dtype_code code;
  std::uint8_t bits;
};
constexpr Dtype kBf16 = {nb::dlpack::dtype_code::Bfloat, 16};
constexpr Dtype kFloat32 = {nb::dlpack::dtype_code::Float, 32};
constexpr Dtype kInt32 = {nb::dlpack::dtype_code::Int, 32};
constexpr Dtype kInt64 = {nb::dlpack::dtype_code::Int, 64};

bool is_contiguous(const nb::dlpack::dltensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t stride = 1;
  bool is_dense = true;
  for (int dim = tensor.ndim - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] == 0) return true;
    if (tensor.shape[dim] != 1) is_dense = is_dense && tensor.strides[dim] == stride;
    stride *= tensor.shape[dim];
  }
  return is_dense;
}

bool has_dtype(const nb::dlpack::dltensor& tensor, Dtype wanted) {
  const nb::dlpack::dtype& dtype = tensor.dtype;
  return dtype.code == static_cast<std::uint8_t>(wanted.code) && dtype.bits == wanted.bits && dtype.lanes == 1;
}

class PlainArguments {
 public:
  PlainArguments(nb::handle type, const ExchangeApi* api, const RuntimeConfig& config,
                 std::vector<std::int64_t> expert_output)
      : type_(nb::borrow(type)),
        api_(api),
        device_{config.device.type == DeviceType::CUDA ? nb::device::cuda::value : nb::device::cpu::value,
                config.device.type == DeviceType::CUDA ? config.device.index : 0},
        hidden_size_(config.hidden_size),
        num_topk_(config.num_topk),
        max_tokens_(config.max_tokens_per_rank),
        takes_combine_weights_(config.output_layout == DispatchLayout::EXPERT_MAJOR),
        expert_output_(std::move(expert_output)) {}

  bool dispatch(LatencyDispatchRequest& request, nb::handle x, nb::handle topk_ids, nb::handle weights) const {
    const auto rows = described(x, kBf16);
    if (!rows || rows->ndim != 2 || rows->shape[0] > max_tokens_ || rows->shape[1] != hidden_size_) return false;
    const std::int64_t slots[] = {rows->shape[0], num_topk_};
    auto ids_type = IndexType::INT64;
    auto ids = described(topk_ids, kInt64);
    if (!ids) {
      ids_type = IndexType::INT32;
      ids = described(topk_ids, kInt32);
    }
    if (!ids || !has_shape(*ids, slots)) return false;
    const float* weights_address = nullptr;
    if (!weights.is_none() && !read_weights(weights, slots, weights_address)) return false;
    if (!read_stream(request.stream)) return false;
    request.num_tokens = static_cast<int>(slots[0]);
    request.x = rows->data;
    request.topk_ids_type = ids_type;
    request.topk_ids = ids->data;
    request.weights = weights_address;
    return true;
  }

  // `request` has its handle and its number of tokens already.
  bool combine(LatencyCombineRequest& request, nb::handle expert_output, nb::handle weights, nb::handle out) const {
    const auto rows = described(expert_output, kBf16);
    if (!rows || !has_shape(*rows, expert_output_)) return false;
    const auto sums = described(out, kBf16);
    const std::int64_t num_tokens = request.num_tokens, of_out[] = {num_tokens, hidden_size_};
    if (!sums || !has_shape(*sums, of_out)) return false;
    const std::int64_t slots[] = {num_tokens, num_topk_};
    const float* weights_address = nullptr;
    if (!weights.is_none() && !(takes_combine_weights_ && read_weights(weights, slots, weights_address))) return false;
    if (!read_stream(request.stream)) return false;
    request.expert_output = rows->data;
    request.weights = weights_address;
    request.out = sums->data;
    return true;
  }

 private:
  // The tensor, if it is a dense and aligned one of this dtype on the communicator's device.
  std::optional<nb::dlpack::dltensor> described(nb::handle tensor, Dtype dtype) const {
    if (!tensor.type().is(type_)) return std::nullopt;  // the table is for this very type
    nb::dlpack::dltensor out;
    if (api_->describe(tensor.ptr(), &out) != 0) {
      PyErr_Clear();
      return std::nullopt;
    }
    if (!has_dtype(out, dtype) || !is_contiguous(out) || out.byte_offset != 0) return std::nullopt;
    if (out.device.device_type != device_.device_type || out.device.device_id != device_.device_id) return std::nullopt;
    if (reinterpret_cast<std::uintptr_t>(out.data) % (dtype.bits / 8U) != 0) return std::nullopt;
    return out;
  }

  static bool has_shape(const nb::dlpack::dltensor& tensor, std::span<const std::int64_t> shape) {
    if (static_cast<std::size_t>(tensor.ndim) != shape.size()) return false;
    for (std::size_t dim = 0; dim < shape.size(); ++dim) {
      if (tensor.shape[dim] != shape[dim]) return false;
    }
    return true;
  }

  // DLPack cannot say that a tensor's values are the negatives of those in memory. Torch makes such views of the imaginary part
  // of conjugates, which of the dtypes here is float32 alone.
  bool read_weights(nb::handle weights, std::span<const std::int64_t> shape, const float*& address) const {
    const auto tensor = described(weights, kFloat32);
    if (!tensor || !has_shape(*tensor, shape) || nb::cast<bool>(weights.attr("is_neg")())) return false;
    address = static_cast<const float*>(tensor->data);
    return true;
  }

  bool read_stream(void*& stream) const {
    if (device_.device_type == nb::device::cpu::value) return true;
    if (api_->current_stream(device_.device_type, device_.device_id, &stream) == 0) return true;
    PyErr_Clear();
    return false;
  }

  nb::object type_;
  const ExchangeApi* api_;
  nb::dlpack::device device_;
  std::int64_t hidden_size_;
  std::int64_t num_topk_;
  std::int64_t max_tokens_;
  bool takes_combine_weights_;
  std::vector<std::int64_t> expert_output_;
};

std::optional<PlainArguments> plain_arguments(nb::handle type, const RuntimeConfig& config,
                                              std::vector<std::int64_t> expert_output) {
  const ExchangeApi* api = exchange_api(type);
  if (api == nullptr) return std::nullopt;
  return PlainArguments(type, api, config, std::move(expert_output));
}

}  // namespace

void bind_tensors(nb::module_& m) {
  nb::class_<PlainArguments>(m, "PlainArguments", "Reads arguments that are tensors of one type, just as they must be.")
      .def("dispatch", &PlainArguments::dispatch, nb::arg("request"), nb::arg("x").none(), nb::arg("topk_ids").none(),
           nb::arg("weights").none(), "Whether they are. If not, the request is as it was.")
      .def("combine", &PlainArguments::combine, nb::arg("request"), nb::arg("expert_output").none(),
           nb::arg("weights").none(), nb::arg("out").none(), "Whether they are. If not, the request is as it was.");
  m.def("plain_arguments", &plain_arguments, nb::arg("tensor_type"), nb::arg("config"), nb::arg("expert_output"),
        "For tensors of a type, if it has DLPack's C functions.");
}

}  // namespace expertwire::bindings
