"""Kernels of other libraries, called as `registry.Implementation`s.  Each module's `load` imports its library.

They leave final_states in the dtype in which their library leaves them, so that nobody times a conversion that the
library does not make.  Their plan knows no workspace: it is measured.
"""
