"""Tool-call and reasoning syntax, one file per model family."""
