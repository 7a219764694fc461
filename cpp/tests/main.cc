#include "support.hpp"

int main(int argc, char** argv) { return expertwire::test::run_test_cases(argc, argv); }
