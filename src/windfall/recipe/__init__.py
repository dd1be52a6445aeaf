"""The recipe: everything a run depends on, in one TOML file."""
