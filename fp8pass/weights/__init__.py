"""FP8 copies of weights that enter graphs as inputs: cached until a Parameter or its scale changes, or made anew."""
