"""What works on this machine: every operation and every recipe."""
