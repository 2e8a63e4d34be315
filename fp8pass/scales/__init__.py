"""The amax histories and scales of delayed scaling: kept per tensor name, updated at step boundaries, saved and loaded."""
