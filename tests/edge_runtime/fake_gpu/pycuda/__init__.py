"""A CUDA layer that is not there, for tests: see `driver`."""
