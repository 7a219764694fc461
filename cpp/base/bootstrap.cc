#include "expertwire/bootstrap.hpp"

namespace expertwire {

Bootstrap::~Bootstrap() = default;

void Bootstrap::barrier() { all_gather({}); }

}  // namespace expertwire
