"""Options that several commands share, and the settings made from them."""
