// A toy MoE layer: dispatch, experts that multiply by their number plus one, combine. Experts run on the host, whatever
// the memory, so that the examples need no kernels.
#pragma once

#include <memory>

#include "expertwire/bootstrap.hpp"

// The program's one argument, a number of ranks from 1 to 64; 4 without one. Prints what is wrong and returns 0 otherwise.
int parse_num_ranks(int argc, char** argv);

// Collective. Runs the layer a few times with other tokens each time, on a GPU if there is one, and prints a line. Returns 0
// if every element that came back is right; prints what went wrong and returns 1 otherwise.
int run_layer(std::shared_ptr<expertwire::Bootstrap> bootstrap);
