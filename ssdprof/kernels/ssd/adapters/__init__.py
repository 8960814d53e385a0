"""Kernels of other libraries, as `registry.Implementation`s.  Each module's `load` imports its library.

final_states have the library's own dtype, so that times do not include a conversion.  Plans give no workspace, because
it is measured.
"""
