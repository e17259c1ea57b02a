"""Native structures of kvgate. Imported by router/index and router/wire alone."""
