"""A package of DeepGEMM that SGLang looks into where it finds a GPU."""
