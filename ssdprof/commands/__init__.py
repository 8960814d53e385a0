"""The commands.

`jobs.options` declares their options.  `cli` imports a module of this folder when one of its
commands runs.
"""
