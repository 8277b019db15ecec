"""The command line: one file a verb. Parses, calls, prints; no logic of its own, and no torch before it is needed."""
