"""Model lookup and download with checksum verification."""
