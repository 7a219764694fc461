// One word that its owner advances once an operation and that every peer reads or sleeps on. docs/protocol.md has the
// whole argument; tests/protocol_model.py checks it.
//
// The word holds the epoch last posted, and a bit that says that the owner was given up after it. Posting and giving up
// are compare-and-swap operations on the same word, so exactly one of them wins, and all ranks read the same verdict for
// every epoch: posted if the word has reached it, lost if the bit is set on an earlier one.
#pragma once

#include <chrono>
#include <cstdint>

#include "shared/epochs.cuh"
#include "shared/layout.cuh"

namespace expertwire::cpu {

struct EpochWord {
  std::uint32_t value;
  std::uint32_t sleepers;  // peers in sleep_on(): the owner calls the kernel only for them
};

constexpr std::uint32_t kLostBit = 0x8000'0000u;
constexpr Epochs kWordEpochs{0x7FFF'FFFEu};
static_assert(kWordEpochs.last < kLostBit && kWordEpochs.last % kNumBuffers == 0);

enum class WordState {
  PENDING,  // the owner is still at the epoch before
  POSTED,   // it has posted this epoch, and perhaps the next
  LOST,     // it was given up before this epoch
  AHEAD,    // further on than a rank can get that still counts on this one: this rank has been given up
};

// Acquire: what the owner wrote before posting is visible after POSTED. `previous` is the epoch before `epoch`.
WordState look(const EpochWord& word, std::uint32_t previous, std::uint32_t epoch);

// Owner. Release. False: the owner was given up by a peer.
bool post(EpochWord& word, std::uint32_t previous, std::uint32_t epoch);

// Peer. Gives the owner up for all that follows `previous`, unless it has moved on; returns what became of it.
WordState give_up(EpochWord& word, std::uint32_t previous, std::uint32_t epoch);

// Owner, after its last read of peers' buffers in an operation. True: it was given up meanwhile, so that others may have
// gone on and written over what it read. The reads come before the look.
bool was_given_up(EpochWord& word);

// Returns when the word no longer holds `seen`, when woken, or after `at_most`; spurious returns are allowed.
void sleep_on(EpochWord& word, std::uint32_t seen, std::chrono::nanoseconds at_most);
void wake_sleepers(EpochWord& word);

// The value to sleep on.
std::uint32_t load_word(const EpochWord& word);

void cpu_relax();

}  // namespace expertwire::cpu
