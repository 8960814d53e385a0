"""The settings of a project for all commands: `[tool.ssdprof]` in pyproject.toml, or ssdprof.toml."""
