"""The commands.  `options` declares them; a module of this folder is imported when one of its
commands runs.
"""
