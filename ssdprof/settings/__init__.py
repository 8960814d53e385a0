"""What a project sets for every command: `[tool.ssdprof]` of pyproject.toml, or ssdprof.toml."""
