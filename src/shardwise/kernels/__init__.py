"""Kernels that beat the compiler's, each with a reference in plain torch beside it."""
