"""Speed of experts that are offloaded to disk: prefetch and expert cache against memory-mapped files."""
