"""The load driver behind ``kvgate replay --target``, live studies and benchmarks: requests sent, answers timed."""
