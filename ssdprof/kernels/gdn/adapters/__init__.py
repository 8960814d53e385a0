"""Kernels of other libraries, as `registry.Implementation`s.  Each module's `load` imports its library.

An adapter contains no code of the library.  It rejects inputs for which the library silently returns wrong results.
Plans give no workspace, because it is measured.
"""
