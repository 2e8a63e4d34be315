"""The weights of a compiled model in FP8, as its forward GEMMs read them, in formats that inference engines load."""
