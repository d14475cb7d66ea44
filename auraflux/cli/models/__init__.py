"""Commands about models by name: `run`, `ps`, `show`, `rm` and the table of `list --remote`."""
