"""The load driver behind ``kvgate replay --url``, live studies and benchmarks: requests sent, answers timed."""
