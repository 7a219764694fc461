#include "backend/cpu/segment_exchange.hpp"

#include <utility>

#include "base/collective.hpp"
#include "base/descriptor_exchange.hpp"

namespace expertwire::cpu {

std::vector<Peer> exchange_segments(Bootstrap& bootstrap, std::shared_ptr<Segment> own) {
  std::vector<Received> received = exchange_descriptors(bootstrap, {own->descriptor, own, own->mapping.bytes()});
  own->descriptor = Descriptor();
  std::vector<Peer> peers;
  succeed_together(bootstrap, [&] {
    for (Received& one : received) {
      const bool is_local = one.local != nullptr;
      peers.push_back(
          {is_local ? std::static_pointer_cast<Segment>(one.local) : open_segment(std::move(one.descriptor), one.bytes),
           std::move(one.process)});
    }
  });
  return peers;
}

}  // namespace expertwire::cpu
