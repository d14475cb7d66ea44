"""Tables, pages and messages that commands print."""
