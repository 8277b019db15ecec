"""Model directories: ours and those of other tools."""
