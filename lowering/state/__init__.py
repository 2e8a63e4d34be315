"""The state of delayed scaling: scales loaded, amaxes recorded, the step boundary."""
