#include "backend/cpu/epoch_word.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <ctime>

namespace expertwire::cpu {
namespace {

using Word = std::atomic_ref<std::uint32_t>;
static_assert(Word::is_always_lock_free, "the word is shared between processes");

Word value_of(const EpochWord& word) { return Word(const_cast<std::uint32_t&>(word.value)); }

bool swap_from(EpochWord& word, std::uint32_t expected, std::uint32_t desired) {
  // Sequentially consistent: paired with sleep_on(), either the sleeper sees the new value or we see the sleeper.
  return value_of(word).compare_exchange_strong(expected, desired, std::memory_order_seq_cst);
}

}  // namespace

std::uint32_t load_word(const EpochWord& word) { return value_of(word).load(std::memory_order_acquire); }

WordState look(const EpochWord& word, std::uint32_t previous, std::uint32_t epoch) {
  const std::uint32_t value = load_word(word);
  const std::uint32_t posted = value & ~kLostBit;
  if (posted == epoch || posted == kWordEpochs.after(epoch)) return WordState::POSTED;
  if ((value & kLostBit) != 0) return WordState::LOST;
  return posted == previous ? WordState::PENDING : WordState::AHEAD;
}

bool post(EpochWord& word, std::uint32_t previous, std::uint32_t epoch) {
  if (!swap_from(word, previous, epoch)) return false;
  if (Word(word.sleepers).load(std::memory_order_seq_cst) != 0) wake_sleepers(word);
  return true;
}

WordState give_up(EpochWord& word, std::uint32_t previous, std::uint32_t epoch) {
  if (swap_from(word, previous, previous | kLostBit)) wake_sleepers(word);
  return look(word, previous, epoch);
}

bool was_given_up(EpochWord& word) {
  // A read-modify-write, for its release half: earlier reads do not move behind it.
  return (value_of(word).fetch_or(0, std::memory_order_acq_rel) & kLostBit) != 0;
}

void sleep_on(EpochWord& word, std::uint32_t seen, std::chrono::nanoseconds at_most) {
  Word sleepers(word.sleepers);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (value_of(word).load(std::memory_order_seq_cst) == seen) {
    timespec limit{};
    limit.tv_sec = static_cast<time_t>(at_most.count() / 1'000'000'000);
    limit.tv_nsec = static_cast<long>(at_most.count() % 1'000'000'000);
    // Any return is a reason to look again: woken, value changed, interrupted or timed out. Not FUTEX_PRIVATE: the word
    // is shared between processes.
    syscall(SYS_futex, &word.value, FUTEX_WAIT, seen, &limit, nullptr, 0);
  }
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void wake_sleepers(EpochWord& word) { syscall(SYS_futex, &word.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace expertwire::cpu
