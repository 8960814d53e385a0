"""Kernels of other libraries, called as `registry.Implementation`s.  Each module's `load` imports its library.

An adapter holds no code of the library.  It refuses what the library would do wrong without a word.  Its plan knows no
workspace: that is measured.
"""
