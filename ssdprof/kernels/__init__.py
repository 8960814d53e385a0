"""Bundled kernels, usable without the rest of ssdprof.  Imports nothing of ssdprof outside this package."""
