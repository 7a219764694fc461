// Enums and RuntimeConfig. Names and values are those of expertwire/types.hpp.
#include <nanobind/stl/vector.h>

#include "base/env.hpp"
#include "bindings.hpp"
#include "expertwire/types.hpp"

namespace nb = nanobind;

namespace expertwire::bindings {
namespace {

void bind_enums(nb::module_& m) {
  nb::enum_<MoEMode>(m, "MoEMode").value("LATENCY", MoEMode::LATENCY).value("THROUGHPUT", MoEMode::THROUGHPUT);
  nb::enum_<DispatchLayout>(m, "DispatchLayout")
      .value("EXPERT_MAJOR", DispatchLayout::EXPERT_MAJOR)
      .value("RANK_MAJOR", DispatchLayout::RANK_MAJOR)
      .value("TOKEN_MAJOR", DispatchLayout::TOKEN_MAJOR);
  nb::enum_<CombineMode>(m, "CombineMode")
      .value("RANK_LOCAL_REDUCE", CombineMode::RANK_LOCAL_REDUCE)
      .value("DIRECT_SEND", CombineMode::DIRECT_SEND);
  nb::enum_<DispatchDataType>(m, "DispatchDataType")
      .value("BF16", DispatchDataType::BF16)
      .value("FP8_E4M3", DispatchDataType::FP8_E4M3)
      .value("MXFP8", DispatchDataType::MXFP8);
  nb::enum_<ScaleFormat>(m, "ScaleFormat").value("FLOAT32", ScaleFormat::FLOAT32).value("UE8M0", ScaleFormat::UE8M0);
  nb::enum_<ScaleLayout>(m, "ScaleLayout").value("ROW", ScaleLayout::ROW).value("COLUMN", ScaleLayout::COLUMN);
  nb::enum_<IndexType>(m, "IndexType").value("INT32", IndexType::INT32).value("INT64", IndexType::INT64);
  nb::enum_<PeerLossPolicy>(m, "PeerLossPolicy")
      .value("RAISE", PeerLossPolicy::RAISE)
      .value("MASK", PeerLossPolicy::MASK);
  nb::enum_<DeviceType>(m, "DeviceType").value("CPU", DeviceType::CPU).value("CUDA", DeviceType::CUDA);
}

}  // namespace

void bind_config(nb::module_& m) {
  bind_enums(m);
  nb::class_<QuantConfig>(m, "QuantConfig")
      .def(nb::init<>())
      .def_rw("format", &QuantConfig::format)
      .def_rw("round_scale_pow2", &QuantConfig::round_scale_pow2)
      .def_rw("scale_format", &QuantConfig::scale_format)
      .def_rw("scale_layout", &QuantConfig::scale_layout);
  nb::class_<Device>(m, "Device").def(nb::init<>()).def_rw("type", &Device::type).def_rw("index", &Device::index);
  nb::class_<RuntimeConfig>(m, "RuntimeConfig")
      .def(nb::init<>())
      .def_rw("num_experts", &RuntimeConfig::num_experts)
      .def_rw("hidden_size", &RuntimeConfig::hidden_size)
      .def_rw("num_topk", &RuntimeConfig::num_topk)
      .def_rw("max_tokens_per_rank", &RuntimeConfig::max_tokens_per_rank)
      .def_rw("experts_per_rank", &RuntimeConfig::experts_per_rank)
      .def_rw("placement", &RuntimeConfig::placement)
      .def_rw("mode", &RuntimeConfig::mode)
      .def_rw("output_layout", &RuntimeConfig::output_layout)
      .def_rw("combine_mode", &RuntimeConfig::combine_mode)
      .def_rw("quant", &RuntimeConfig::quant)
      .def_rw("invalid_token_expert_id", &RuntimeConfig::invalid_token_expert_id)
      .def_rw("dispatch_num_blocks", &RuntimeConfig::dispatch_num_blocks)
      .def_rw("combine_num_blocks", &RuntimeConfig::combine_num_blocks)
      .def_rw("max_in_flight", &RuntimeConfig::max_in_flight)
      .def_rw("validate", &RuntimeConfig::validate)
      .def_rw("two_phase", &RuntimeConfig::two_phase)
      .def_rw("block_overlap", &RuntimeConfig::block_overlap)
      .def_rw("device", &RuntimeConfig::device)
      .def_rw("timeout_s", &RuntimeConfig::timeout_s)
      .def_rw("on_peer_loss", &RuntimeConfig::on_peer_loss);
  m.def("env_validate", [] { return env().validate; }, "What EXPERTWIRE_VALIDATE says.");
}

}  // namespace expertwire::bindings
